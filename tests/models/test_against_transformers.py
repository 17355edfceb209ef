"""Each model file against transformers: the same logits, the same 64 greedy tokens, however the
tokens are cut up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from beside_transformers import PROMPT, SMALL, assert_close, decoder_of, greedy_of
from paged_cache import PagedCache
from parity_cases import CASES, NEEDED
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.models.decoder import Decoder
from penstock.models.read_config import model_config_of

pytestmark = pytest.mark.torch

STEPS = 18  # greedy tokens that are drawn one by one: over the end of a block
Said = tuple[list[int], list[int], Tensor]  # prompt, greedy tokens, logits of both


def _theirs(name: str) -> transformers.PreTrainedModel:
    """A model with every weight drawn: biases and norm weights too, which transformers starts at 0
    and 1."""
    torch.manual_seed(len(name))
    kind, changes = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        spread = 0.2 if parameter.dim() > 1 else 0.5
        gemma = kind.startswith("Gemma")
        recurrent = kind.startswith(("Qwen3_5", "Qwen3Next"))
        one_plus = kind.startswith(("Gemma2", "Gemma3")) or (
            recurrent and "linear_attn" not in parameter_name
        )
        # where the norm is w, and 1 + w counts
        centre = 1.0 if "norm" in parameter_name and not one_plus else 0.0
        if "embed_tokens" in parameter_name and gemma:
            spread = 0.02  # tied, and multiplied by 8: else each token is its own successor
        if kind == "Olmo2" and ("q_norm" in parameter_name or "embed_tokens" in parameter_name):
            # else norms even out what a token is
            centre, spread = (
                3.0 * (parameter.dim() == 1),
                1.0,
            )
        torch.nn.init.normal_(parameter, centre, spread)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("_bias"):  # what routers add for the choice
            torch.nn.init.normal_(buffer, 0.0, 0.5)
        elif buffer_name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, 1.0, 0.2)
    return model


@pytest.fixture(scope="module", params=list(CASES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Said, Decoder]:
    """What theirs says, and ours."""
    theirs = _theirs(request.param)
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return greedy_of(theirs), decoder_of(folder)


def test_logits_and_greedy_tokens_are_those_of_transformers(pair: tuple[Said, Decoder]) -> None:
    (prompt, greedy, logits), ours = pair
    assert len(set(greedy)) > 10, "a model that repeats itself shows little"
    whole = PagedCache(ours, 1, 9).step([], [(0, prompt + greedy)])
    assert_close(whole, logits)
    assert whole[PROMPT - 1 : -1].argmax(-1).tolist() == greedy

    # chunked prefill of sequence 1, beside another sequence that decodes
    cache = PagedCache(ours, 3, 9, seed=1)
    cache.step([], [(0, prompt[:33])])
    cache.step([(0, prompt[33])], [(1, prompt[:19])])
    seen = cache.step([(0, prompt[34])], [(1, prompt[19:20]), (2, prompt[:40])])
    assert_close(seen[0], logits[34])
    assert_close(seen[1], logits[19])
    assert_close(cache.step([], [(1, prompt[20:-1])]), logits[20 : PROMPT - 1])
    token, drawn = prompt[-1], []
    for position in range(PROMPT - 1, PROMPT - 1 + STEPS):
        scores = cache.step([(1, token)])[0]
        assert_close(scores, logits[position])
        token = int(scores.argmax())
        drawn.append(token)
    assert drawn == greedy[:STEPS]


def test_token_by_token_is_the_same_as_whole(pair: tuple[Said, Decoder]) -> None:
    """From the first token on, over two blocks; later ones are the greedy tokens' test's."""
    (prompt, _, logits), ours = pair
    cache = PagedCache(ours, 2, 9, seed=2)
    for position, token in enumerate(prompt[:19]):
        both = cache.step([(1, token), (0, prompt[-1 - position])])
        assert_close(both[0], logits[position])


@pytest.mark.parametrize(
    "case", ["llama-biases", "qwen3", "qwen2-windows", "gemma3", "cohere2", "cohere2-biases"]
)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path: Path, case: str) -> None:
    theirs = _theirs(case)
    theirs.save_pretrained(tmp_path)
    prompt, greedy, exact = greedy_of(theirs)
    half = theirs.to(torch.bfloat16)
    with torch.inference_mode():
        their_error = (
            (half(torch.tensor([prompt + greedy])).logits[0].float() - exact).square().mean().sqrt()
        )
    logits = PagedCache(decoder_of(tmp_path, torch.bfloat16), 1, 9).step([], [(0, prompt + greedy)])
    our_error = (logits.float() - exact).square().mean().sqrt()
    assert logits.dtype == torch.bfloat16
    assert 0 < our_error < 1.2 * their_error < 0.2 * exact.std()


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in CASES.values()}))
def test_every_key_that_transformers_can_write_is_understood(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**SMALL | NEEDED.get(kind, {}))
    whole, short = (json.loads(config.to_json_string(use_diff=diff)) for diff in (False, True))
    assert len(whole) > len(short)
    assert model_config_of(whole, "whole") == model_config_of(short, "short")


def test_the_spelling_of_transformers_4_computes_the_same(tmp_path: Path) -> None:
    _theirs("llama-llama3").save_pretrained(tmp_path)
    prompt = list(range(50, 120))
    expected = PagedCache(decoder_of(tmp_path), 1, 9).step([], [(0, prompt)])
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "torch_dtype": raw.pop("dtype"),
    }
    path.write_text(json.dumps(raw))
    assert torch.equal(PagedCache(decoder_of(tmp_path), 1, 9).step([], [(0, prompt)]), expected)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("dt_bias", None, "lack tensor 'model.layers.0.linear_attn.dt_bias'"),
        (
            "conv1d.weight",
            torch.zeros(128 + 64 + 64, 1, 3),
            r"conv1d.weight' has shape \[256, 1, 3\], config.json asks",
        ),
        (
            "A_log",
            torch.tensor([0.0, float("nan"), 0.0, 0.0]),
            "linear_attn.A_log' holds what is no finite number",
        ),
    ],
)
def test_what_a_delta_layer_lacks_is_named(
    name: str, change: Tensor | None, said: str, tmp_path: Path
) -> None:
    _theirs("qwen3-5").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    whole = f"model.layers.0.linear_attn.{name}"
    del tensors[whole]
    save_file(
        tensors if change is None else tensors | {whole: change}, path, metadata={"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=said):
        decoder_of(tmp_path)

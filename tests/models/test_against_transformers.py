"""Each model file against transformers: the same logits, the same 64 greedy tokens, however the tokens are cut up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_cache import PagedCache
from torch import Tensor

from penstock.kernels.choose import choose
from penstock.models.decoder import Decoder
from penstock.models.read_config import model_config_of
from penstock.weights.load import load_model

pytestmark = pytest.mark.torch

SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_MSCALE = YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
YARN_ATTENTION = YARN | {"attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5}

MOE = {
    "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": False,
}  # fmt: skip
GEMMA = {
    "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 21, "sliding_window_pattern": 3,
    "pad_token_id": None,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa-wide": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": YARN_MSCALE}),
    "llama-yarn-attention": ("Llama", {"rope_parameters": YARN_ATTENTION}),
    "mistral-window": ("Mistral", {"sliding_window": 21}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "qwen3-bias-windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "qwen3-moe-unnormed-some-layers": ("Qwen3Moe", MOE | {"mlp_only_layers": [1], "num_experts_per_tok": 1}),
    "qwen3-moe-every-second": ("Qwen3Moe", MOE | {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", GEMMA),
    "gemma3-ropes-cap": (
        "Gemma3Text",
        GEMMA
        | {
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}
PROMPT = 70  # longer than the windows, and over several blocks
NEW = 64


def _theirs(name: str) -> transformers.PreTrainedModel:
    """A model with every weight drawn: biases and norm weights too, which transformers starts at 0 and 1."""
    torch.manual_seed(len(name))
    kind, changes = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        spread = 0.2 if parameter.dim() > 1 else 0.5
        centre = 1.0 if "norm" in parameter_name and kind != "Gemma3Text" else 0.0  # Gemma's are w, and 1 + w counts
        if "embed_tokens" in parameter_name and kind == "Gemma3Text":
            spread = 0.02  # tied, and multiplied by 8: else each token is its own successor
        torch.nn.init.normal_(parameter, centre, spread)
    return model


def _ours(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    device = torch.device("cpu")
    ops = choose(device, dtype, "auto")
    return load_model(folder, load_format="auto", dtype=dtype, device=device, ops=ops, seed=0)


def _assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    theirs = _theirs(request.param)
    folder = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return theirs, _ours(folder)


@torch.inference_mode()
def _expected(theirs: Any) -> tuple[list[int], list[int], Tensor]:
    """A prompt, its 64 greedy tokens, and the logits of the whole."""
    prompt = torch.randint(0, 211, (PROMPT,), generator=torch.Generator().manual_seed(3))
    whole = theirs.generate(
        prompt[None],
        attention_mask=torch.ones(1, PROMPT, dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )[0]
    return prompt.tolist(), whole[PROMPT:].tolist(), theirs(whole[None]).logits[0]


def test_logits_and_greedy_tokens_are_those_of_transformers(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    prompt, greedy, logits = _expected(theirs)
    assert len(set(greedy)) > 10, "a model that repeats itself shows little"
    _assert_close(PagedCache(ours, 1, 9).step([], [(0, prompt + greedy)]), logits)

    cache = PagedCache(ours, 3, 9, seed=1)  # chunked prefill of sequence 1, beside another sequence that decodes
    cache.step([], [(0, prompt[:33])])
    cache.step([(0, prompt[33])], [(1, prompt[:19])])
    seen = cache.step([(0, prompt[34])], [(1, prompt[19:20]), (2, prompt[:40])])
    _assert_close(seen[0], logits[34])
    _assert_close(seen[1], logits[19])
    _assert_close(cache.step([], [(1, prompt[20:-1])]), logits[20 : PROMPT - 1])
    token, drawn = prompt[-1], []
    for position in range(PROMPT - 1, PROMPT + NEW - 1):
        scores = cache.step([(1, token)])[0]
        _assert_close(scores, logits[position])
        token = int(scores.argmax())
        drawn.append(token)
    assert drawn == greedy


def test_token_by_token_is_the_same_as_whole(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    prompt, _, logits = _expected(theirs)
    cache = PagedCache(ours, 2, 9, seed=2)
    for position, token in enumerate(prompt):
        both = cache.step([(1, token), (0, prompt[-1 - position])])
        _assert_close(both[0], logits[position])


@pytest.mark.parametrize("case", ["llama-biases", "qwen3", "qwen2-windows", "gemma3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path: Path, case: str) -> None:
    theirs = _theirs(case)
    theirs.save_pretrained(tmp_path)
    prompt, greedy, exact = _expected(theirs)
    half = theirs.to(torch.bfloat16)
    with torch.inference_mode():
        their_error = (half(torch.tensor([prompt + greedy])).logits[0].float() - exact).square().mean().sqrt()
    logits = PagedCache(_ours(tmp_path, torch.bfloat16), 1, 9).step([], [(0, prompt + greedy)])
    our_error = (logits.float() - exact).square().mean().sqrt()
    assert logits.dtype == torch.bfloat16
    assert 0 < our_error < 1.2 * their_error < 0.2 * exact.std()


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma3Text"])
def test_every_key_that_transformers_can_write_is_understood(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**SMALL)
    whole, short = (json.loads(config.to_json_string(use_diff=diff)) for diff in (False, True))
    assert len(whole) > len(short)
    assert model_config_of(whole, "whole") == model_config_of(short, "short")


def test_the_spelling_of_transformers_4_computes_the_same(tmp_path: Path) -> None:
    _theirs("llama-llama3").save_pretrained(tmp_path)
    prompt = list(range(50, 120))
    expected = PagedCache(_ours(tmp_path), 1, 9).step([], [(0, prompt)])
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": raw.pop("dtype")}
    path.write_text(json.dumps(raw))
    assert torch.equal(PagedCache(_ours(tmp_path), 1, 9).step([], [(0, prompt)]), expected)

"""speculative_config of methods mtp, eagle3 and dflash: drafts are those of the layer computed over all
tokens so far, and the tokens are those without drafts, in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from draft_models import DRAFTERS, VOCABULARY, Drafted, make_drafted, make_mtp_model, mtp
from draft_requests import open_llm, params_of, prompts_of
from eagle_models import SMALL
from equal_steps import count_as_equal
from safetensors.torch import load_file, save_file
from seen_drafts import check_drafts, seen_drafts
from toy_proposer import Counts

from penstock import SamplingParams
from penstock.errors import CheckpointError, UsageError
from penstock.layers.linear import Linear
from penstock.schedule.step import Drafts, Int32

pytestmark = pytest.mark.torch

PROMPTS = [[token % VOCABULARY for token in prompt] for prompt in prompts_of(6)]
ASKS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7, "n": 3},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 9},
    {"temperature": 1.0, "logit_bias": {60: 3.0}},
]
TOKENS = 20  # each sample crosses a block's end
FEW = 9  # of runs that only have to leave something behind, or are held to another run
READ_AT_ONCE = {"steps_ahead": 0}
PREEMPTED = {"steps_ahead": 3, "preempt_every": 3}
FEW_BLOCKS = {"steps_ahead": 2, "kv_cache_tokens": 192 + 64}
CHUNKED = {"steps_ahead": 2, "max_num_batched_tokens": 24, "max_num_seqs": 5}


class Pausing(Counts):
    """Offers all drafts, with `pauses` in every other sixteen steps alone; counts what was right in
    the others' first half."""

    def __init__(self, most: int, pauses: bool) -> None:
        self.most, self.pauses, self.step = most, pauses, 0
        self.tried = self.right = 0

    def offer(self, rows: Int32, lengths: Int32, most: Int32) -> Drafts:
        self.step += 1
        asleep = self.pauses and self.step // 16 % 2 == 1
        self.proposes = 0 if self.pauses and (self.step + 1) // 16 % 2 == 1 else self.most
        return super().offer(rows, lengths, 0 * most if asleep else most)

    def settled(self, rows: Int32, offered: Int32, right: Int32) -> None:
        if self.step // 16 % 2 == 0 and self.step % 16 < 8 and self.step > 16:
            self.tried += int(np.count_nonzero(offered))
            self.right += int(right.sum())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Drafted]:
    """Makes each model once, whatever order its tests come in."""
    return cache(lambda name: make_drafted(tmp_path_factory.mktemp("model"), name))


@pytest.fixture(params=DRAFTERS)
def model(request: Any, made: Callable[[str], Drafted]) -> Drafted:
    return made(request.param)


def told(outs: list[Any]) -> list[Any]:
    return [[(one.token_ids, one.finish_reason) for one in out.outputs] for out in outs]


def begun(plain: list[Any], tokens: int) -> list[Any]:
    """What runs of fewer tokens give."""
    return [[(ids[:tokens], reason) for ids, reason in samples] for samples in plain]


@pytest.mark.parametrize(
    ("model", "cached"),
    [(name, True) for name in DRAFTERS]
    + [("glm4_moe", False), ("eagle3 qwen3", False), ("dflash llama", False)],
    indirect=["model"],
)
def test_drafts_are_those_of_the_layer_over_all_tokens(
    model: Drafted, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """Prompts in chunks of 24 tokens, rows beside each other, right and wrong drafts; with a
    prefix cache the second time, the K and V at the end of the cached prefix may be of another next
    token, so each prompt comes twice."""
    with open_llm(
        model.folder,
        **model.config(),
        steps_ahead=0,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        enable_prefix_caching=cached,
    ) as llm:
        llm._engine.scheduler.drafting.drafter = drafter = Counts()
        drafter.most, drafter.reach = 3, 6
        asks = params_of([{"temperature": 0.0}] * len(PROMPTS), 20)
        first = llm.generate(PROMPTS, asks, use_tqdm=False)
        seen = seen_drafts(monkeypatch)
        assert told(llm.generate(PROMPTS, asks, use_tqdm=False)) == told(first)
        right, tried = llm._engine.scheduler.drafting.right, llm._engine.scheduler.drafting.counts
        assert 0 < right.sum() < tried["tokens"] and right[1] > 0
    check_drafts(seen, model.twin, 3)


@pytest.fixture(scope="module")
def without_drafts() -> Callable[[Path], list[Any]]:
    @cache
    def told_by(folder: Path) -> list[Any]:
        with open_llm(folder) as llm:
            return told(llm.generate(PROMPTS, params_of(ASKS, TOKENS), use_tqdm=False))

    return told_by


@pytest.fixture
def plain(model: Drafted, without_drafts: Callable[[Path], list[Any]]) -> list[Any]:
    return without_drafts(model.folder)


@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        ("glm4_moe", READ_AT_ONCE),
        ("glm4_moe", PREEMPTED),
        ("deepseek_v3", FEW_BLOCKS),
        ("deepseek_v3", CHUNKED),
        ("qwen3_5_text", PREEMPTED),
        ("qwen3_5_text", CHUNKED),
        ("eagle3 llama", {"steps_ahead": 1}),
        ("eagle3 llama", FEW_BLOCKS),
        ("eagle3 qwen3", PREEMPTED),
        ("eagle3 qwen3", CHUNKED),
        ("dflash llama", FEW_BLOCKS),
        ("dflash llama", PREEMPTED),
        ("dflash qwen3", READ_AT_ONCE),
        ("dflash qwen3", CHUNKED),
    ],
    indirect=["model"],
)
def test_the_tokens_are_the_same(
    model: Drafted,
    plain: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    knobs: dict[str, Any],
) -> None:
    count_as_equal(monkeypatch)
    with open_llm(model.folder, **model.config(), **knobs) as llm:
        assert told(llm.generate(PROMPTS, params_of(ASKS, TOKENS), use_tqdm=False)) == plain
        drafting = llm._engine.scheduler.drafting
        assert 0 < drafting.right.sum() < drafting.counts["tokens"]
        assert llm.stats()["spec_accepted_tokens"] == drafting.right.sum()


@pytest.mark.parametrize("temperature, most, steps", [(1.0, 1, 26), (0.0, 3, 14), (1.0, 8, 8)])
def test_a_layer_that_knows_the_model_is_always_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, most: int, steps: int
) -> None:
    """At temperature 1 too: a draft is drawn with the noise of the model's own draw."""
    count_as_equal(monkeypatch)
    make_mtp_model(tmp_path, "glm4_moe", spread=0.0)
    ask = SamplingParams(
        temperature=temperature, max_tokens=48, ignore_eos=True, seed=5, detokenize=False
    )
    with open_llm(tmp_path, **mtp(most), steps_ahead=0) as llm:
        llm.generate(PROMPTS[:1], ask, use_tqdm=False)
        before = llm._engine.scheduler.counts["steps"]
        llm.generate(PROMPTS[1:2], ask, use_tqdm=False)
        assert llm._engine.scheduler.counts["steps"] - before <= steps
        drafting = llm._engine.scheduler.drafting
        # none wrong but those behind the last token
        assert drafting.right.sum() >= drafting.counts["tokens"] - 2 * most


def test_behind_a_sleep_and_with_new_weights(
    model: Drafted, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    count_as_equal(monkeypatch)
    with open_llm(model.folder, **model.config()) as llm:
        first = llm.generate(PROMPTS, params_of(ASKS, FEW), use_tqdm=False)
        assert told(first) == begun(plain, FEW)
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(model.folder)
        before = llm._engine.scheduler.drafting.right.sum()
        assert told(llm.generate(PROMPTS, params_of(ASKS, TOKENS), use_tqdm=False)) == plain
        assert llm._engine.scheduler.drafting.right.sum() > before


def test_a_head_copied_to_fp8_scores_drafts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_as_equal(monkeypatch)
    monkeypatch.setattr(Linear, "copied_bytes", lambda self, ops: 1)  # as on a GPU with fp8
    make_mtp_model(tmp_path, "glm4_moe")
    asks, found = params_of(ASKS, TOKENS), list[Any]()
    for more in ({}, mtp()):
        with open_llm(tmp_path, **more) as llm:
            found.append(told(llm.generate(PROMPTS, asks, use_tqdm=False)))
            if not more:
                continue
            assert llm._engine.scheduler.drafting.right.sum() > 0
            model = llm._engine.runner._model
            hidden = torch.randn(5, model.config.hidden_size)
            exact, rounded = model.logits(hidden), model.draft_logits(hidden)
            assert 0 < (exact - rounded).abs().max() < 0.1 * exact.abs().max()
            with torch.inference_mode():
                model._draft_head.product.matrix.scale.zero_()
            llm.update_weights(tmp_path)
            assert torch.equal(llm._engine.runner._model.draft_logits(hidden), rounded)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "model", ["deepseek_v3", "qwen3_5_text", "eagle3 llama", "dflash qwen3"], indirect=True
)
def test_two_ranks_draft_the_same(
    model: Drafted, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are a step's input, so ranks with other drafts would give other tokens."""
    count_as_equal(monkeypatch)
    right = []
    for ranks in (1, 2):
        with open_llm(model.folder, **model.config(), tensor_parallel_size=ranks) as llm:
            outs = llm.generate(PROMPTS, params_of(ASKS, FEW), use_tqdm=False)
            assert told(outs) == begun(plain, FEW)
            right.append(llm._engine.scheduler.drafting.right.sum())
    # the drafts of one rank, but for scores that are nearly equal
    assert right[1] > 0.9 * right[0] > 0


@pytest.mark.parametrize(
    ("model", "most"), [*zip(DRAFTERS, (8, 3, 8, 3, 8, 8, 3), strict=True)], indirect=["model"]
)
def test_rows_that_end_where_the_context_does(
    model: Drafted, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    count_as_equal(monkeypatch)
    left = [40 - len(prompt) for prompt in PROMPTS[:3]]
    asks = [
        SamplingParams(temperature=0.5 * k, seed=k, ignore_eos=True, max_tokens=left[k])
        for k in range(3)
    ]
    found = []
    for more in ({}, model.config(most)):
        with open_llm(model.folder, max_model_len=40, **more) as llm:
            found.append(told(llm.generate(PROMPTS[:3], asks, use_tqdm=False)))
    assert found[0] == found[1]
    assert [len(ids) for ((ids, _),) in found[0]] == left


def test_beside_prompts_that_are_scored(model: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
    count_as_equal(monkeypatch)
    asks = params_of([{"temperature": 0.0, "prompt_logprobs": 1}, {}, {"prompt_logprobs": 0}], 20)
    found = []
    for more in ({}, model.config()):
        with open_llm(model.folder, max_num_batched_tokens=24, max_num_seqs=8, **more) as llm:
            outs = llm.generate(PROMPTS[3:6], asks, use_tqdm=False)
            scores = [next(iter(at.values())).logprob for at in outs[0].prompt_logprobs[1:]]
            found.append((told(outs), pytest.approx(scores, abs=1e-4)))
    assert found[0][0] == found[1][0] and found[0][1] == found[1][1].expected


def test_rows_draft_well_after_a_pause(tmp_path: Path) -> None:
    """The layer keeps up with rows that may draft soon."""
    make_mtp_model(tmp_path, "glm4_moe")
    right = []
    for pauses in (False, True):
        with open_llm(tmp_path, **mtp(), steps_ahead=0) as llm:
            llm._engine.scheduler.drafting.drafter = drafter = Pausing(3, pauses)
            asks = params_of([{"temperature": 0.0}] * 4, 60)
            llm.generate(PROMPTS[:4], asks, use_tqdm=False)
            right.append(drafter.right / drafter.tried)
    assert right[1] > 0.7 * right[0] > 0


@pytest.mark.parametrize(
    "model", ["glm4_moe", "deepseek_v3", "eagle3 qwen3", "dflash llama"], indirect=True
)
def test_keys_and_values_in_eight_bits(model: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
    count_as_equal(monkeypatch)
    found = []
    for more in ({}, model.config()):
        with open_llm(model.folder, kv_cache_dtype="fp8", **more) as llm:
            found.append(told(llm.generate(PROMPTS, params_of(ASKS, TOKENS), use_tqdm=False)))
    assert found[0] == found[1]


def test_dummy_weights_make_way_for_a_drafters_own(tmp_path: Path) -> None:
    made = make_drafted(tmp_path, "eagle3 llama")
    asks = params_of([{"temperature": 0.0}], 12)
    found = []
    for more in ({}, {"load_format": "dummy"}):
        with open_llm(tmp_path, **made.config(), steps_ahead=0, **more) as llm:
            if more:
                llm.update_weights(tmp_path)
            layer: Any = llm._engine.runner._model.drafter
            outs = told(llm.generate(PROMPTS[:1], asks, use_tqdm=False))
            found.append(
                (outs, layer.head.tokens.tolist(), layer.embedding.table.value.sum().item())
            )
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["eagle3 llama", "dflash llama"])
def test_a_model_that_norms_what_its_layers_give_has_no_drafter(tmp_path: Path, name: str) -> None:
    made = make_drafted(tmp_path, name)
    keys = json.loads((tmp_path / "config.json").read_text())
    other = transformers.Glm4Config(**{name: keys[name] for name in SMALL})
    other.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    named = {"architectures": ["Glm4ForCausalLM"], "eos_token_id": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    with pytest.raises(UsageError, match="a Glm4ForCausalLM norms it first: take method 'ngram'"):
        open_llm(tmp_path, **made.config(), load_format="dummy")


def test_weights_without_the_layer_are_refused(tmp_path: Path) -> None:
    make_mtp_model(tmp_path, "glm4_moe")
    path = tmp_path / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if not n.startswith("model.layers.2.")}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match="have none: take weights that have it, or start the eng"):
        open_llm(tmp_path, **mtp())


@pytest.mark.parametrize(
    "offset, why", [(None, r"lack 'd2t' \[4\]"), ([0, 0, -1, 0], "is no map to 300 tokens")]
)
def test_a_drafter_without_a_map_of_tokens_is_refused(
    tmp_path: Path, offset: list[int] | None, why: str
) -> None:
    made = make_drafted(tmp_path, "eagle3 qwen3")
    path = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(path)
    del tensors["d2t"]
    if offset is not None:
        tensors["d2t"] = torch.tensor(offset)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"speculative_config: .*{why}"):
        open_llm(tmp_path, **made.config())


def test_more_drafts_than_a_block_has_masks_are_refused(tmp_path: Path) -> None:
    made = make_drafted(tmp_path, "dflash qwen3")
    path = tmp_path / "drafter" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"block_size": 4}))
    with pytest.raises(
        UsageError, match=r"is 4, and .* has a block_size of 4: take at most 3"
    ) as it:
        open_llm(tmp_path, **made.config(4))
    assert it.value.param == "speculative_config" and "\n" not in str(it.value)
    with open_llm(tmp_path, **made.config(3)) as llm:
        assert llm.generate(PROMPTS[:1], use_tqdm=False)


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    from engine_model import make_folder

    with pytest.raises(UsageError, match="none is served of a LlamaForCausalLM") as caught:
        open_llm(make_folder(tmp_path), **mtp())
    assert caught.value.param == "speculative_config"


@pytest.mark.parametrize(
    "given, why",
    [
        (
            {"method": "mtp", "prompt_lookup_max": 3},
            "key 'prompt_lookup_max' is no key of method mtp: take method, num",
        ),
        ({"method": "mtp", "num_speculative_tokens": 9}, "must be a number between 1 and 8, not 9"),
        ({"method": "eagle3"}, "method eagle3 needs model, a drafter's folder or hub id"),
        ({"method": "dflash", "model": 3}, "method dflash needs model, a drafter's folder or hub"),
        ({"method": "ngram", "model": "x"}, "key 'model' is no key of method ngram"),
    ],
)
def test_what_is_refused(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        open_llm(tmp_path, speculative_config=given)
    with pytest.raises(UsageError, match="draft_from is read only with speculative_config of"):
        open_llm(tmp_path, **mtp(), draft_from="group")


@pytest.mark.parametrize(
    "name, changed, why",
    [
        ("eagle3 llama", {"speculators_model_type": "peagle"}, "'peagle' is not served: convert"),
        ("eagle3 llama", {"speculators_model_type": ["x"]}, r"\['x'\] is not served: convert the"),
        ("eagle3 llama", {"speculators_model_type": "dflash"}, "is 'dflash': take method 'dflash'"),
        ("eagle3 llama", {"fc_norm": True}, "fc_norm"),
        ("eagle3 llama", {"eagle_aux_hidden_state_layer_ids": [1, 5]}, "layers between 1 and 4"),
        ("eagle3 llama", {"eagle_aux_hidden_state_layer_ids": [2, 2]}, "must list distinct layers"),
        ("eagle3 llama", {"draft_vocab_size": 40}, "lm_head.weight' has shape"),
        ("eagle3 llama", {"target_hidden_size": 64}, "target_hidden_size is 64, and the model's"),
        ("eagle3 llama", {"num_hidden_layers": 2}, "transformer_layer_config must have one layer"),
        ("dflash qwen3", {"speculators_model_type": "eagle3"}, "is 'eagle3': take method 'eagle3'"),
        ("dflash qwen3", {"speculators_model_type": "dspark"}, "'dspark' is not served: convert"),
        ("dflash qwen3", {"sample_from_anchor": True}, "sample_from_anchor is not supported"),
        ("dflash qwen3", {"aux_hidden_state_layer_ids": None}, "'aux_hidden_state_layer_ids' is m"),
        ("dflash qwen3", {"aux_hidden_state_layer_ids": [0, 2]}, "layers between 1 and 4"),
        ("dflash qwen3", {"aux_hidden_state_layer_ids": [1, 2]}, "'fc.weight' has shape"),
        ("dflash qwen3", {"mask_token_id": None}, "'mask_token_id' is missing"),
        ("dflash qwen3", {"mask_token_id": 300}, "mask_token_id must be .* from 0 to 299, not 300"),
        ("dflash qwen3", {"block_size": 1}, "block_size must be a whole number from 2"),
        ("dflash qwen3", {"draft_vocab_size": 40}, "lm_head.weight' has shape"),
        ("dflash qwen3", {"hidden_size": 64}, "hidden_size is 64, and the model's 32: it drafts"),
        ("dflash qwen3", {"vocab_size": 512}, "vocab_size is 512, and the model's 300: it drafts"),
        ("dflash qwen3", {"num_hidden_layers": 3}, "lack tensor 'layers.2.input_layernorm.w"),
        (
            "dflash qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "transformer_layer_config has layers of sliding_attention",
        ),
        ("dflash qwen3", {"model_type": "gemma3"}, "of model_type 'gemma3': only llama and qwen3"),
    ],
)
def test_a_drafter_of_another_model_is_refused(
    tmp_path: Path, name: str, changed: dict[str, Any], why: str
) -> None:
    made = make_drafted(tmp_path, name)
    path = tmp_path / "drafter" / "config.json"
    given = json.loads(path.read_text())
    layer = given["transformer_layer_config"]
    of_layer = layer.keys() | {"use_sliding_window", "sliding_window", "max_window_layers"}
    for key, value in changed.items():
        (layer if key in of_layer else given)[key] = value
    path.write_text(json.dumps(given))
    with pytest.raises(CheckpointError, match=why) as caught:
        open_llm(tmp_path, **made.config())
    assert "\n" not in str(caught.value)

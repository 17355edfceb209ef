"""speculative_config {"method": "mtp"}: drafts are those of the layer computed over all tokens so
far, and the tokens are those without drafts, in fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_requests import open_llm, params_of, prompts_of
from equal_steps import count_as_equal
from mtp_models import KINDS, VOCABULARY, Twin, make_mtp_model
from toy_proposer import Counts

from penstock import SamplingParams
from penstock.errors import UsageError
from penstock.execute.mtp_proposer import MtpProposer
from penstock.execute.proposer import Drawn

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
TOKENS = 40
NEAR = 1e-4  # scores closer than that may change places in the last digit


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Twin]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_mtp_model(folder, request.param)


def config(most: int = 3) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": most}}


def told(outs: list[Any]) -> list[Any]:
    return [[(one.token_ids, one.finish_reason) for one in out.outputs] for out in outs]


@pytest.mark.parametrize("cached", [False, True])
def test_drafts_are_those_of_the_layer_over_all_tokens(
    model: tuple[Path, Twin], monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """Prompts in chunks of 24 tokens, rows beside each other, right and wrong drafts; with a
    prefix cache the second time, the K and V at the end of the cached prefix may be of another next
    token, so each prompt comes twice."""
    folder, twin = model
    seen: dict[tuple[int, ...], list[int]] = {}
    launch = MtpProposer.launch

    def look(self: MtpProposer, drawn: Drawn) -> None:
        launch(self, drawn)
        rows, tokens = self._rows, self._kv.slot_token
        for row in set(self._staging.rows[: drawn.size].tolist()) if drawn.proposes else ():
            if row != self._dead and not rows.done[row]:
                length = int(rows.length[row])
                text = tokens[rows.block_table[row].long()].flatten()[:length].tolist()
                seen[*text, int(rows.last_token[row])] = rows.drafts[row, : self._most].tolist()

    with open_llm(
        folder,
        **config(),
        steps_ahead=0,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        enable_prefix_caching=cached,
    ) as llm:
        llm._engine.scheduler.drafting.drafter = drafter = Counts()
        drafter.most = 3
        asks = params_of([{"temperature": 0.0}] * len(PROMPTS), 20)
        first = llm.generate(PROMPTS, asks, use_tqdm=False)
        monkeypatch.setattr(MtpProposer, "launch", look)
        assert told(llm.generate(PROMPTS, asks, use_tqdm=False)) == told(first)
        right, tried = llm._engine.scheduler.drafting.right, llm._engine.scheduler.drafting.counts
        assert 0 < right.sum() < tried["tokens"] and right[2] > 0
    assert len(seen) > 40
    for text, drafts in list(seen.items())[::3]:
        for mine, (theirs, lead) in zip(drafts, twin.drafts(list(text), 3), strict=True):
            assert mine == theirs or lead < NEAR
            if mine != theirs:
                break


@pytest.fixture(scope="module")
def plain(model: tuple[Path, Twin]) -> list[Any]:
    with open_llm(model[0]) as llm:
        return told(llm.generate(PROMPTS, params_of(ASKS, TOKENS), use_tqdm=False))


@pytest.mark.parametrize(
    "knobs",
    [
        {"steps_ahead": 0},
        {"steps_ahead": 1},
        {"steps_ahead": 3, "preempt_every": 3},
        {"steps_ahead": 2, "kv_cache_tokens": 192 + 64},
        {"steps_ahead": 2, "max_num_batched_tokens": 24, "max_num_seqs": 5},
    ],
)
def test_the_tokens_are_the_same(
    model: tuple[Path, Twin],
    plain: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    knobs: dict[str, Any],
) -> None:
    count_as_equal(monkeypatch)
    with open_llm(model[0], **config(), **knobs) as llm:
        assert told(llm.generate(PROMPTS, params_of(ASKS, TOKENS), use_tqdm=False)) == plain
        drafting = llm._engine.scheduler.drafting
        assert 0 < drafting.right.sum() < drafting.counts["tokens"]
        assert llm.stats()["spec_accepted_tokens"] == drafting.right.sum()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("most, steps", [(1, 26), (3, 14), (8, 8)])
def test_a_layer_that_knows_the_model_is_always_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, most: int, steps: int
) -> None:
    """At temperature 1 too: a draft is drawn with the noise of the model's own draw."""
    count_as_equal(monkeypatch)
    make_mtp_model(tmp_path, "glm4_moe", spread=0.0)
    ask = SamplingParams(
        temperature=temperature, max_tokens=48, ignore_eos=True, seed=5, detokenize=False
    )
    with open_llm(tmp_path, **config(most), steps_ahead=0) as llm:
        llm.generate(PROMPTS[:1], ask, use_tqdm=False)
        before = llm._engine.scheduler.counts["steps"]
        llm.generate(PROMPTS[1:2], ask, use_tqdm=False)
        assert llm._engine.scheduler.counts["steps"] - before <= steps
        drafting = llm._engine.scheduler.drafting
        # none wrong but those behind the last token
        assert drafting.right.sum() >= drafting.counts["tokens"] - 2 * most


def test_behind_a_sleep_and_with_new_weights(
    model: tuple[Path, Twin], plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    count_as_equal(monkeypatch)
    with open_llm(model[0], **config()) as llm:
        asks = params_of(ASKS, TOKENS)
        assert told(llm.generate(PROMPTS, asks, use_tqdm=False)) == plain
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(model[0])
        before = llm._engine.scheduler.drafting.right.sum()
        assert told(llm.generate(PROMPTS, asks, use_tqdm=False)) == plain
        assert llm._engine.scheduler.drafting.right.sum() > before


def test_two_ranks_draft_the_same(
    model: tuple[Path, Twin], plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are a step's input, so ranks with other drafts would give other tokens."""
    count_as_equal(monkeypatch)
    with open_llm(model[0], **config(), tensor_parallel_size=2) as llm:
        assert told(llm.generate(PROMPTS, params_of(ASKS, TOKENS), use_tqdm=False)) == plain
        assert llm._engine.scheduler.drafting.right.sum() > 0


def test_keys_and_values_in_eight_bits(
    model: tuple[Path, Twin], monkeypatch: pytest.MonkeyPatch
) -> None:
    count_as_equal(monkeypatch)
    found = []
    for more in ({}, config()):
        with open_llm(model[0], kv_cache_dtype="fp8", **more) as llm:
            found.append(told(llm.generate(PROMPTS, params_of(ASKS, TOKENS), use_tqdm=False)))
    assert found[0] == found[1]


def test_a_checkpoint_without_the_layer_is_refused(
    model: tuple[Path, Twin], tmp_path: Path
) -> None:
    from engine_model import make_folder

    with pytest.raises(UsageError, match="none is served of a LlamaForCausalLM") as caught:
        open_llm(make_folder(tmp_path), **config())
    assert caught.value.param == "speculative_config"


@pytest.mark.parametrize(
    "given, why",
    [
        (
            {"prompt_lookup_max": 3},
            "key 'prompt_lookup_max' is none of method mtp: take method, num",
        ),
        ({"num_speculative_tokens": 9}, "must be a number between 1 and 8, not 9"),
    ],
)
def test_what_is_refused(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        open_llm(tmp_path, speculative_config={"method": "mtp", **given})
    with pytest.raises(UsageError, match="draft_from is read only with speculative_config of"):
        open_llm(tmp_path, **config(), draft_from="group")

"""Label scores against transformers' softmax, behind a shared header, in batches and cached; what
is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_model import VOCABULARY, Twin, logits_of, make_folder, make_tokenizer

from penstock import LLM, SamplingParams
from penstock.errors import UsageError

pytestmark = pytest.mark.torch

LABELS = [7, 299, 40, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def twin(folder: Path) -> Twin:
    return logits_of(folder)


def open_llm(folder: Path, **knobs: Any) -> LLM:
    defaults = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_cache_tokens": 2048,
        "dtype": "float32",
    }
    return LLM(str(folder), **defaults | knobs)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as made:
        yield made


def drawn(seed: int, sizes: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCABULARY) for _ in range(size)] for size in sizes]


def truth(twin: Twin, prompt: list[int], softmax: bool) -> list[float]:
    logits = twin.logits(prompt)[-1]
    picked = logits[LABELS].softmax(-1) if softmax else logits.softmax(-1)[LABELS]
    return [float(p) for p in picked]


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("softmax", [True, False])
def test_scores_are_transformers(llm: LLM, twin: Twin, softmax: bool, item_first: bool) -> None:
    (header,), items = drawn(1, (70,)), drawn(2, (1, 3, 15, 16, 17, 33, 40, 5, 5, 8))
    before = llm.stats()
    outs = llm.score(
        header, items, label_token_ids=LABELS, apply_softmax=softmax, item_first=item_first
    )
    for item, out in zip(items, outs, strict=True):
        prompt = item + header if item_first else header + item
        assert out.prompt_token_ids == prompt and out.error is None and out.outputs is not None
        assert out.outputs.label_probs == pytest.approx(
            truth(twin, prompt, softmax), abs=1e-5, rel=1e-4
        )
        assert out.outputs.score == out.outputs.label_probs[0]
    after = llm.stats()
    assert after["generation_tokens"] - before["generation_tokens"] == len(items), (
        "one token an item, no more"
    )
    if not item_first:
        computed = after["prefilled_tokens"] - before["prefilled_tokens"]
        assert computed <= 64 + sum(6 + len(item) for item in items), (
            "the header was computed more than once"
        )


def test_texts_are_tokenised_apart_and_one_item_needs_no_list(llm: LLM, twin: Twin) -> None:
    ids = make_tokenizer().encode("the pump lifts ").ids + make_tokenizer().encode("water").ids
    (out,) = llm.score("the pump lifts ", "water", label_token_ids=LABELS)
    assert out.prompt_token_ids == ids and out.outputs is not None
    assert out.outputs.label_probs == pytest.approx(truth(twin, ids, softmax=True), abs=1e-5)


def test_an_item_that_cannot_run_has_an_error_and_the_others_a_score(llm: LLM) -> None:
    long, good, empty = llm.score([], [[5] * 160, [5, 6], []], label_token_ids=[3])
    assert long.error is not None and "160 tokens" in long.error and long.outputs is None
    assert good.outputs is not None and good.outputs.score == 1.0, "the only label"
    assert empty.error is not None and "empty" in empty.error


def test_named_logprobs_beside_every_other_way_to_ask(llm: LLM, twin: Twin) -> None:
    """In one batch with most likely ones, biases, bad words, and rows that ask for nothing; of each
    drawn token."""
    prompts = drawn(3, (9, 20, 33, 5))
    base: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    settings = [
        SamplingParams(
            **base, logprob_token_ids=LABELS, logit_bias={9: 3.0}, bad_words=["qx", "zz"]
        ),
        SamplingParams(**base, logprobs=3),
        SamplingParams(**base),
        SamplingParams(**base, n=2, logprob_token_ids=[12]),
    ]
    outs = llm.generate(prompts, settings, use_tqdm=False)
    for out, params in zip(outs, settings, strict=True):
        for sample in out.outputs:
            ids = list(out.prompt_token_ids)
            for place, token in enumerate(sample.token_ids):
                if params.logprobs is not None:
                    assert sample.logprobs is not None
                    logprobs = twin.logits(ids)[-1].log_softmax(-1)
                    told = sample.logprobs[place]
                    wanted = params.logprob_token_ids or logprobs.topk(3).indices.tolist()
                    assert set(told) == {token, *wanted}
                    assert all(
                        math.isclose(told[t].logprob, float(logprobs[t]), abs_tol=1e-4)
                        for t in told
                    )
                    if params.logprob_token_ids:
                        assert all(told[t].rank is None for t in told if t != token), (
                            "no rank is known of named ones"
                        )
                ids.append(token)


@pytest.mark.parametrize(
    "labels, said",
    [
        (None, "needs label_token_ids"),
        ([1, 1], "each once"),
        (list(range(21)), "1 to 20"),
        ([-1], "between 0"),
        (["a"], "whole number"),
    ],
)
def test_labels_that_cannot_be_are_refused_at_once(llm: LLM, labels: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        llm.score([5], [[6]], label_token_ids=labels)


def test_labels_outside_the_vocabulary_are_an_error_of_each_item(llm: LLM) -> None:
    (out,) = llm.score([5], [[6]], label_token_ids=[VOCABULARY])
    assert out.error == f"logprob_token_ids names a token outside 0 to {VOCABULARY - 1}"


def test_what_vllm_has_and_we_do_not_is_refused_by_name(llm: LLM) -> None:
    for name in (
        "beam_search",
        "encode",
        "embed",
        "classify",
        "reward",
        "collective_rpc",
        "get_metrics",
    ):
        with pytest.raises(UsageError, match=f"{name} is not served: "):
            getattr(llm, name)(["a text"])
    with pytest.raises(AttributeError):
        llm.nothing_of_the_kind  # noqa: B018
    with pytest.raises(UsageError, match="leave it out"):
        SamplingParams(logprobs=3, logprob_token_ids=[1])
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(
            UsageError, match="the whole vocabulary, are not served: 0 to 20, or logprob_token_ids"
        ):
            SamplingParams(**{name: -1})


def test_ranks_tell_the_same(folder: Path, llm: LLM) -> None:
    (header,), items = drawn(1, (20,)), drawn(2, (3, 17))
    with open_llm(folder, tensor_parallel_size=2) as cut:
        found = cut.score(header, items, label_token_ids=LABELS)
    for one, two in zip(llm.score(header, items, label_token_ids=LABELS), found, strict=True):
        assert one.outputs is not None and two.outputs is not None
        assert two.outputs.label_probs == pytest.approx(one.outputs.label_probs, abs=1e-5)

"""Ranks that share a vocabulary draw the tokens of one that has it all: filters, ties, bad rows,
logprobs, adjusting.

Ranks are threads, and what they exchange goes through a barrier. In fp32 no token may differ.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
import triton_kernel_cases as cases
from torch import Tensor

from penstock.kernels.inputs import TILE, SamplerInputs, VocabularyPart
from penstock.kernels.reference.sampling import logprobs, penalties, rank_filters
from penstock.kernels.reference.sampling.rank_filters import filtered
from penstock.kernels.reference.sampling.sample import sample
from penstock.kernels.triton.sampling import penalties as fast_penalties
from penstock.kernels.triton.sampling import sample as fast_sample
from penstock.parallel.layout import stretch

pytestmark = pytest.mark.torch

Made = TypeVar("Made")


def over_ranks(
    ranks: int, vocabulary: int, work: Callable[[VocabularyPart, slice], Made]
) -> list[Made]:
    """Runs `work` on each rank's part, in threads -> what each gave."""
    barrier, told = threading.Barrier(ranks, timeout=600), list[Tensor | None]([None] * ranks)

    def gather(rank: int, x: Tensor) -> Tensor:
        told[rank] = x.clone()
        barrier.wait()
        every = torch.stack([each for each in told if each is not None])
        barrier.wait()
        return every

    def one(rank: int) -> Made:
        first, length = stretch(vocabulary, TILE, ranks, rank)
        try:
            part = VocabularyPart(first, vocabulary, rank, ranks, lambda x: gather(rank, x))
            return work(part, slice(first, first + length))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, range(ranks)))


def same_on_all(found: list[Tensor]) -> Tensor:
    assert all(torch.equal(found[0], each) for each in found[1:]), "ranks differ"
    return found[0]


def inputs(n: int, seed: int, **asked: Any) -> SamplerInputs:
    """Rows that ask for filters of every kind, alone and together; some are greedy, some ask for
    none."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype)[
            torch.randint(len(values), (n,), generator=generator)
        ]

    return SamplerInputs(
        temperature=pick(0.0, 0.7, 1.0, 1.6),
        top_p=pick(0.05, 0.3, 0.9, 1.0),
        seed=torch.arange(n) * 7919,
        top_k=pick(0, 1, 3, 40, 5000, dtype=torch.int32),
        min_p=pick(0.0, 0.0, 0.02, 0.6),
        sample=torch.arange(n, dtype=torch.int32) % 3,
        position=torch.arange(n, dtype=torch.int32) + 20,
        any_filter=True,
        any_random=True,
    )


@pytest.mark.parametrize(
    ("ranks", "vocabulary", "step"), [(2, 1000, 0.0), (3, 600, 0.5), (4, 513, 0.0), (4, 2048, 2.0)]
)
def test_filtered_draws_are_those_of_one(ranks: int, vocabulary: int, step: float) -> None:
    """step: logits lie so far apart, so that many are equal."""
    logits = torch.randn(200, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
    logits = logits if not step else (logits / step).round() * step
    asked = inputs(200, ranks)
    want = sample(logits, asked)
    got = same_on_all(
        over_ranks(ranks, vocabulary, lambda part, mine: filtered(logits[:, mine], asked, part))
    )
    assert torch.equal(want, got) and want.unique().numel() > 20
    asked.any_filter = False
    plain = over_ranks(ranks, vocabulary, lambda part, mine: sample(logits[:, mine], asked, part))
    assert torch.equal(sample(logits, asked), same_on_all(plain))


def test_ranks_whose_shares_differ_meet_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3's 1,002 tiles are 250 or 251 for each of four ranks. Rows go in pieces, the same ones
    on every rank."""
    # 5 rows of three tiles a piece, 7 of two
    monkeypatch.setattr(rank_filters, "_PIECE", 5 * 3 * TILE)
    logits = torch.randn(35, 9 * TILE, generator=torch.Generator().manual_seed(2))
    asked = inputs(35, 3)
    shapes: list[list[tuple[int, ...]]] = [[] for _ in range(4)]

    def work(part: VocabularyPart, mine: slice) -> Tensor:
        def gather(x: Tensor) -> Tensor:
            shapes[part.rank].append(tuple(x.shape))
            return part.gather(x)

        return filtered(logits[:, mine], asked, dataclasses.replace(part, gather=gather))

    got = same_on_all(over_ranks(4, 9 * TILE, work))
    assert torch.equal(sample(logits, asked), got)
    assert all(shapes[0] == each for each in shapes[1:])


def test_filters_hang_on_no_rank_count_where_hardly_anything_stays() -> None:
    """Flat rows and a nucleus of a few: every attempt misses, and the last draw is from what is
    left."""
    logits = torch.randn(400, 512, generator=torch.Generator().manual_seed(1)) * 0.01
    asked = inputs(400, 2)
    asked.temperature[:], asked.top_p[:], asked.top_k[:], asked.min_p[:] = 1.0, 0.004, 0, 0.0
    want = sample(logits, asked)
    got = same_on_all(over_ranks(4, 512, lambda part, mine: filtered(logits[:, mine], asked, part)))
    assert torch.equal(want, got)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_of_any_rank_is_told_by_all(bad: float) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(3))
    logits[1, 5], logits[2, 299] = bad, bad
    logits[3] = -torch.inf
    asked = inputs(4, 5)
    asked.any_filter = False
    want = sample(logits, asked)
    assert (want[1:] == -2).all()
    assert torch.equal(
        want,
        same_on_all(over_ranks(3, 300, lambda part, mine: sample(logits[:, mine], asked, part))),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 7, 400])
def test_logprobs_are_those_of_one(k: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(9, 300, generator=torch.Generator().manual_seed(k)) * 2).to(dtype)
    tokens = torch.tensor([0, 127, 128, 255, 256, 299, 40, -1, 5], dtype=torch.int32)
    want = logprobs.token_logprobs(logits, tokens, k)
    found = over_ranks(
        3, 300, lambda part, mine: logprobs.rank_logprobs(logits[:, mine], tokens, k, part)
    )
    for index, (one, *others) in enumerate(zip(want, *found, strict=True)):
        got = same_on_all(others)
        if one.dtype == torch.int32:
            assert torch.equal(one, got), index
        else:
            torch.testing.assert_close(one, got, rtol=0, atol=2e-6)


@pytest.mark.parametrize("adjust", [penalties.adjust, fast_penalties.adjust])
def test_what_rows_ask_of_their_logits_is_cut_with_them(adjust: Any) -> None:
    """Bias, penalties, barred ends and stops, bad words, masks."""
    cases.check_adjust("cpu", torch.float32, 12, 300, 4, ranks=3, adjust=adjust)


def test_tritons_draw_is_the_references() -> None:
    rows, vocabulary = 14, 700
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(8)) * 3
    columns = cases.columns(rows, vocabulary, 4, "cpu")
    columns.done[3] = 1
    ids, position = torch.arange(rows, dtype=torch.int32), torch.arange(rows, dtype=torch.int64) + 5

    def drawn(part: VocabularyPart | None, mine: slice) -> Tensor:
        own = logits[:, mine].contiguous()
        scratch = fast_sample.SampleScratch.allocate(rows, own.shape[1], own.device, adjusts=False)
        return fast_sample.sample_rows(
            own, ids, position, columns, scratch, filters=False, part=part
        )

    want = drawn(None, slice(0, vocabulary))
    assert torch.equal(want, same_on_all(over_ranks(1, vocabulary, drawn)))
    # The interpreter is one for all threads, so ranks take turns: the first time round their tops
    # are noted, then what each would tell of its winner.
    tops: list[Tensor] = []
    winners: list[Tensor] = []
    for turn in ("tops", "winners"):
        for rank in range(3):
            first, length = stretch(vocabulary, TILE, 3, rank)

            def gather(x: Tensor, turn: str = turn) -> Tensor:
                if x.dim() == 1:
                    tops.append(x)
                    return torch.stack(tops[:3])
                if turn == "winners":
                    winners.append(x)
                return x[None]

            drawn(VocabularyPart(first, vocabulary, rank, 3, gather), slice(first, first + length))
    found = VocabularyPart(0, vocabulary, 0, 3, lambda _: torch.stack(winners)).best(
        torch.zeros(rows), torch.zeros(rows)
    )
    assert torch.equal(want.long(), found)

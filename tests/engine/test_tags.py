"""Tags: a toy layer that reads them, through the scheduler and the CPU's runner. A request gives
what a model of its own would: alone, batched, chunked, forked, preempted, and behind others' equal
prompts in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from execute_drive import END, tiny_model, tiny_runner
from toy_tags import moves_of

from penstock.config import Config
from penstock.engine.build_engine import engine_over
from penstock.errors import UsageError
from penstock.execute.runner import TorchRunner
from penstock.request import MAX_TAG, Request, SamplingParams
from penstock.schedule.prefix_tree import PrefixTree

pytestmark = pytest.mark.torch

HEADER = [9 + i * 7 % 120 for i in range(37)]
PROMPTS = [HEADER, [*HEADER, 30], [8, 20, 31], [*HEADER[:16], 5]]
# equal prompts of different tags among them
ASKED = [(prompt, tag) for prompt in PROMPTS for tag in (0, 1, 3)]
Said = list[dict[int, list[int]]]  # of each request: sample -> tokens


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchRunner]:
    made = tiny_runner(tagged=True)
    yield made
    made.close()


def said(
    runner: TorchRunner,
    asked: list[tuple[list[int], int]],
    n: int = 1,
    samples: list[int] | None = None,
    **knobs: Any,
) -> tuple[Said, dict[str, Any]]:
    """Every other request is greedy. -> also the scheduler's stats."""
    engine = engine_over(runner, Config.of(**{"prefix_groups": "always"} | knobs))
    out: Said = [{} for _ in asked]
    for number, (prompt, tag) in enumerate(asked):
        params = SamplingParams(
            n=n, temperature=float(len(prompt) % 2 or n > 1), seed=3, max_tokens=12
        )
        packed = np.array(prompt, np.int32).tobytes()
        request = Request(
            request_id=number, prompt=packed, sampling=params, tag=tag, samples=samples
        )
        assert engine.submit(request) is None
    while engine.has_work:
        deltas = engine.step()
        for at in range(0 if deltas is None else deltas.count):
            assert deltas is not None
            tokens = deltas.tokens[deltas.start[at] : deltas.start[at + 1]].tolist()
            out[int(deltas.request[at])][int(deltas.sample[at])] = tokens
    return out, engine.scheduler.stats()


@pytest.fixture(scope="module")
def alone(runner: TorchRunner) -> Said:
    return [said(runner, [one], enable_prefix_caching=False)[0][0] for one in ASKED]


def test_a_tag_is_a_model_of_its_own(alone: Said) -> None:
    """One without tags, all of whose embeddings are moved as the tag moves them."""
    for tag in (0, 1, 3):
        moved = tiny_runner(moved=moves_of(tiny_model())[tag])
        mine = [at for at, (_, its) in enumerate(ASKED) if its == tag]
        want, _ = said(moved, [(ASKED[at][0], 0) for at in mine])
        assert [alone[at] for at in mine] == want
        moved.close()
    by_prompt = [
        [alone[at][0] for at, (prompt, _) in enumerate(ASKED) if prompt is one] for one in PROMPTS
    ]
    assert all(len({tuple(tokens) for tokens in told}) == 3 for told in by_prompt), (
        "tags change what is said"
    )


@pytest.mark.parametrize(
    "knobs",
    [
        {"steps_ahead": 3},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"preempt_every": 2, "steps_ahead": 2},
        {"enable_prefix_caching": False},
    ],
)
def test_batched_is_alone(runner: TorchRunner, alone: Said, knobs: dict[str, Any]) -> None:
    found, stats = said(runner, ASKED, **knobs)
    assert found == alone
    assert (stats["preemptions"] > 0) == ("preempt_every" in knobs)
    assert (stats["prefix_hit_tokens"] > 0) == knobs.get("enable_prefix_caching", True), (
        "within a tag"
    )


def test_forked_is_one_by_one(runner: TorchRunner) -> None:
    asked = [(HEADER, 1), (HEADER, 2)]
    for at, told in enumerate(said(runner, asked, n=5)[0]):
        apart: dict[int, list[int]] = {}
        for sample in range(5):
            apart |= said(
                runner, asked[at : at + 1], n=5, samples=[sample], enable_prefix_caching=False
            )[0][0]
        assert told == apart and len({tuple(tokens) for tokens in told.values()}) > 2


def test_no_tag_is_another_ones_root() -> None:
    tree = object.__new__(PrefixTree)
    roots = set()
    for tree._resets in range(3):
        roots |= {tree.root(salt, tag) for salt in (0, 1, 2**62 - 1) for tag in (0, 1, MAX_TAG)}
    assert len(roots) == 27 and max(roots) == 0


def test_tags_have_a_range(runner: TorchRunner) -> None:
    scheduler = engine_over(runner, Config.of()).scheduler
    for tag in (-1, MAX_TAG + 1):
        with pytest.raises(UsageError, match="tag"):
            scheduler.submit(
                Request(request_id=1, prompt=b"\1\0\0\0", sampling=SamplingParams(), tag=tag)
            )


def test_a_model_that_reads_no_tags_is_told_none() -> None:
    runner = tiny_runner()
    assert runner._state is not None and runner._state.launches.columns.tags is None
    found, _ = said(runner, [(HEADER, 0), (HEADER, 2)])
    assert found[0] == found[1] and END not in found[0][0][:-1]
    runner.close()

"""The table of step seconds: real steps of a runner, timed at a grid of rows, tokens before them and prompt tokens.

Steps are launched one ahead, as the engine does. It knows a runner and plans of its own; no scheduler, no requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np

from penstock.artifact.manifest import StepSeconds
from penstock.build.work_sample import WorkSample
from penstock.config import BLOCK_SIZE
from penstock.execute.runner import TorchRunner
from penstock.schedule.step import JOIN_RECORD, Chunks, Int32, Joins, StepPlan

WARM, LEAST_STEPS, MOST_STEPS = 2, 4, 32
STEPS_SECONDS = 0.25  # of one entry, past LEAST_STEPS
_ROWS, _CONTEXT, _PROMPT = (1, 4, 16, 64, 256, 1024, 4096, 8192), (128, 1024, 8192), (512, 2048, 8192)
_NOTHING = np.zeros(0, np.int32)
Entry = tuple[int, int, int]  # rows, tokens before each, prompt tokens


def time_steps(runner: TorchRunner, works: Sequence[WorkSample], seconds: float) -> StepSeconds:
    """Returns the table, as much of it as the time allows: what the works look like comes first."""
    end = time.monotonic() + seconds
    rows, context, prompt, took = list[int](), list[int](), list[int](), list[float]()
    for entry in _entries(runner, works):
        if took and time.monotonic() > end:
            break
        for column, number in zip((rows, context, prompt), entry, strict=True):
            column.append(number)
        took.append(float(f"{_seconds(runner, entry):.4g}"))
    return StepSeconds(rows=rows, context=context, prompt_tokens=prompt, seconds=took)


def _entries(runner: TorchRunner, works: Sequence[WorkSample]) -> Iterator[Entry]:
    """The works' own steps, then the grid: what fits the runner."""
    facts = [work.facts() for work in works]
    own: list[Entry] = []
    for each in facts:
        middle = each.prompt_tokens + each.output_tokens // 2
        own += [(each.concurrency, middle, 0), (0, 0, min(each.prompt_tokens * each.concurrency, _PROMPT[-1]))]
    contexts = sorted({*_CONTEXT, *(entry[1] for entry in own if entry[1])})
    grid = [*product(_ROWS, contexts, (0,)), *product((0, 1, 64), (contexts[0],), _PROMPT)]
    for entry in dict.fromkeys([*own, *grid]):
        rows, context, prompt = entry
        fits = rows + prompt <= runner.max_batched_tokens and rows <= runner.max_rows
        longest = max(context + 2 * MOST_STEPS, min(prompt, runner.max_model_len - 1))
        if (
            rows + prompt
            and fits
            and longest < runner.max_model_len
            and _Plans(runner, entry).blocks < runner.num_blocks
        ):
            yield entry


def _seconds(runner: TorchRunner, entry: Entry) -> float:
    """Seconds of one step, the mean of some that follow each other."""
    plans = _Plans(runner, entry)
    run_ahead(runner, plans.next, WARM)
    begun = time.perf_counter()
    run_ahead(runner, plans.next, LEAST_STEPS)
    each = (time.perf_counter() - begun) / LEAST_STEPS
    more = min(MOST_STEPS, int(STEPS_SECONDS / each))
    if more <= LEAST_STEPS:
        return each
    begun = time.perf_counter()
    run_ahead(runner, plans.next, more)
    return (time.perf_counter() - begun) / more


def run_ahead(runner: TorchRunner, plan: Callable[[], StepPlan], steps: int) -> list[float]:
    """Runs steps, a step ahead as the engine does, and returns the seconds that each launch took of the host."""
    before, host = None, list[float]()
    for _ in range(steps):
        each, begun = plan(), time.perf_counter()
        flight = runner.launch(each)
        host.append(time.perf_counter() - begun)
        if before is not None:
            before.fetch()
        before = flight
    assert before is not None, "at least one step is timed"
    before.fetch()
    return host


def lasting_rows(blocks: Int32, length: int, **columns: float) -> Joins:
    """Returns rows that go on for ever, with these blocks each [rows, blocks] and so many tokens stored; drawn
    plainly but for `columns` of JOIN_RECORD."""
    rows = len(blocks)
    records = np.zeros(rows, JOIN_RECORD)
    for name in ("row", "sample", "last_token", "seed"):
        records[name] = np.arange(rows)
    records["length"], records["limit"] = length, length + 10_000
    records["prompt_length"] = records["min_length"] = length + 1
    records["temperature"] = records["top_p"] = records["repetition"] = 1.0
    records["ignore_eos"], records["stop_ids"], records["logprobs"] = 1, -1, -1
    for name, value in columns.items():
        records[name] = value
    return Joins(records, blocks, np.zeros(rows + 1, np.int32), _NOTHING, np.zeros(0, np.float32))


class _Plans:
    """Steps of rows that go on for ever, each with blocks of its own, beside the same chunk of a prompt."""

    def __init__(self, runner: TorchRunner, entry: Entry) -> None:
        self._rows, self._context, self._prompt = entry
        steps = WARM + LEAST_STEPS + MOST_STEPS
        self._each = -(-(self._context + steps + 1) // BLOCK_SIZE)
        self._longest = min(self._prompt, runner.max_model_len - 1)
        self._of_chunk = -(-self._longest // BLOCK_SIZE)
        self._number = 0

    @property
    def blocks(self) -> int:
        """How many it takes, the scratch block included."""
        return 1 + self._rows * self._each + self._of_chunk

    def next(self) -> StepPlan:
        number, rows = self._number, np.arange(self._rows, dtype=np.int32)
        self._number += 1
        return StepPlan(
            number=number, rows=rows, lengths=np.full(self._rows, self._context + number, np.int32), wants=0,
            group_start=np.zeros(1, np.int32), group_blocks=np.zeros((0, 0), np.int32), group_length=_NOTHING,
            copies=np.zeros((0, 2), np.int32), new_blocks=np.zeros((0, 3), np.int32),
            joins=self._joins() if number == 0 and self._rows else None, chunks=self._chunks(),
        )  # fmt: skip

    def _joins(self) -> Joins:
        own = 1 + np.arange(self._rows * self._each, dtype=np.int32)
        blocks = np.random.default_rng(0).permutation(own).astype(np.int32).reshape(self._rows, self._each)
        return lasting_rows(blocks, self._context)

    def _chunks(self) -> Chunks | None:
        """Whole prompts of so many tokens together; they all write to the same blocks, which nobody reads."""
        if not self._prompt:
            return None
        sizes: Int32 = np.array(
            [self._longest] * (self._prompt // self._longest) + [self._prompt % self._longest], np.int32
        )
        sizes = sizes[sizes > 0]
        table = 1 + self._rows * self._each + np.arange(self._of_chunk, dtype=np.int32)
        return Chunks(
            tokens=np.zeros(self._prompt, np.int32),
            start=np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
            context=np.zeros(sizes.size, np.int32),
            blocks=np.broadcast_to(table, (sizes.size, self._of_chunk)).astype(np.int32),
            prompt_logprobs=np.full(sizes.size, -1, np.int32),
            next_token=np.full(self._prompt, -1, np.int32),
        )

"""step_table: measures steps for `penstock simulate`. It times steps over a grid of contents: rows,
context lengths, prompt tokens, prefix groups.

Each step is launched before the one before it is read, as in the engine. StepSeconds
(artifact/manifest.py) explains the columns. Knows a runner and plans of its own; no scheduler, no
requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from penstock.artifact.manifest import USUAL_PROMPT, BuiltFor, StepSeconds, TimedEngine
from penstock.config import BLOCK_SIZE
from penstock.execute.first_step import lasting_rows
from penstock.execute.padding import BESIDE_TOKENS
from penstock.execute.runner import TorchRunner
from penstock.schedule.step import Chunks, Int32, Joins, Moves, StepPlan

WARM, LEAST_STEPS, MOST_STEPS = 2, 3, 16  # numbers of steps: warm-up, least and most per round
ROUND_SECONDS = 0.1  # seconds of a round, if it has LEAST_STEPS steps by then
ROUNDS = 3  # the least round counts: other load on the machine only adds time
ENTRY_SECONDS = 2.0  # seconds after which an entry gets no further round
MUCH = (
    # if launching a step takes more than this fraction of its seconds, the device may be
    # waiting for the host
    0.5
)
FEW = 64  # context length in tokens of rows that run beside prompts
_CONTEXT = (FEW, 1024, 8192, 32768)
_MEMBERS, _SHARED = (2, 8, 32, 128, 1024), (256, 1024)
# steps whose rows' lengths differ by up to so many tokens in either direction, and their row counts
_SPREAD, _SPREAD_ROWS = (
    512,
    (16, 128, 256, 512, 1024, 4096),
)


class TimedStep(NamedTuple):
    """The numbers that describe a timed step; fields are StepSeconds' columns."""

    rows: int
    context: int = 0
    prompt_tokens: int = 0
    prompt_length: int = 0
    shared: int = 0
    members: int = 0
    spread: int = 0


def time_steps(
    runner: TorchRunner,
    first: Sequence[TimedStep],
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> StepSeconds:
    """Measures steps as long as time allows and returns the table: the steps `first`, then the
    grid, from its corners inwards. seconds: time limit; clock: measures the steps."""
    end = time.monotonic() + seconds
    timed, took, device = list[TimedStep](), list[float](), list[float]()
    for step in dict.fromkeys([*first, *_grid(runner)]):
        if took and time.monotonic() > end:
            break
        if _Plans(runner, step).fit:
            timed.append(step)
            both = _seconds(runner, step, clock)
            for column, seconds_of in zip((took, device), both, strict=True):
                column.append(float(f"{seconds_of:.4g}"))
    columns = {name: [getattr(step, name) for step in timed] for name in TimedStep._fields}
    return StepSeconds(**columns, seconds=took, device_seconds=device, engine=held_by(runner))


def held_by(runner: TorchRunner) -> TimedEngine:
    """Returns the runner's limits that a scheduler needs to plan steps."""
    return TimedEngine(
        num_blocks=runner.num_blocks,
        max_rows=runner.max_rows,
        max_model_len=runner.max_model_len,
        max_batched_tokens=runner.max_batched_tokens,
        grouping=runner.grouping,
        sharing=asdict(runner.sharing),
        ridge_rows=runner.ridge_rows,
        state_slots=runner.snapshots.stop,
        window=0 if runner.layer_pages is None else runner.layer_pages.window,
        window_tables=0 if runner.layer_pages is None else runner.layer_pages.tables,
    )


def steps_like(facts: BuiltFor, runner: TorchRunner) -> list[TimedStep]:
    """Returns the steps that a workload runs: with one row and with all its rows, at the beginning
    and at the end of their answers; with its prompts, alone and beside rows; with the prefix that
    rows share. A table of these steps is enough to simulate this workload."""
    rows = min(facts.concurrency, runner.max_rows, runner.max_batched_tokens - 1)
    length, end = facts.prompt_tokens, facts.prompt_tokens + facts.output_tokens
    prompts = min(length * facts.concurrency, 8192, runner.max_batched_tokens - rows)
    usual, own = min(USUAL_PROMPT, prompts), min(length, prompts)
    steps = [TimedStep(count, context) for count in (rows, 1) for context in (length, end)]
    steps += [
        TimedStep(0, 0, prompts, own),
        TimedStep(0, 0, prompts, usual),
        TimedStep(rows, length, prompts, usual),
    ]
    if facts.shares and runner.grouping:
        siblings = facts.samples // facts.prompts
        members, shared = (siblings, length) if siblings > 1 else (rows, facts.shared_tokens)
        if shared >= BLOCK_SIZE:
            steps.append(
                TimedStep(rows, FEW, 0, 0, shared // BLOCK_SIZE * BLOCK_SIZE, min(members, rows))
            )
    return steps


def _grid(runner: TorchRunner) -> Iterator[TimedStep]:
    """Yields the grid, corners first, so that a table cut short covers the same range with wider
    gaps."""
    most, tokens = min(runner.max_rows, runner.max_batched_tokens), runner.max_batched_tokens
    far, near = _meshes(most)
    yield from (TimedStep(rows, context) for rows in far for context in _contexts(runner, rows))
    yield from (step for rows in (0, most) for step in _beside(rows, tokens))
    for n in (tokens, min(512, tokens)):
        yield from (TimedStep(0, 0, n, length) for length in (min(n, runner.max_model_len - 1), 16))
    if runner.grouping:
        for rows in dict.fromkeys((min(most, 1024), most)):
            members = {n: None for n in (*_MEMBERS, rows) if n <= rows}
            yield from (
                TimedStep(rows, FEW, 0, 0, shared, n) for shared in _SHARED for n in members
            )
    spread = min(_SPREAD, (runner.max_model_len - _STEPS - BLOCK_SIZE) // 2 - 2)
    if spread > 0:
        yield from (
            TimedStep(rows, spread + BLOCK_SIZE, spread=spread)
            for rows in _SPREAD_ROWS
            if rows <= most
        )
    yield from (TimedStep(rows, context) for rows in near for context in _contexts(runner, rows))
    yield from (
        step for rows in (1, 16, 128, 1024, 4096) if rows < most for step in _beside(rows, tokens)
    )


def _beside(rows: int, tokens: int) -> list[TimedStep]:
    """Returns steps with prompts of usual length beside these rows, from few tokens to the most
    that fit; also the most with a graph beside few rows, and slightly more."""
    most = BESIDE_TOKENS[-1]
    each = {
        n: None
        for n in (tokens - rows, 1, 512, 64, 2048, most, most + 128)
        if 0 < n <= tokens - rows
    }
    return [TimedStep(rows, FEW if rows else 0, n, min(n, USUAL_PROMPT)) for n in each]


def _meshes(most: int) -> tuple[list[int], list[int]]:
    """Returns the row counts 1, 2, 4 ... and `most`: every third and the last, then all others."""
    rows = sorted({*(1 << power for power in range(most.bit_length())), most})
    far = list(dict.fromkeys([rows[-1], *rows[::3]]))
    return far, [n for n in rows if n not in far]


def _contexts(runner: TorchRunner, rows: int) -> list[int]:
    """Returns numbers of tokens before each of so many rows: few, the most that fit, and some
    between."""
    longest = runner.max_model_len - _STEPS - 2
    fit = ((runner.num_blocks - 2) // rows - 1) * BLOCK_SIZE - _STEPS - 1
    most = min(longest, fit)
    return [most, *(n for n in _CONTEXT if n < most * 0.7)] if most > 0 else []


_STEPS = WARM + ROUNDS * (MOST_STEPS + 2)  # most steps that are run for one table entry


def _seconds(
    runner: TorchRunner, step: TimedStep, clock: Callable[[], float]
) -> tuple[float, float]:
    """Returns the seconds of one step (the least mean over rounds), and the device's seconds."""
    plans = _Plans(runner, step)
    run_ahead(runner, plans.next, WARM)
    steps, found, host = LEAST_STEPS, list[float](), list[float]()
    while len(found) < ROUNDS and sum(found) * steps < ENTRY_SECONDS:
        begun = clock()
        host += run_ahead(runner, plans.next, steps)
        found.append((clock() - begun) / steps)
        steps = max(LEAST_STEPS, min(MOST_STEPS, int(ROUND_SECONDS / found[-1])))
    least = min(found)
    if not step.prompt_tokens or median(host) < MUCH * least:
        return least, least
    return least, min(least, *(_behind_prompts(runner, plans, clock) for _ in range(ROUNDS)))


def _behind_prompts(runner: TorchRunner, plans: _Plans, clock: Callable[[], float]) -> float:
    """Returns the seconds of a step launched while the device was busy with prompts, so that it
    starts without waiting for the host."""
    long, step = runner.launch(plans.prompts()), runner.launch(plans.next())
    long.fetch()
    begun = clock()
    step.fetch()
    return clock() - begun


def run_ahead(runner: TorchRunner, plan: Callable[[], StepPlan], steps: int) -> list[float]:
    """Runs steps, each launched one ahead as in the engine; returns the host's seconds for each
    launch."""
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


class _Plans:
    """Makes step plans of rows that never end, beside prompt chunks. Each row has its own blocks
    after its prefix group's blocks. As in an engine, each step sends new blocks for a sixteenth of
    the rows, though here they have these blocks already."""

    def __init__(self, runner: TorchRunner, step: TimedStep) -> None:
        self._runner, self._step = runner, step
        self._groups = -(-step.rows // step.members) if step.members else 0
        self._prefix = step.shared // BLOCK_SIZE  # blocks of the prefix that a group shares
        self._own = -(-(step.context + step.spread + _STEPS + 1) // BLOCK_SIZE) if step.rows else 0
        self._lengths: Int32 = np.full(step.rows, step.shared + step.context, np.int32)
        if step.spread:
            place = np.random.default_rng(1).permutation(step.rows)
            self._lengths += (step.spread * (2 * place + 1 - step.rows) // step.rows).astype(
                np.int32
            )
        self._table: Int32 = np.zeros((0, 0), np.int32)
        self._of_chunk = -(-step.prompt_length // BLOCK_SIZE)
        # index of the first block of prompt chunks
        self._chunked = 1 + self._groups * self._prefix + step.rows * self._own
        self._tokens = np.random.default_rng(0).integers(
            runner.vocab_size, size=step.prompt_tokens, dtype=np.int32
        )
        self._number = 0

    @property
    def fit(self) -> bool:
        """Returns True if the runner has rows and blocks for the step."""
        step, runner = self._step, self._runner
        tokens = 0 < step.rows + step.prompt_tokens <= runner.max_batched_tokens
        longest = max(
            step.shared + step.context + step.spread + _STEPS + 1 if step.rows else 0,
            step.prompt_length,
        )
        blocks = self._chunked + self._of_chunk
        return (
            tokens
            and step.rows <= runner.max_rows
            and longest < runner.max_model_len
            and blocks < runner.num_blocks
        )

    def prompts(self) -> StepPlan:
        """Returns a step with as many prompt tokens as fit, and no rows."""
        tokens = self._runner.max_batched_tokens
        length = min(tokens, USUAL_PROMPT, self._runner.max_model_len - 1)
        number, self._number = self._number, self._number + 1
        return replace(_Plans(self._runner, TimedStep(0, 0, tokens, length)).next(), number=number)

    def next(self) -> StepPlan:
        number, step = self._number, self._step
        self._number += 1
        group_start = np.minimum(np.arange(self._groups + 1) * step.members, step.rows).astype(
            np.int32
        )
        return StepPlan(
            number=number,
            rows=np.arange(step.rows, dtype=np.int32),
            wants=0,
            lengths=self._lengths + number,
            group_start=group_start,
            group_blocks=self._prefixes(),
            group_length=np.full(self._groups, step.shared, np.int32),
            moves=Moves.none(),
            new_blocks=self._new_blocks(number),
            joins=self._joins() if number == 0 and step.rows else None,
            chunks=self._chunks(),
        )

    def _new_blocks(self, number: int) -> Int32:
        """Returns the block of the next token for every sixteenth row, int32 [rows, 3]."""
        rows = np.arange(number % BLOCK_SIZE, self._table.shape[0], BLOCK_SIZE, dtype=np.int32)
        place = (self._lengths[rows] + number) // BLOCK_SIZE
        found: Int32 = np.stack((rows, place, self._table[rows, place]), axis=1).astype(np.int32)
        return found

    def _prefixes(self) -> Int32:
        """Returns the block numbers of the prefix groups' prefixes, int32 [groups, blocks]."""
        blocks: Int32 = (1 + np.arange(self._groups * self._prefix, dtype=np.int32)).reshape(
            self._groups, self._prefix
        )
        return blocks

    def _joins(self) -> Joins:
        step, first = self._step, 1 + self._groups * self._prefix
        own = first + np.random.default_rng(0).permutation(step.rows * self._own)
        blocks = own.reshape(step.rows, self._own)
        if self._groups:
            blocks = np.concatenate(
                (self._prefixes()[np.arange(step.rows) // step.members], blocks), axis=1
            )
        self._table = blocks.astype(np.int32)
        return lasting_rows(self._table, self._lengths)

    def _chunks(self) -> Chunks | None:
        """Returns whole prompts of prompt_tokens tokens together; all write to the same blocks,
        which are never read."""
        tokens, length = self._step.prompt_tokens, self._step.prompt_length
        if not tokens:
            return None
        sizes: Int32 = np.array([length] * (tokens // length) + [tokens % length], np.int32)
        sizes = sizes[sizes > 0]
        table = self._chunked + np.arange(self._of_chunk, dtype=np.int32)
        return Chunks(
            tokens=self._tokens.copy(),
            start=np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
            context=np.zeros(sizes.size, np.int32),
            blocks=np.broadcast_to(table, (sizes.size, self._of_chunk)).astype(np.int32),
            prompt_logprobs=np.full(sizes.size, -1, np.int32),
            next_token=np.full(tokens, -1, np.int32),
        )

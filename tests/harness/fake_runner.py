"""A runner that computes no model, for the engine's real process: real scheduler, allocator, loop
and channel over it.

A token is a hash of its prompt, what came after it, its seed and its sample index, taken through
the blocks that the plan names: a block that was handed out twice, a row used again too early or
another request's token changes what comes out, and `expected` says what should. It is as fast as it
is told to be, and breaks when it is told to: `Orders` lie in a file beside the tokenizer, which
tests rewrite while it runs. It knows plans and columns; no text, no HTTP.

Not served: min_tokens together with stop ids.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import CheckpointError
from penstock.row_table import WANTS_LOGPROBS
from penstock.schedule.step import (
    BAD_LOGITS,
    KV_CACHE,
    NO_TOKEN,
    WEIGHTS,
    StepPlan,
    StepTokens,
    TokenLogprobs,
)
from penstock.shared_weights import WeightsSource

UInt64 = NDArray[np.uint64]
ORDERS = "orders.json"
SHAPE = "fake.json"
_TOKEN, _PLACE, _SEED, _SAMPLE, _DRAW = (
    np.uint64(n)
    for n in (
        0x9E3779B97F4A7C15,
        0xD1B54A32D192ED03,
        0x2545F4914F6CDD1D,
        0x9FB21C651E98DF25,
        0xA24BAED4963EE407,
    )
)


class Shape(msgspec.Struct, kw_only=True):
    """What the fake is for its whole life. `words`: the ids that it draws. Lies as fake.json in its
    folder."""

    rows: int = 64
    num_blocks: int = 1024
    longest: int = 512
    batched_tokens: int = 2048
    vocab_size: int = 256
    words: list[int]
    load_seconds: float = 0.0  # that its weights take to be put in others' place


class Orders(msgspec.Struct, kw_only=True):
    """What it does from now on. `fault` happens once for each `serial` above 0, at the next step:

    exit, kill, raise, raise_late, memory: the process or the step ends; hang, hang_with_lock: a
    step that never comes, in Python or in a library that holds the interpreter's lock; nan: logits
    of every row of the step are not finite. long: a step of `long_seconds` that is seen to go on.
    `held`: no step comes until it is taken back.
    """

    step_seconds: float = 0.001
    token_seconds: float = 0.0
    held: bool = False
    fault: str = ""
    long_seconds: float = 4.0
    serial: int = 0


LONG = 40  # looks at a long step


def write_orders(folder: Path, orders: Orders) -> None:
    """Whole or not at all: the engine reads it at any time."""
    aside = folder / (ORDERS + ".new")
    aside.write_bytes(msgspec.json.encode(orders))
    aside.replace(folder / ORDERS)


def _mix(x: UInt64) -> UInt64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _terms(tokens: Any, places: Any) -> UInt64:
    """What tokens at their places add to a context's hash: sums, so that a chunk is one cumsum."""
    return _mix(
        (np.asarray(tokens, np.uint64) + np.uint64(1)) * _TOKEN
        + np.asarray(places, np.uint64) * _PLACE
    )


def _draws(context: UInt64, noise: UInt64) -> UInt64:
    return _mix(context + noise + _DRAW)


def _noise(seed: Any, sample: Any, temperature: Any) -> UInt64:
    """0 for greedy rows: their tokens hang on the context alone."""
    noise = _mix(
        np.asarray(seed).astype(np.uint64) * _SEED + np.asarray(sample).astype(np.uint64) * _SAMPLE
    )
    return np.where(np.asarray(temperature) > 0, noise, np.uint64(0)).astype(np.uint64)


def expected(
    prompt: Sequence[int],
    count: int,
    words: Sequence[int],
    seed: int = 0,
    sample: int = 0,
    temperature: float = 1.0,
) -> list[int]:
    """The first `count` tokens of a sample that nothing disturbs."""
    with np.errstate(over="ignore"):
        context = np.sum(_terms(list(prompt), range(len(prompt))), dtype=np.uint64, keepdims=True)
        noise = np.atleast_1d(_noise([seed], [sample], [temperature]))
        out: list[int] = []
        for place in range(len(prompt), len(prompt) + count):
            out.append(words[int(_draws(context, noise)[0] % np.uint64(len(words)))])
            context = context + _terms([out[-1]], [place])
    return out


class FakeFlight:
    """A step that is ready when its time has come and nobody holds it."""

    def __init__(self, runner: FakeRunner, result: StepTokens, due: float, fault: str) -> None:
        self._runner, self._result, self._due, self._fault = runner, result, due, fault

    def ready(self) -> bool:
        return time.monotonic() >= self._due and not self._runner.orders().held

    def fetch(self) -> StepTokens:
        if self._fault == "hang":
            while True:
                time.sleep(3600)
        if self._fault == "hang_with_lock":
            ctypes.PyDLL(None).pause()  # a library that waits and keeps the interpreter's lock
        if self._fault == "long":
            for _ in range(LONG):
                time.sleep(self._runner.orders().long_seconds / LONG)
                self._runner.goes_on()
        if self._fault == "raise_late":
            raise RuntimeError("told to fail while it was read")
        time.sleep(max(0.0, self._due - time.monotonic()))
        while self._runner.orders().held:
            time.sleep(0.002)
        return self._result


class FakeRunner:
    """A device of numpy columns; `schedule.step.Runner`."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.num_blocks = shape.num_blocks
        self.asleep: tuple[str, ...] = ()
        self._folder, self._words = folder, np.array(shape.words, np.int32)
        width = -(-shape.longest // 16)
        # hash of all tokens up to each slot
        self._slots = np.zeros(shape.num_blocks * 16, np.uint64)
        self._table = np.zeros((shape.rows, width), np.int64)
        self._last, self._length, self._limit = (np.zeros(shape.rows, np.int64) for _ in range(3))
        self._noise = np.zeros(shape.rows, np.uint64)
        self._stops = np.full((shape.rows, 8), -1, np.int32)
        self._logprobs = np.full(shape.rows, -1, np.int32)
        self._done = np.ones(shape.rows, bool)
        self._due = 0.0
        self._orders, self._seen = Orders(), (0, 0)
        # faults that were ordered before this engine began are not its own
        self._struck = self.orders().serial

    def counts(self) -> dict[str, int]:
        return {"jit_compiles": 0, "jit_loads": 0}

    def describe(self) -> dict[str, Any]:
        return {"device": "fake"}

    def watch(self, goes_on: Callable[[], None]) -> None:
        self.goes_on = goes_on

    def update_weights(self, source: WeightsSource) -> None:
        """Other weights draw other words: those of the folder's fake.json."""
        if not isinstance(source, Path):
            raise CheckpointError("a fake has no tensors")
        folder = source
        if not (folder / SHAPE).is_file():
            raise CheckpointError(f"{folder} holds no {SHAPE}")
        shape = msgspec.json.decode((folder / SHAPE).read_bytes(), type=Shape)
        time.sleep(shape.load_seconds)
        self._words = np.array(shape.words, np.int32)
        self.asleep = tuple(tag for tag in self.asleep if tag != WEIGHTS)

    def sleep(self, level: int) -> None:
        """Forgets all rows, and what is in their blocks."""
        for column in (self._slots, self._table, self._last, self._length):
            column[:] = 0
        self._done[:] = True
        self.asleep, self._gone = (WEIGHTS, KV_CACHE), level == 2

    def wake_up(self, tags: Collection[str]) -> None:
        self.asleep = tuple(
            tag for tag in self.asleep if tag not in tags or (tag == WEIGHTS and self._gone)
        )

    def close(self) -> None:
        """Nothing to give back."""

    def orders(self) -> Orders:
        found = os.stat(self._folder / ORDERS)
        if (found.st_mtime_ns, found.st_ino) != self._seen:
            self._seen = (found.st_mtime_ns, found.st_ino)
            self._orders = msgspec.json.decode((self._folder / ORDERS).read_bytes(), type=Orders)
        return self._orders

    def launch(self, plan: StepPlan) -> FakeFlight:
        orders, fault = self.orders(), ""
        if orders.serial > self._struck:
            self._struck, fault = orders.serial, orders.fault
            _strike(fault)
        with np.errstate(over="ignore"):
            result = self._step(plan)
        if fault == "nan":
            result.tokens[result.tokens != NO_TOKEN] = BAD_LOGITS
            self._done[plan.rows] = True
        tokens = plan.rows.size + (0 if plan.chunks is None else plan.chunks.tokens.size)
        now = time.monotonic()
        self._due = max(self._due, now) + orders.step_seconds + orders.token_seconds * tokens
        return FakeFlight(self, result, self._due, fault)

    def _step(self, plan: StepPlan) -> StepTokens:
        slots = self._slots.reshape(-1, 16)
        slots[plan.moves.blocks[:, 1]] = slots[plan.moves.blocks[:, 0]]
        self._join(plan)
        self._table[plan.new_blocks[:, 0], plan.new_blocks[:, 1]] = plan.new_blocks[:, 2]
        self._prefill(plan)
        rows, length = plan.rows, np.minimum(self._length[plan.rows], self._table.shape[1] * 16 - 1)
        live = ~self._done[rows]
        context = self._before(self._table[rows], length) + _terms(self._last[rows], length)
        at = self._table[rows, length // 16] * 16 + length % 16
        self._slots[at[live]] = context[live]
        draws = _draws(context, self._noise[rows]) % np.uint64(self._words.size)
        tokens = self._words[draws.astype(np.int64)]
        self._length[rows] += live
        self._last[rows] = np.where(live, tokens, self._last[rows])
        ended = (length + 2 >= self._limit[rows]) | (self._stops[rows] == tokens[:, None]).any(
            axis=1
        )
        self._done[rows] |= ended
        drawn = np.where(live, tokens, NO_TOKEN).astype(np.int32)
        return StepTokens(drawn, self._scores(plan, tokens, length), self._prompt_scores(plan))

    def _join(self, plan: StepPlan) -> None:
        joins = plan.joins
        if joins is None:
            return
        rows = joins.rows
        self._table[rows] = 0
        self._table[rows, : joins.blocks.shape[1]] = joins.blocks
        told = joins.records
        self._length[rows], self._last[rows], self._limit[rows] = (
            told["length"],
            told["last_token"],
            told["limit"],
        )
        self._noise[rows] = _noise(told["seed"], told["sample"], told["temperature"])
        self._stops[rows], self._logprobs[rows] = told["stop_ids"], told["logprobs"]
        self._done[rows] = False

    def _prefill(self, plan: StepPlan) -> None:
        chunks = plan.chunks
        for c in range(0 if chunks is None else chunks.context.size):
            assert chunks is not None
            tokens, first = (
                chunks.tokens[chunks.start[c] : chunks.start[c + 1]],
                int(chunks.context[c]),
            )
            places = np.arange(first, first + tokens.size)
            table = chunks.blocks[c].astype(np.int64)
            sums = np.cumsum(_terms(tokens, places), dtype=np.uint64)
            self._slots[table[places // 16] * 16 + places % 16] = sums + self._before(
                table[None], np.array([first])
            )

    def _before(self, tables: NDArray[np.int64], length: NDArray[np.int64]) -> UInt64:
        """The hash of all that is stored before position `length` of each table."""
        last = np.maximum(length - 1, 0)
        found = self._slots[
            np.take_along_axis(tables, last[:, None] // 16, axis=1)[:, 0] * 16 + last % 16
        ]
        return np.where(length > 0, found, np.uint64(0)).astype(np.uint64)

    def _scores(
        self, plan: StepPlan, tokens: NDArray[np.int32], length: NDArray[np.int64]
    ) -> TokenLogprobs | None:
        if not plan.wants & WANTS_LOGPROBS:
            return None
        where = np.flatnonzero(self._logprobs[plan.rows] >= 0).astype(np.int32)
        return self._scored(
            where, tokens[where], int(self._logprobs[plan.rows[where]].max(initial=0))
        )

    def _prompt_scores(self, plan: StepPlan) -> TokenLogprobs | None:
        chunks = plan.chunks
        if chunks is None or (chunks.prompt_logprobs < 0).all():
            return None
        wanted = np.repeat(chunks.prompt_logprobs, np.diff(chunks.start))
        where = np.flatnonzero((wanted >= 0) & (chunks.next_token >= 0)).astype(np.int32)
        return self._scored(where, chunks.next_token[where], int(wanted[where].max(initial=0)))

    def _scored(
        self, where: NDArray[np.int32], tokens: NDArray[np.int32], count: int
    ) -> TokenLogprobs:
        """A token's own score, and those of the words behind it in the alphabet."""
        k = max(count, 1)
        chosen = -(1 + tokens / 1024).astype(np.float32)
        top_ids = (tokens[:, None] + np.arange(k)) % self._words.size
        top_ids[:, 0] = tokens
        top = chosen[:, None] - np.arange(k, dtype=np.float32)
        return TokenLogprobs(
            where, chosen, np.ones(where.size, np.int32), top_ids.astype(np.int32), top
        )


def _strike(fault: str) -> None:
    """Faults of the launch. Those of reading are the flight's."""
    if fault == "exit":
        os._exit(7)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise RuntimeError("told to fail")
    if fault == "memory":
        raise MemoryError("told that the device has no memory left")

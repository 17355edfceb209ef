"""How near steps come to what the hardware could do at most: the least time of a step by
arithmetic, and a gauge of it.

A step is at least: its matrix products at the machine's rate (or its weights read once, where that
is longer), K and V read once by each layer (a prefix once a group), a row's recurrent state read
and written, attention's own products at the best rate, and the logits read once more for sampling.
Of experts those are read that tokens meet which choose evenly: where they all choose the same ones
it is less. Prompts over latent vectors absorb them, or make keys and values of them, whichever is
less. The parts of a step follow each other, so their times add up. `benchmarks/shapes.py` holds
works against the rates that it measured (step_limit.py beside it), the gauge holds a running
engine's steps against the data sheet's (execute/gpu_specs.py): both are a Machine. It knows step
plans, sizes and a clock; no devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.models.sizes import ModelSizes
from penstock.schedule.step import Chunks, StepPlan

if TYPE_CHECKING:
    from penstock.layers.block import RoutedNumbers

Float64 = NDArray[np.float64]
Columns = dict[str, Float64]

AT_ONCE = 256  # steps that the arithmetic is done for at once


class Machine(Protocol):
    """Rates of a device, in bytes, operations and seconds."""

    @property
    def item(self) -> int:
        """Bytes of a number of weights, logits and plain KV."""

    @property
    def copy(self) -> float:
        """Bytes a second of its memory, read and written together."""

    def layer_seconds(self, tokens: Float64, numbers: int) -> Float64:
        """Returns seconds of a layer's products, matrices of so many numbers, for each count of
        tokens; 0 for none."""

    def head_seconds(self, rows: Float64, numbers: int) -> Float64:
        """The same of the head's product."""

    @property
    def best_rate(self) -> float:
        """Operations a second at best, of products with a layer's matrices."""


_ALL = ("rows", "own", "shared", "shared_pairs", "chunk", "chunk_pairs", "chunk_context")
_OF_A_WINDOW = ("own", "chunk_pairs", "chunk_context")


class Steps:
    """Columns of the steps that were launched, one entry a step.

    rows: tokens drawn.   own: stored tokens that rows read by themselves. shared: tokens of
    prefixes, read once a group.   shared_pairs: (row, prefix token) pairs. chunk: prompt tokens
    prefilled.   chunk_pairs: (token, token before it). chunk_context: stored tokens that chunks
    read.   Layers with a window share nothing: `own 4096` is theirs.
    """

    def __init__(self, windows: Iterable[int] = ()) -> None:
        self._windows = sorted(set(windows))
        named = [f"{name} {window}" for window in self._windows for name in _OF_A_WINDOW]
        self._lists: dict[str, list[int]] = {name: [] for name in (*_ALL, *named)}

    def note(self, plan: StepPlan) -> None:
        """Sums over whole columns: 2 us for a row, 8 for 8,192 in groups."""
        count, lists = int(plan.rows.size), self._lists
        shared = pairs = 0
        if plan.group_length.size:
            shared = int(plan.group_length.sum(dtype=np.int64))
            pairs = int(
                np.diff(plan.group_start).astype(np.int64) @ plan.group_length.astype(np.int64)
            )
        tokens = 0 if plan.chunks is None else plan.chunks.tokens.size
        lists["rows"].append(int(plan.query_rows.size))
        lists["own"].append(int(plan.lengths.sum(dtype=np.int64)) + count - pairs)
        lists["shared"].append(shared)
        lists["shared_pairs"].append(pairs)
        lists["chunk"].append(tokens)
        self._note_chunks("", plan.chunks, None)
        for window in self._windows:
            own = int(np.minimum(plan.lengths + 1, window).sum(dtype=np.int64))
            lists[f"own {window}"].append(own)
            self._note_chunks(f" {window}", plan.chunks, window)

    def _note_chunks(self, suffix: str, chunks: Chunks | None, window: int | None) -> None:
        pairs = read = 0
        if chunks is not None:
            sizes, context = np.diff(chunks.start).astype(np.int64), chunks.context.astype(np.int64)
            if window is not None:  # a chunk's tokens see no more than these before it
                context = np.minimum(context, window - 1)
            each = sizes * context + sizes * (sizes + 1) // 2
            pairs = int((each if window is None else np.minimum(each, sizes * window)).sum())
            read = int((context + sizes).sum())
        self._lists[f"chunk_pairs{suffix}"].append(pairs)
        self._lists[f"chunk_context{suffix}"].append(read)

    def columns(self, count: int | None = None) -> Columns:
        """Returns the first `count` steps; None: all."""
        return {name: np.array(values[:count], np.float64) for name, values in self._lists.items()}

    def forget(self, count: int) -> None:
        """Drops the first `count` steps."""
        for values in self._lists.values():
            del values[:count]

    def __len__(self) -> int:
        return len(self._lists["rows"])


def limit_seconds(steps: Columns, sizes: ModelSizes, machine: Machine) -> float:
    """Returns the least time of these steps (Steps.columns), all together."""
    rows, tokens = steps["rows"], steps["rows"] + steps["chunk"]
    below = sizes.layers - 1  # the last layer answers for rows alone
    share = below / sizes.layers  # of layers in which chunks attend
    seconds = machine.head_seconds(rows, sizes.vocab * sizes.hidden)
    for count, layers in ((tokens, below), (rows, 1)):
        seconds = seconds + layers * machine.layer_seconds(count, sizes.layer_weights)
        for experts, of_layers in sizes.routed:
            seconds = seconds + layers * of_layers / sizes.layers * _experts_seconds(
                count, experts, machine
            )
    if sizes.ahead:
        seconds = seconds + machine.layer_seconds(tokens, sizes.ahead)
    moved = tokens * (sizes.stored + sizes.row_bytes)  # bytes
    moved = moved + rows * (2 * sizes.slot_bytes + sizes.vocab * machine.item)
    operations = np.zeros_like(tokens)
    for each in sizes.attending:
        suffix = "" if each.window is None else f" {each.window}"
        read, pairs = steps[f"own{suffix}"], steps[f"chunk_pairs{suffix}"]
        context = steps[f"chunk_context{suffix}"]
        if (
            latent := each.latent
        ) is not None:  # a chunk's own tokens are made or absorbed by `layer_weights`
            made = (context - steps["chunk"]) * latent.expansion + pairs * latent.expanded_pair
            pairs = np.minimum(pairs, made / latent.absorbed_pair)
        read, pairs = read + context * share, pairs * share
        if each.window is None:
            read, pairs = read + steps["shared"], pairs + steps["shared_pairs"]
        moved = moved + each.layers * read * each.read
        operations = operations + 2.0 * each.layers * pairs * each.numbers
    return float((seconds + moved / machine.copy + operations / machine.best_rate).sum())


def _experts_seconds(tokens: Float64, experts: RoutedNumbers, machine: Machine) -> Float64:
    """Returns seconds of a layer's experts for each count of tokens, which choose evenly."""
    met = experts.experts * (1 - (1 - experts.top_k / experts.experts) ** tokens)
    products = 2.0 * tokens * experts.top_k * experts.numbers / machine.best_rate
    return np.maximum(products, met * experts.bytes / machine.copy)


class RooflineGauge:
    """Least time over time taken, of the steps of the last second of work.

    Taken is what passes from one reading to the next, or from the first launch after a rest: so the
    host's delays count, and times without work don't. It costs a few sums a step, and the
    arithmetic once for many.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        machine: Machine,
        clock: Callable[[], float] = time.monotonic,
        every: float = 1.0,
    ) -> None:
        """every: seconds of steps that a value is made of."""
        self.every = every
        self.share = 0.0  # of the last whole second of steps; 0 until there was one
        self._sizes, self._machine, self._clock = sizes, machine, clock
        self._steps = Steps(sizes.windows)
        self._since: float | None = (
            None  # from when the next reading's time counts; None: from the next launch
        )
        self._read = 0  # steps at the front that have been read and not summed
        self._least = self._taken = 0.0

    def rest(self) -> None:
        """There was no work until now."""
        self._since = None

    def launching(self, plan: StepPlan) -> None:
        """Before a step is launched: its arrays are the runner's from then on."""
        self._steps.note(plan)
        if self._since is None:
            self._since = self._clock()

    def read(self) -> None:
        """The oldest step has been read."""
        assert self._since is not None, "a step is launched before it is read"
        now = self._clock()
        self._taken += now - self._since
        self._since = now
        self._read += 1
        if self._read == AT_ONCE or self._taken >= self.every:
            self._least += limit_seconds(
                self._steps.columns(self._read), self._sizes, self._machine
            )
            self._steps.forget(self._read)
            self._read = 0
        if self._taken >= self.every:
            self.share = self._least / self._taken
            self._least = self._taken = 0.0

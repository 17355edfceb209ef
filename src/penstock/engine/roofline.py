"""Roofline: the least time a step can take. Computes it from a step's sizes and the device's peak
rates, and measures how near real steps come to it.

A step takes at least the sum of: its matrix products at the machine's rate (or one read of its
weights, if longer), one read of K and V by each layer (a shared prefix once per group), reading and
writing the recurrent state of each row, attention's own products at the best rate, and one more
read of the logits for sampling. Experts: the estimate assumes tokens choose them evenly; if all
tokens choose the same experts, less is read. Prompts over latent vectors either absorb them or
expand keys and values, whichever is less. The parts of a step run in sequence, so their times add
up.

`benchmarks/shapes.py` compares measured runs with rates it measured (step_limit.py beside it); the
gauge compares a running engine's steps with the data sheet's rates (execute/gpu_specs.py). Both
implement Machine. Knows step plans, sizes and a clock; no devices.
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

AT_ONCE = 256  # number of steps whose limits are computed in one call


class Machine(Protocol):
    """Peak rates of a device, in bytes, operations and seconds."""

    @property
    def item(self) -> int:
        """Bytes per element of weights, logits and unquantized KV."""

    @property
    def copy(self) -> float:
        """Memory bandwidth in bytes per second, reads and writes together."""

    def layer_seconds(self, tokens: Float64, numbers: int) -> Float64:
        """Returns the seconds of one layer's products, with `numbers` weights, for each count of
        tokens; 0 for a count of 0."""

    def head_seconds(self, rows: Float64, numbers: int) -> Float64:
        """Returns the seconds of the output head's product, for each count of rows."""

    @property
    def best_rate(self) -> float:
        """Peak operations per second of products with a layer's matrices."""


_ALL = ("rows", "own", "shared", "shared_pairs", "chunk", "chunk_pairs", "chunk_context")
_OF_A_WINDOW = ("own", "chunk_pairs", "chunk_context")


class Steps:
    """Columns of launched steps, one entry per step.

    All are counts. rows: tokens drawn. own: cached tokens that rows read each for itself. shared:
    prefix tokens, read once per prefix group. shared_pairs: (row, prefix token) pairs. chunk:
    prompt tokens prefilled. chunk_pairs: pairs of a prompt token and a token before it.
    chunk_context: cached tokens that prompt chunks read. Layers with a window share no prefixes;
    `own 4096` counts for window 4096.
    """

    def __init__(self, windows: Iterable[int] = ()) -> None:
        self._windows = sorted(set(windows))
        named = [f"{name} {window}" for window in self._windows for name in _OF_A_WINDOW]
        self._lists: dict[str, list[int]] = {name: [] for name in (*_ALL, *named)}

    def note(self, plan: StepPlan) -> None:
        """Adds a step's counts, summed by numpy: this takes 2 us for one row, 8 us for 8,192 rows
        in groups."""
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
            if window is not None:  # a chunk's tokens see at most window - 1 tokens before it
                context = np.minimum(context, window - 1)
            each = sizes * context + sizes * (sizes + 1) // 2
            pairs = int((each if window is None else np.minimum(each, sizes * window)).sum())
            read = int((context + sizes).sum())
        self._lists[f"chunk_pairs{suffix}"].append(pairs)
        self._lists[f"chunk_context{suffix}"].append(read)

    def columns(self, count: int | None = None) -> Columns:
        """Returns the columns of the first `count` steps; None: all."""
        return {name: np.array(values[:count], np.float64) for name, values in self._lists.items()}

    def forget(self, count: int) -> None:
        """Forgets the first `count` steps."""
        for values in self._lists.values():
            del values[:count]

    def __len__(self) -> int:
        return len(self._lists["rows"])


def limit_seconds(steps: Columns, sizes: ModelSizes, machine: Machine) -> float:
    """Returns the least total seconds of these steps (Steps.columns)."""
    rows, tokens = steps["rows"], steps["rows"] + steps["chunk"]
    below = sizes.layers - 1  # number of layers in which prompt chunks attend (not the last)
    share = below / sizes.layers  # share of all layers in which prompt chunks attend
    seconds = machine.head_seconds(rows, sizes.vocab * sizes.hidden)
    for count, layers in ((tokens, below), (rows, 1)):
        seconds = seconds + layers * machine.layer_seconds(count, sizes.layer_weights)
        for experts, of_layers in sizes.routed:
            seconds = seconds + layers * of_layers / sizes.layers * _experts_seconds(
                count, experts, machine
            )
    if sizes.ahead:
        seconds = seconds + machine.layer_seconds(tokens, sizes.ahead)
    moved = tokens * (sizes.stored + sizes.row_bytes)  # bytes read and written
    moved = moved + rows * (2 * sizes.slot_bytes + sizes.vocab * machine.item)
    operations = np.zeros_like(tokens)
    for each in sizes.attending:
        suffix = "" if each.window is None else f" {each.window}"
        read, pairs = steps[f"own{suffix}"], steps[f"chunk_pairs{suffix}"]
        context = steps[f"chunk_context{suffix}"]
        if (
            latent := each.latent
        ) is not None:  # the products of a chunk's own tokens are in `layer_weights` already
            made = (context - steps["chunk"]) * latent.expansion + pairs * latent.expanded_pair
            pairs = np.minimum(pairs, made / latent.absorbed_pair)
        read, pairs = read + context * share, pairs * share
        if each.window is None:
            read, pairs = read + steps["shared"], pairs + steps["shared_pairs"]
        moved = moved + each.layers * read * each.read
        operations = operations + 2.0 * each.layers * pairs * each.numbers
    return float((seconds + moved / machine.copy + operations / machine.best_rate).sum())


def _experts_seconds(tokens: Float64, experts: RoutedNumbers, machine: Machine) -> Float64:
    """Returns the seconds of one layer's experts for each count of tokens, which choose experts
    evenly."""
    met = experts.experts * (1 - (1 - experts.top_k / experts.experts) ** tokens)
    products = 2.0 * tokens * experts.top_k * experts.numbers / machine.best_rate
    return np.maximum(products, met * experts.bytes / machine.copy)


class RooflineGauge:
    """Measures the share of the hardware limit that is reached: least possible time over time
    taken, in the last interval of `every` seconds with steps.

    Time taken runs from one reading to the next, or from the first launch after idle: host delays
    count, idle time doesn't. Costs a few sums per step, and the arithmetic once per many steps.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        machine: Machine,
        clock: Callable[[], float] = time.monotonic,
        every: float = 1.0,
    ) -> None:
        """every: seconds of steps averaged into one value."""
        self.every = every
        self.share = 0.0  # value of the last full interval; 0 until there is one
        self._sizes, self._machine, self._clock = sizes, machine, clock
        self._steps = Steps(sizes.windows)
        self._since: float | None = (
            None  # start of the time being measured; None: the next launch starts it
        )
        self._read = 0  # number of oldest steps that were read and are not summed yet
        self._least = self._taken = 0.0

    def rest(self) -> None:
        """Records that the engine was idle until now."""
        self._since = None

    def launching(self, plan: StepPlan) -> None:
        """Notes a step. Call it before the launch: afterwards the plan's arrays belong to the
        runner."""
        self._steps.note(plan)
        if self._since is None:
            self._since = self._clock()

    def read(self) -> None:
        """Records that the oldest launched step was read."""
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

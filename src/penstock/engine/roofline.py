"""How near steps come to what the hardware could do at most: the least time of a step by arithmetic, and a gauge of it.

A step is at least: its matrix products at the machine's rate (or its weights read once, where that is longer), K and V
read once (a prefix once a group), attention's own products at the best rate, and the logits read once more for
sampling. The parts of a step follow each other, so their times add up. `benchmarks/shapes.py` holds works against
the rates that it measured (step_limit.py beside it), the gauge holds a running engine's steps against the data sheet's
(execute/gpu_specs.py): both are a Machine. It knows step plans, sizes and a clock; no devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.step import Chunks, StepPlan

if TYPE_CHECKING:
    from penstock.models.model_config import ModelConfig

Float64 = NDArray[np.float64]
Columns = dict[str, Float64]

EVERY = 1.0  # seconds of steps that a gauge's value is made of
AT_ONCE = 256  # steps that the arithmetic is done for at once


class Machine(Protocol):
    """Rates of a device, in bytes, operations and seconds."""

    @property
    def item(self) -> int:
        """Bytes of a number of weights, KV and logits."""

    @property
    def copy(self) -> float:
        """Bytes a second of its memory, read and written together."""

    def layer_seconds(self, tokens: Float64, numbers: int) -> Float64:
        """Of a layer's products, matrices of so many numbers, for each count of tokens; 0 for none."""

    def head_seconds(self, rows: Float64, numbers: int) -> Float64:
        """The same of the head's product."""

    def best_rate(self, numbers: int) -> float:
        """Operations a second at best, of products with a layer's matrices."""


class Sizes(Protocol):
    """What of a model the least time of its steps depends on."""

    @property
    def layers(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def vocab(self) -> int: ...

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer."""

    @property
    def kv_numbers(self) -> int:
        """Numbers of K and V that a token stores, all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a loaded model."""

    layers: int
    hidden: int
    heads: int
    head_dim: int
    vocab: int
    layer_weights: int
    kv_numbers: int

    @classmethod
    def of(cls, config: ModelConfig) -> ModelSizes:
        queries, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return cls(
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            layer_weights=config.hidden_size * (2 * queries + 2 * kv + 3 * config.intermediate_size),
            kv_numbers=2 * config.num_layers * kv,
        )


@dataclass(slots=True)
class Steps:
    """Columns of the steps that were launched, one entry a step.

    rows: drawn for.   own: stored tokens that rows read by themselves.   shared: tokens of prefixes, read once a group.
    shared_pairs: (row, prefix token) pairs.   chunk: prompt tokens prefilled.   chunk_pairs: (token, token before it).
    chunk_context: stored tokens that chunks read.
    """

    rows: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    shared_pairs: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    chunk_pairs: list[int] = field(default_factory=list)
    chunk_context: list[int] = field(default_factory=list)

    def note(self, plan: StepPlan) -> None:
        """Sums over whole columns: 2 us for a row, 8 for 8,192 in groups."""
        count = int(plan.rows.size)
        shared = pairs = 0
        if plan.group_length.size:
            shared = int(plan.group_length.sum(dtype=np.int64))
            pairs = int(np.diff(plan.group_start).astype(np.int64) @ plan.group_length.astype(np.int64))
        tokens, token_pairs, before = (0, 0, 0) if plan.chunks is None else _chunk_sums(plan.chunks)
        self.rows.append(count)
        self.own.append(int(plan.lengths.sum(dtype=np.int64)) + count - pairs)
        self.shared.append(shared)
        self.shared_pairs.append(pairs)
        self.chunk.append(tokens)
        self.chunk_pairs.append(token_pairs)
        self.chunk_context.append(before)

    def columns(self, count: int | None = None) -> Columns:
        """Of the first `count` steps; None: of all."""
        return {name: np.array(getattr(self, name)[:count], np.float64) for name in self.__slots__}

    def forget(self, count: int) -> None:
        """Drops the first `count` steps."""
        for name in self.__slots__:
            del getattr(self, name)[:count]

    def __len__(self) -> int:
        return len(self.rows)


def _chunk_sums(chunks: Chunks) -> tuple[int, int, int]:
    sizes, context = np.diff(chunks.start).astype(np.int64), chunks.context.astype(np.int64)
    pairs = int((sizes * context + sizes * (sizes + 1) // 2).sum())
    return int(sizes.sum()), pairs, int((context + sizes).sum())


def limit_seconds(steps: Columns, sizes: Sizes, machine: Machine) -> float:
    """The least time of these steps (Steps.columns), all together."""
    tokens = steps["rows"] + steps["chunk"]
    products = sizes.layers * machine.layer_seconds(tokens, sizes.layer_weights)
    head = machine.head_seconds(steps["rows"], sizes.vocab * sizes.hidden)
    kv = (steps["own"] + steps["shared"] + steps["chunk_context"] + tokens) * sizes.kv_numbers * machine.item
    pairs = steps["shared_pairs"] + steps["chunk_pairs"]
    attention = pairs * 4.0 * sizes.heads * sizes.head_dim * sizes.layers / machine.best_rate(sizes.layer_weights)
    logits = steps["rows"] * sizes.vocab * machine.item
    return float((products + head + attention + (kv + logits) / machine.copy).sum())


class RooflineGauge:
    """Least time over time taken, of the steps of the last second of work.

    Taken is what passes from one reading to the next, or from the first launch after a rest: so the host's delays
    count, and times without work don't. It costs a few sums a step, and the arithmetic once for many.
    """

    def __init__(self, sizes: Sizes, machine: Machine, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = 0.0  # of the last whole second of steps; 0 until there was one
        self._sizes, self._machine, self._clock = sizes, machine, clock
        self._steps = Steps()
        self._since: float | None = None  # from when the next reading's time counts; None: from the next launch
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
        if self._read == AT_ONCE or self._taken >= EVERY:
            self._least += limit_seconds(self._steps.columns(self._read), self._sizes, self._machine)
            self._steps.forget(self._read)
            self._read = 0
        if self._taken >= EVERY:
            self.share = self._least / self._taken
            self._least = self._taken = 0.0

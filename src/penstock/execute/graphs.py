"""Graphs: decode steps captured once and replayed. CUDA alone.

    at start, for each size up to GRAPH_ROWS, the largest first (the smaller ones fit into its
    memory):
        forward of rows that stand alone    forward with prefix groups    plain draw    draw with
        all that rows may ask
    for the smallest: a plain step in one        for one row with a prompt's chunk, by tokens:
    forward
    at work, when a step comes the second time: those of larger sizes, of rows and chunks, and draws
    that say forced
        tokens. Of an artifact whose work shares no prefix also sizes between powers of two, the
        first time, and all
        but plain forwards and draws

All share one memory pool. Capturing stops when its time or its memory is used up: larger sizes were
captured first, so what is missing then is filled by the next larger graph; sizes are therefore
captured coarse ones first. A capture at work takes little longer than the launches that it stands
for. It knows how to launch a step of a size, and replays it; nothing of what is in it.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.execute.padding import WHOLE_ROWS

CAPTURE_SECONDS = 6.0
SPARE_BYTES = 1 << 30  # that a capture at work leaves free, beside what the largest step takes

Forward = Callable[[int, bool], Tensor]  # size, with prefix groups -> hidden states
# size, hidden states, of all that rows may ask, with forced tokens
Draw = Callable[[int, Tensor, bool, bool], None]


@dataclass(slots=True)
class Captured:
    """The graphs of one size."""

    # with prefix groups or without
    forward: dict[bool, torch.cuda.CUDAGraph] = field(default_factory=dict)
    # as Draw's two last
    draw: dict[tuple[bool, bool], torch.cuda.CUDAGraph] = field(default_factory=dict)
    whole: torch.cuda.CUDAGraph | None = None  # forward of rows that stand alone, and plain draw


class Graphs:
    """Graphs by size. `hidden [rows, d]`: where a captured forward leaves its states and a captured
    draw finds them."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self.by_size: dict[int, Captured] = {}
        # of rows and chunks: forward
        self.beside: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._met: set[tuple[int | str, ...]] = set()  # steps without a graph that came once
        self._full = False
        self._sizes: list[int] = []  # in order
        # of these, those that are captured as soon as they come
        self._later: frozenset[int] = frozenset()
        self.seconds, self.bytes = 0.0, 0
        self._pool = torch.cuda.graph_pool_handle()

    def capture(
        self,
        sizes: Sequence[int],
        grouping: bool,
        asking: bool,
        forward: Forward,
        draw: Draw,
        room: int | None,
    ) -> None:
        """Captures each step without running it. Kernels are compiled and loaded before (`warm`),
        or now.

        room: bytes that graphs may take. None: other ranks capture the same sizes, and no clock or
        memory of this one's own leaves any out. grouping, asking: with prefix groups too, and all
        that rows may ask."""
        begun, before = time.monotonic(), torch.cuda.memory_reserved()
        for size in coarse_first(sizes):
            self.seconds, self.bytes = (
                time.monotonic() - begun,
                torch.cuda.memory_reserved() - before,
            )
            spent = room is not None and (self.seconds > CAPTURE_SECONDS * 0.9 or self.bytes > room)
            if self.by_size and spent:
                break
            captured = Captured()
            for grouped in (False, True) if grouping and size > 1 else (False,):
                captured.forward[grouped] = self._one_forward(size, grouped, forward)
            for every in (False, True) if asking else (False,):
                captured.draw[every, False] = self._one_draw(size, every, False, draw)
            if size <= WHOLE_ROWS:
                captured.whole = self._one(lambda: draw(size, forward(size, False), False, False))  # noqa: B023
            self.by_size[size] = captured
            insort(self._sizes, size)
        torch.cuda.current_stream().synchronize()
        self.seconds, self.bytes = time.monotonic() - begun, torch.cuda.memory_reserved() - before

    def capture_later(self, sizes: Iterable[int]) -> None:
        """Has steps run as these sizes too, which are captured as soon as they come."""
        self._later = frozenset(sizes).difference(self.by_size)
        self._sizes = sorted({*self._sizes, *self._later})

    def capture_beside(
        self, rows: int, tokens: int, grouped: bool, forward: Callable[[], Tensor]
    ) -> None:
        """The forward of rows and chunks, `tokens` in all; the rows' states go where their draw
        looks for them."""
        graph = self._one(lambda: self.hidden[:rows].copy_(forward()[:rows]))
        self.beside[rows, tokens, grouped] = graph

    def size_for(self, rows: int) -> int | None:
        """The smallest size with graphs, now or once it comes, that holds `rows` rows."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else None

    def whole(self, size: int) -> torch.cuda.CUDAGraph | None:
        """Returns the graph of a plain step of the smallest sizes, None of others."""
        return self.by_size[size].whole if size in self.by_size else None

    def forward(self, size: int, grouped: bool, launch: Forward) -> torch.cuda.CUDAGraph | None:
        """Returns a forward's graph, captured now if it is due; None where its launches are to go
        out one by one."""
        there = self.by_size.setdefault(size, Captured()).forward
        if grouped not in there and self._comes_again(size, "forward", grouped):
            there[grouped] = self._one_forward(size, grouped, launch)
        return there.get(grouped)

    def draw(
        self, size: int, every: bool, forces: bool, launch: Draw
    ) -> torch.cuda.CUDAGraph | None:
        """Returns a draw's graph, captured now if it is due; None where its launches are to go out
        one by one."""
        there = self.by_size.setdefault(size, Captured()).draw
        if (every, forces) not in there and self._comes_again(size, "draw", every, forces):
            there[every, forces] = self._one_draw(size, every, forces, launch)
        return there.get((every, forces))

    def with_chunks(
        self, rows: int, tokens: int, grouped: bool, launch: Callable[[], Tensor]
    ) -> torch.cuda.CUDAGraph | None:
        """Returns the graph of rows and chunks, captured now if it is due; None where it is to be
        launched."""
        if (rows, tokens, grouped) not in self.beside and self._comes_again(
            rows, "beside", tokens, grouped
        ):
            self.capture_beside(rows, tokens, grouped, launch)
        return self.beside.get((rows, tokens, grouped))

    def _comes_again(self, size: int, *kind: int | str) -> bool:
        """Whether a step is to be captured: it came before or is of a size that was left for later,
        and there is room. One that comes once isn't worth it, and where room has run out nothing is
        captured any more."""
        step = (size, *kind)
        if self._full or (step not in self._met and size not in self._later):
            self._met.add(step)
            return False
        largest = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        self._full = torch.cuda.mem_get_info()[0] <= largest + SPARE_BYTES
        return not self._full

    def _one_forward(self, size: int, grouped: bool, launch: Forward) -> torch.cuda.CUDAGraph:
        return self._one(lambda: self.hidden[:size].copy_(launch(size, grouped)))

    def _one_draw(self, size: int, every: bool, forces: bool, launch: Draw) -> torch.cuda.CUDAGraph:
        return self._one(lambda: launch(size, self.hidden[:size], every, forces))

    def _one(self, launches: Callable[[], object]) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph collects garbage and empties caches around each capture: 50 ms, some
        # hundred times. relaxed: a library may load a kernel that it meets here first. A run ahead
        # of each capture, so that it never does, took half of the time: 71 sizes of a 1B 2.96 s,
        # without 1.34.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        try:
            launches()
        finally:
            graph.capture_end()
        return graph


def coarse_first(sizes: Sequence[int]) -> list[int]:
    """The largest, then sizes about a factor of two apart, then what lies between, each from the
    largest on."""
    rest = sorted(sizes, reverse=True)
    order: list[int] = []
    ratio = 2.0
    while rest:
        last, left = float("inf"), []
        for size in rest:
            if size * ratio <= last:
                order.append(size)
                last = size
            else:
                left.append(size)
        rest, ratio = left, max(1.0, ratio**0.5 if ratio > 1.05 else 1.0)
    return order

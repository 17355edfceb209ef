"""Graphs: captures decode steps as CUDA graphs. Each is captured once and replayed.

    at start, for each size up to GRAPH_ROWS, largest first (smaller ones fit into its memory):
        forward without prefix groups, forward with them, plain draw, draw with all sampling options
        smallest sizes: a plain step in one graph. One row with a prompt's chunk, by tokens: forward
    later, when a step comes the second time: larger sizes, rows with chunks, draws with forced
        tokens, a proposer's launches. For a built engine whose workload shares no prefix also sizes
        between powers of two, on first use, and all but plain forwards and draws

All graphs share one memory pool. Capturing stops when its time or memory is used up: large and
coarse sizes are captured first, so that a missing size runs as the next larger one. A capture
during work takes little longer than the launches it replaces. Knows how to launch and replay a step
of a size; not its content.
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
# bytes that a capture between requests' steps must leave free, beside the largest step's memory
SPARE_BYTES = 1 << 30

# arguments: size, True with prefix groups; returns hidden states
Forward = Callable[[int, bool], Tensor]
# arguments: size, hidden states, True with all sampling options, True with forced tokens
Draw = Callable[[int, Tensor, bool, bool], None]


@dataclass(slots=True)
class Captured:
    """The CUDA graphs for steps of one size."""

    # key: True for steps with prefix groups
    forward: dict[bool, torch.cuda.CUDAGraph] = field(default_factory=dict)
    # key: (with all sampling options, with forced tokens), as in Draw
    draw: dict[tuple[bool, bool], torch.cuda.CUDAGraph] = field(default_factory=dict)
    # one graph of the forward without prefix groups and the plain draw
    whole: torch.cuda.CUDAGraph | None = None


class Graphs:
    """CUDA graphs by size (rows of a step). hidden [rows, model width]: written by a captured
    forward, read by a captured draw."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self.by_size: dict[int, Captured] = {}
        # (rows, tokens, True with prefix groups) -> forward of rows and prompt chunks
        self.beside: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        # name, queries or rows, drafts -> a proposer's launches
        self._drafts: dict[tuple[str, int, int], torch.cuda.CUDAGraph] = {}
        # kinds of steps without a graph that ran once
        self._met: set[tuple[int | str, ...]] = set()
        self._full = False
        self._sizes: list[int] = []  # row counts that have graphs, ascending
        # row counts whose graphs are captured on first use
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
        """Captures a decode step of each size without running it. Kernels are compiled and loaded
        earlier (`warm`), or during the capture.

        room: bytes that graphs may take; None: no size is left out for lack of time or memory,
        because other ranks capture the same ones. grouping: also capture forwards with prefix
        groups. asking: also capture draws with all sampling options."""
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
        """Adds sizes that steps may run at, captured on first use."""
        self._later = frozenset(sizes).difference(self.by_size)
        self._sizes = sorted({*self._sizes, *self._later})

    def capture_beside(
        self, rows: int, tokens: int, grouped: bool, forward: Callable[[], Tensor]
    ) -> None:
        """Captures the forward of rows and prompt chunks, `tokens` tokens in all. It writes the
        rows' hidden states to `hidden`."""
        graph = self._one(lambda: self.hidden[:rows].copy_(forward()[:rows]))
        self.beside[rows, tokens, grouped] = graph

    def size_for(self, rows: int) -> int | None:
        """Returns the smallest size for `rows` rows that has graphs or is captured on first use;
        None: no such size."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else None

    def whole(self, size: int) -> torch.cuda.CUDAGraph | None:
        """Returns the graph of a plain step, or None for all but the smallest sizes."""
        return self.by_size[size].whole if size in self.by_size else None

    def forward(self, size: int, grouped: bool, launch: Forward) -> torch.cuda.CUDAGraph | None:
        """Returns a forward's graph; captures it first if it is to have one. None: launch the
        kernels one by one."""
        there = self.by_size.setdefault(size, Captured()).forward
        if grouped not in there and self._comes_again(size, "forward", grouped):
            there[grouped] = self._one_forward(size, grouped, launch)
        return there.get(grouped)

    def draw(
        self, size: int, every: bool, forces: bool, launch: Draw
    ) -> torch.cuda.CUDAGraph | None:
        """Returns a draw's graph; captures it first if it is to have one. None: launch the kernels
        one by one."""
        there = self.by_size.setdefault(size, Captured()).draw
        if (every, forces) not in there and self._comes_again(size, "draw", every, forces):
            there[every, forces] = self._one_draw(size, every, forces, launch)
        return there.get((every, forces))

    def with_chunks(
        self, rows: int, tokens: int, grouped: bool, launch: Callable[[], Tensor]
    ) -> torch.cuda.CUDAGraph | None:
        """Returns the graph of a forward of rows and prompt chunks; captures it first if it is to
        have one. None: launch the kernels one by one."""
        if (rows, tokens, grouped) not in self.beside and self._comes_again(
            rows, "beside", tokens, grouped
        ):
            self.capture_beside(rows, tokens, grouped, launch)
        return self.beside.get((rows, tokens, grouped))

    def drafts(
        self, name: str, size: int, most: int, launch: Callable[[], None]
    ) -> torch.cuda.CUDAGraph | None:
        """Returns the graph of a proposer's launches `name` for so many queries or rows and drafts;
        captures it first if it is to have one. None: launch the kernels one by one."""
        kind = name, size, most
        if kind not in self._drafts and self._comes_again(size, name, most):
            self._drafts[kind] = self._one(launch)
        return self._drafts.get(kind)

    def _comes_again(self, size: int, *kind: int | str) -> bool:
        """Returns True if a step is to be captured now: the same kind ran before, or its size is
        captured on first use, and there is memory. A capture does not pay for a step that runs
        once. Once memory has run out nothing is captured any more."""
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
        # torch.cuda.graph is not used: it collects garbage and empties caches at each of some
        # hundred captures, 50 ms each. Mode relaxed: a library may load a kernel during capture.
        # Running each step once before, to have all kernels loaded, took 2.96 s instead of 1.34
        # s for 71 sizes of a 1B model.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        try:
            launches()
        finally:
            graph.capture_end()
        return graph


def coarse_first(sizes: Sequence[int]) -> list[int]:
    """Returns the sizes reordered: the largest, then sizes about a factor of two apart, then the
    sizes between, each descending."""
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

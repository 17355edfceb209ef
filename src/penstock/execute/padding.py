"""padding: the padded sizes of a step. Numbers of rows, prefix groups and tokens are padded to a
few sizes each, so that all can be compiled at start.

Knows numbers alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# up to so many rows each size has a CUDA graph; larger steps keep the device busy longer than their
# launches take
GRAPH_ROWS = 2048
_MAX_GROUPS = 1024
# up to so many rows a plain step is one graph, draw included: in steps this short the
# microseconds of a second graph launch matter
WHOLE_ROWS = 4
# Padded rows and prompt tokens of small steps with prompt chunks, which can be CUDA graphs. Without
# a graph such a step takes the host 6 to 12 ms, and the device half of that or less. Larger steps
# keep the device busy longer than the host.
BESIDE_ROWS = (1, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
BESIDE_TOKENS = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
BESIDE_CHUNKS = 16  # padded number of chunks in such steps; the least value of chunk_capacity
# numbers of prompt tokens beside one row for which a graph is captured at start
CHUNK_GRAPHS = (
    32,
    64,
    128,
    256,
    512,
)


def padded(rows: int) -> int:
    """Returns the padded number of rows. Sizes are close together where steps are short."""
    if rows <= 4:
        return (0, 1, 2, 4, 4)[rows]
    stride = 8 if rows <= 512 else 32 if rows <= 1024 else 64 if rows <= GRAPH_ROWS else 128
    return -(-rows // stride) * stride


def sizes_up_to(rows: int) -> list[int]:
    """Returns all sizes at which up to `rows` rows may run, largest first."""
    return sorted({padded(count) for count in range(1, rows + 1)}, reverse=True)


def graph_sizes(rows: int, close: int = GRAPH_ROWS) -> list[int]:
    """Returns the sizes up to `rows` to capture, largest first. From 64 to 512 rows only every
    second size: each size takes time at start, and eight more rows cost a step almost nothing.
    Above `close` rows, sizes are a factor of two apart."""
    top, sizes = padded(rows), sizes_up_to(rows)
    near = [
        size
        for size in sizes
        if size <= padded(close) and (size <= 64 or size > 512 or size % 16 == 0)
    ]
    far = {padded(min(rows, close << power)) for power in range(rows.bit_length())}
    return sorted({*near, *far, top}, reverse=True)


def group_capacity(size: int) -> int:
    """Returns the number of prefix groups that a step of this size has room for; rows of further
    groups attend without a group.

    An unused group costs one kernel program per layer that returns at once.
    """
    if size < 2:
        return 0
    capacity = 1
    while capacity < min(size // 4, _MAX_GROUPS):
        capacity *= 2
    return capacity


def chunk_capacity(chunks: int) -> int:
    """Returns the number of chunks, with empty ones, to which a step's chunks are padded: 16, 256,
    4,096, then a factor of four apart.

    An empty chunk costs one kernel program per KV head and layer that returns at once.
    """
    capacity = 16
    while capacity < chunks:
        capacity *= 16 if capacity < 4096 else 4
    return capacity


def padded_tokens(tokens: int) -> int:
    """Returns the padded number of tokens of a step with chunks."""
    return -(-tokens // 16) * 16


class BesideSizes(NamedTuple):
    """Padded sizes of a step with rows and prompt tokens. few: True if it is one of the few sizes
    with graphs."""

    rows: int
    tokens: int  # tokens of rows and prompts together, padded
    few: bool


def padded_beside(rows: int, tokens: int) -> BesideSizes:
    """Returns the sizes of a step with `rows` rows and `tokens` prompt tokens: coarse where steps
    are short. A prompt chunk without rows runs beside one dead row, so that it has the same sizes
    as a last chunk beside its new row."""
    if rows <= BESIDE_ROWS[-1]:
        size = BESIDE_ROWS[bisect_left(BESIDE_ROWS, rows)]
        whole = size // 16 * 16
        if (more := tokens + size - whole) <= BESIDE_TOKENS[-1]:
            return BesideSizes(size, whole + BESIDE_TOKENS[bisect_left(BESIDE_TOKENS, more)], True)
    size = padded(rows)
    return BesideSizes(size, padded_tokens(size + tokens), False)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Functions that pad numbers of rows, prefix groups, chunks and tokens."""

    rows: Callable[[int], int]
    # (padded rows, prefix groups) -> padded number of prefix groups
    groups: Callable[[int, int], int]
    chunks: Callable[[int], int]
    beside: Callable[[int, int], BesideSizes]  # (rows, tokens of prompt chunks) -> padded sizes


PADDED = StepSizes(padded, lambda size, groups: group_capacity(size), chunk_capacity, padded_beside)
# plain torch: padding would cost time and gain nothing
EXACT = StepSizes(
    int,
    lambda size, groups: groups,
    int,
    lambda rows, tokens: BesideSizes(rows, rows + tokens, False),
)

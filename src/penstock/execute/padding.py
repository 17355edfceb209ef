"""sizes: how many rows, groups and tokens a step runs as. Few of each, so that all of them are
compiled at start.

It knows numbers alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

GRAPH_ROWS = 2048  # up to here a graph for each size; above it launches hide behind the device
_MAX_GROUPS = 1024
# up to here a plain step is one graph, draw and all: a second one costs microseconds that count
# there
WHOLE_ROWS = 4
# Rows, and tokens of prompts beside them, of steps that are few enough kinds to be graphs: launched
# one by one such a step takes the host 6 to 12 ms, and the device a half or less. Larger ones the
# device takes longer for.
BESIDE_ROWS = (1, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
BESIDE_TOKENS = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
BESIDE_CHUNKS = 16  # at most of them; chunk_capacity's least
# tokens of a step of one row and a prompt's chunk that is captured at the start
CHUNK_GRAPHS = (
    32,
    64,
    128,
    256,
    512,
)


def padded(rows: int) -> int:
    """The size that this many rows run as: close together where a step is short."""
    if rows <= 4:
        return (0, 1, 2, 4, 4)[rows]
    stride = 8 if rows <= 512 else 32 if rows <= 1024 else 64 if rows <= GRAPH_ROWS else 128
    return -(-rows // stride) * stride


def sizes_up_to(rows: int) -> list[int]:
    """Every size that up to `rows` rows may run as, the largest first."""
    return sorted({padded(count) for count in range(1, rows + 1)}, reverse=True)


def graph_sizes(rows: int, close: int = GRAPH_ROWS) -> list[int]:
    """The sizes up to `rows` that are captured, the largest first: of 64 to 512 rows every second,
    since a size takes its time of the start and eight more rows next to nothing of a step. Above
    `close` rows they are a factor of two apart."""
    top, sizes = padded(rows), sizes_up_to(rows)
    near = [
        size
        for size in sizes
        if size <= padded(close) and (size <= 64 or size > 512 or size % 16 == 0)
    ]
    far = {padded(min(rows, close << power)) for power in range(rows.bit_length())}
    return sorted({*near, *far, top}, reverse=True)


def group_capacity(size: int) -> int:
    """Prefix groups that a step of this size has room for: rows of groups past it are attended
    alone.

    An empty place costs a program a layer that returns at once.
    """
    if size < 2:
        return 0
    capacity = 1
    while capacity < min(size // 4, _MAX_GROUPS):
        capacity *= 2
    return capacity


def chunk_capacity(chunks: int) -> int:
    """How many chunks a step with so many is padded to, with empty ones: 16, 256, 4,096, then a
    factor of four apart.

    An empty chunk costs a program a KV head and layer that returns at once.
    """
    capacity = 16
    while capacity < chunks:
        capacity *= 16 if capacity < 4096 else 4
    return capacity


def padded_tokens(tokens: int) -> int:
    """Tokens of a step with chunks."""
    return -(-tokens // 16) * 16


class BesideSizes(NamedTuple):
    """What rows and the tokens of prompts beside them run as. few: whether that is one of few
    kinds."""

    rows: int
    tokens: int  # of rows and prompts
    few: bool


def padded_beside(rows: int, tokens: int) -> BesideSizes:
    """Returns the sizes of a step of so many rows and prompt tokens: coarse where steps are short.
    A prompt's part alone runs beside a dead row, as its last part does beside the row that it
    brings."""
    if rows <= BESIDE_ROWS[-1]:
        size = BESIDE_ROWS[bisect_left(BESIDE_ROWS, rows)]
        whole = size // 16 * 16
        if (more := tokens + size - whole) <= BESIDE_TOKENS[-1]:
            return BesideSizes(size, whole + BESIDE_TOKENS[bisect_left(BESIDE_TOKENS, more)], True)
    size = padded(rows)
    return BesideSizes(size, padded_tokens(size + tokens), False)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step of so many rows, groups, chunks and tokens runs as."""

    rows: Callable[[int], int]
    # the rows' size, groups -> places for groups; those past them go alone
    groups: Callable[[int, int], int]
    chunks: Callable[[int], int]
    beside: Callable[[int, int], BesideSizes]  # rows, tokens of chunks


PADDED = StepSizes(padded, lambda size, groups: group_capacity(size), chunk_capacity, padded_beside)
# In plain torch padding would cost, and buy nothing.
EXACT = StepSizes(
    int,
    lambda size, groups: groups,
    int,
    lambda rows, tokens: BesideSizes(rows, rows + tokens, False),
)

"""Columns of what a step adds: rows that join and chunks that are prefilled, as the runner takes them.

It knows what admission picked, and the rows' tables; it decides nothing.
"""

from __future__ import annotations

import numpy as np

from penstock.schedule.admission import Chunk, Piece
from penstock.schedule.request_state import sampling_columns
from penstock.schedule.rows import Rows
from penstock.schedule.step import SCRATCH_BLOCK, Chunks, Int32, Joins


def joins_of(pieces: list[Piece], rows: Rows) -> Joins | None:
    """The columns of rows that join; their tables as they stand now."""
    if not pieces:
        return None
    counts = [piece.rows.size for piece in pieces]
    joined = np.concatenate([piece.rows for piece in pieces])

    def each(values: list[int]) -> Int32:
        return np.repeat(np.array(values, np.int32), counts)

    width = int(rows.blocks[joined].max())
    table = rows.table[joined, :width]
    table[np.arange(width) >= rows.blocks[joined, None]] = SCRATCH_BLOCK
    return Joins(
        rows=joined,
        samples=np.concatenate([piece.samples for piece in pieces]),
        length=each([p.group.target for p in pieces]),
        last_token=each([int(p.group.tokens[-1]) for p in pieces]),
        prompt_length=each([p.group.live.prompt_length for p in pieces]),
        min_length=each([p.group.live.min_length for p in pieces]),
        limit=each([p.group.live.limit for p in pieces]),
        blocks=table,
        sampling=sampling_columns([p.group.live for p in pieces], counts),
    )


def chunks_of(chunks: list[Chunk]) -> Chunks | None:
    """The columns of prompt pieces that are prefilled."""
    if not chunks:
        return None
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    blocks = np.full((len(chunks), max(chunk.blocks.size for chunk in chunks)), SCRATCH_BLOCK, np.int32)
    for row, chunk in enumerate(chunks):
        blocks[row, : chunk.blocks.size] = chunk.blocks
    scored = [-1 if c.group.resumed else c.group.live.prompt_logprobs for c in chunks]
    return Chunks(
        tokens=np.concatenate([c.group.tokens[c.start : c.stop] for c in chunks]),
        start=np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
        context=np.array([c.start for c in chunks], np.int32),
        blocks=blocks,
        prompt_logprobs=np.array(scored, np.int32),
        next_token=np.concatenate([c.group.tokens[c.start + 1 : c.stop + 1] for c in chunks]),
    )

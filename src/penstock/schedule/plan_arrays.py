"""Builds the joins and prompt chunks of a step. joins_of makes the arrays of rows that join,
chunks_of those of prompt chunks to prefill.

Knows the choices of admission.py and the rows' block tables; decides nothing.
"""

from __future__ import annotations

import numpy as np

from penstock.schedule.admission import Chunk, Piece
from penstock.schedule.rows import Rows
from penstock.schedule.step import SCRATCH_BLOCK, Chunks, Joins


def joins_of(pieces: list[Piece], rows: Rows) -> Joins | None:
    """Returns the columns of joining rows, with their current tables; None without any."""
    if not pieces:
        return None
    counts = [piece.rows.size for piece in pieces]
    lives = [piece.group.live for piece in pieces]
    heads = np.concatenate([live.record for live in lives])
    heads["length"] = [piece.group.target for piece in pieces]
    heads["last_token"] = [piece.group.tokens[-1] for piece in pieces]
    records = np.repeat(heads, counts)
    records["row"] = np.concatenate([piece.rows for piece in pieces])
    joined = records["row"].astype(np.intp)
    records["sample"] = np.concatenate([piece.samples for piece in pieces])
    records["mask_slot"] = rows.mask_slot[joined]
    blocks = rows.blocks[joined]
    width = int(blocks.max())
    table = rows.table[joined, :width]
    table[np.arange(width) >= blocks[:, None]] = SCRATCH_BLOCK
    start = np.zeros(records.size + 1, np.int32)
    biased = [
        (live, count) for live, count in zip(lives, counts, strict=True) if live.bias_ids.size
    ]
    if biased:
        np.cumsum(np.repeat([live.bias_ids.size for live in lives], counts), out=start[1:])
    ids = [np.tile(live.bias_ids, count) for live, count in biased]
    values = [np.tile(live.bias_values, count) for live, count in biased]
    return Joins(
        records=records,
        blocks=table,
        bias_start=start,
        bias_ids=np.concatenate(ids) if ids else np.zeros(0, np.int32),
        bias_values=np.concatenate(values) if values else np.zeros(0, np.float32),
    )


def chunks_of(chunks: list[Chunk]) -> Chunks | None:
    """Returns the columns of the prompt chunks to prefill; None without any."""
    if not chunks:
        return None
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    blocks = np.full(
        (len(chunks), max(chunk.blocks.size for chunk in chunks)), SCRATCH_BLOCK, np.int32
    )
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
        slots=np.array([c.group.state_slot for c in chunks], np.int32)
        if chunks[0].group.state_slot >= 0
        else None,
        tags=np.array([c.group.live.tag for c in chunks], np.int32),
    )

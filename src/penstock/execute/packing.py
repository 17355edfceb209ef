"""Packing: pads a plan's arrays for the device. Arrays that every step has are written to the
staging buffer's fixed part.

Knows plans and addresses; launches no kernels. device_step.py chooses the padded sizes,
staged_plan.py the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.execute.padding import BesideSizes
from penstock.execute.staging_buffer import Staging
from penstock.kernels.inputs import ChunkSight, PrefillInputs
from penstock.kernels.row_state import pack_joins
from penstock.row_table import JOIN_WORDS
from penstock.schedule.step import Chunks, Int32, Int64, Joins, StepPlan

_NONE: Int32 = np.zeros(0, np.int32)


@dataclass(slots=True)
class StagedChunks:
    """A step's prompt chunks on the device. Shapes: tokens: all chunks' tokens, padded with tokens
    that write to the dump block; chunks: number of chunks, padding included."""

    ids: Tensor  # [tokens] int32: token ids
    positions: Tensor  # [tokens] int64: position in the sequence
    slots: Tensor  # [tokens] int64: KV cache slot that the token is written to
    inputs: PrefillInputs
    states: Tensor | None  # [chunks] int64: slots of recurrent state; None: no recurrent state
    tags: Tensor | None  # [tokens] int32: the request's tag; None: the model reads no tags
    # embeddings given in the request: for k tokens, their indices among the step's tokens [k]
    # int64, and the embeddings [k, model width] float32
    embeds: tuple[Tensor, Tensor] | None
    next_ids: Tensor | None  # [tokens] int32: the prompt token after each; None: nothing drafts


def pack_rows(staging: Staging, plan: StepPlan, skip: Int32, size: int, dead_row: int) -> None:
    """Writes the step's queries to the staging buffer: the rows, padded to `size` with the dead
    row; the tokens that each row skips because its prefix group attends to them (skip:
    plan.group_skip); and drafts, if any."""
    offset, draft = _NONE, _NONE
    if (drafts := plan.drafts) is not None:
        offset = drafts.offset
        draft = np.zeros(offset.size, np.int32)
        draft[offset > 0] = drafts.told
        skip = np.repeat(skip, drafts.counts[: skip.size] + 1)
    staging.write("rows", plan.query_rows, dead_row, size)
    staging.write("skip", skip, 0, size)
    staging.write("offset", offset, 0, size)
    staging.write("draft", draft, 0, size)


def pack_groups(staging: Staging, plan: StepPlan, capacity: int) -> None:
    """Writes the prefix groups to the staging buffer: each group's first query and prefix length,
    padded with empty groups."""
    start = plan.group_queries
    staging.write("group_start", start, int(start[-1]), capacity + 1)
    staging.write("group_length", plan.group_length, 0, capacity)


def without_groups_past(plan: StepPlan, capacity: int) -> None:
    """Drops prefix groups beyond the capacity. They come last in the plan, so their rows become
    rows without a group."""
    if plan.group_length.size > capacity:
        plan.group_start = plan.group_start[: capacity + 1]
        plan.group_blocks, plan.group_length = (
            plan.group_blocks[:capacity],
            plan.group_length[:capacity],
        )


def join_lines(joins: Joins, bias_start: Int64) -> Int32:
    """Returns the joining rows' data, int32 [rows, words]: each row's fields, then its block table,
    padded to a multiple of 16 words, so that kernels are compiled for few widths."""
    words = -(-(JOIN_WORDS + joins.blocks.shape[1]) // 16) * 16
    lines = np.empty((joins.rows.size, words), np.int32)
    pack_joins(joins, bias_start, lines)
    return lines


def new_block_lines(new_blocks: Int32) -> Int32:
    """Returns the plan's new blocks [m, 3], padded with row -1."""
    lines = np.full((-(-new_blocks.shape[0] // 16) * 16, 3), -1, np.int32)
    lines[: new_blocks.shape[0]] = new_blocks
    return lines


def pack_chunks(
    staging: Staging,
    chunks: Chunks,
    sizes: BesideSizes,
    capacity: int,
    dump_block: int,
    reads_tags: bool,
    dump_state: int | None = None,
    follows: bool = False,
) -> StagedChunks:
    """Adds the chunks' arrays to the staging buffer and returns them. sizes: padded rows and tokens
    of the step. capacity: padded number of chunks. dump_block: block that padding tokens write to.
    dump_state: slot of recurrent state for padding; None: no recurrent state. follows: True adds
    the token after each.
    """
    count, size, tokens = chunks.context.size, chunks.tokens.size, sizes.tokens - sizes.rows
    positions, slots = (
        np.zeros(tokens, np.int64),
        np.full(tokens, dump_block * BLOCK_SIZE, np.int64),
    )
    ids = np.zeros(tokens, np.int32)
    positions[:size] = chunk_positions(chunks)
    slots[:size] = chunk_slots(chunks, positions[:size])
    ids[:size] = chunks.tokens
    start = np.full(capacity + 1, size, np.int32)
    start[: count + 1] = chunks.start
    context = np.zeros(capacity, np.int32)
    context[:count] = chunks.context
    seen = ChunkSight.of(np.diff(chunks.start), chunks.context)
    inputs = PrefillInputs(
        staging.add(start), staging.add(context), staging.add(_widened(chunks.blocks)), seen
    )
    states = tags = embeds = next_ids = None
    if dump_state is not None:
        own = np.full(capacity, dump_state, np.int64)
        own[:count] = dump_state if chunks.slots is None else chunks.slots
        states = staging.add(own)
    if reads_tags:
        each = np.zeros(tokens, np.int32)
        if chunks.tags is not None:
            each[:size] = np.repeat(chunks.tags, np.diff(chunks.start))
        tags = staging.add(each)
    if (handed := chunks.embeds) is not None:
        embeds = staging.add(handed.where.astype(np.int64) + sizes.rows), staging.add(handed.rows)
    if follows:
        after = np.zeros(tokens, np.int32)
        after[:size] = chunks.next_token
        next_ids = staging.add(after)
    return StagedChunks(
        staging.add(ids),
        staging.add(positions),
        staging.add(slots),
        inputs,
        states,
        tags,
        embeds,
        next_ids,
    )


def chunk_positions(chunks: Chunks) -> Int64:
    """Returns each token's position in its prompt, int64 [tokens]."""
    offset = (chunks.context - chunks.start[:-1]).astype(np.int64)
    return np.repeat(offset, np.diff(chunks.start)) + np.arange(chunks.tokens.size)


def chunk_slots(chunks: Chunks, at: Int64) -> Int64:
    """Returns the KV cache slot of each token, int64 [tokens]: block * 16 + place in the block. at:
    the tokens' positions."""
    chunk = np.repeat(np.arange(chunks.context.size), np.diff(chunks.start))
    block: Int32 = chunks.blocks[chunk, at // BLOCK_SIZE]
    return block.astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE


def _widened(blocks: Int32) -> Int32:
    """Returns the block tables [chunks, width] with the width padded to a multiple of 16."""
    out = np.zeros((blocks.shape[0], -(-blocks.shape[1] // 16) * 16), np.int32)
    out[:, : blocks.shape[1]] = blocks
    return out

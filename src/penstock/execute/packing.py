"""Packing: a plan's arrays into the staging buffer, and the tensors that stand for them on the device.

It knows plans and places; it launches nothing but views. What of a plan is padded to which size is decided by
`device_step`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.execute.sampling_mirror import SamplingMirror
from penstock.execute.staging import Place, Staging
from penstock.kernels.inputs import PrefillInputs
from penstock.kernels.row_state import pack_joins
from penstock.row_table import JOIN_WORDS
from penstock.schedule.step import Chunks, Int32, Int64, Joins, StepPlan

_NONE: Int32 = np.zeros(0, np.int32)


@dataclass(slots=True)
class PackedChunks:
    """Chunks on the device; `start` and `context` are padded with empty chunks to a few sizes."""

    tokens: Place  # [tokens], padded
    positions: Place  # [tokens] int64
    slots: Place  # [tokens] int64, padded with the dump's
    start: Place  # [chunks + 1]
    context: Place
    blocks: Place  # [chunks, width]


@dataclass(slots=True)
class PackedBiases:
    """What of the pool of biases is new: entries `first` and on; `start`: the rows' places, where those have moved."""

    first: int
    ids: Place
    values: Place
    start: Place | None


@dataclass(slots=True)
class Packed:
    """Where the parts of a plan lie; None: there are none."""

    clear: Place | None = None  # [m] int64: blocks
    source: Place | None = None  # [c]: blocks to copy
    target: Place | None = None  # [c]
    biases: PackedBiases | None = None
    joined: Place | None = None  # [k, words]
    masks: tuple[Place, Place] | None = None  # slots [m] int64, words [m, W]
    new_blocks: Place | None = None  # [m, 3], padded with row -1
    group_blocks: Place | None = None  # [G, width]
    chunks: PackedChunks | None = None


def pack_rows(staging: Staging, plan: StepPlan, size: int, dead_row: int) -> None:
    """The step's queries: rows, padded to `size` with the dead row, the tokens that each skips as its group's prefix,
    and the drafts, where there are any."""
    skip, offset, draft = np.repeat(plan.group_length, np.diff(plan.group_start)), _NONE, _NONE
    if (drafts := plan.drafts) is not None:
        offset = drafts.offset
        draft = np.zeros(offset.size, np.int32)
        draft[offset > 0] = drafts.tokens
        skip = np.repeat(skip, drafts.counts[: skip.size] + 1)
    staging.write("rows", plan.query_rows, dead_row, size)
    staging.write("skip", skip, 0, size)
    staging.write("offset", offset, 0, size)
    staging.write("draft", draft, 0, size)


def pack_groups(staging: Staging, plan: StepPlan, capacity: int) -> None:
    """The groups' CSR over queries, padded with empty groups."""
    start = plan.group_start if plan.drafts is None else plan.drafts.query_start[plan.group_start]
    staging.write("group_start", start, int(start[-1]), capacity + 1)
    staging.write("group_length", plan.group_length, 0, capacity)


def without_groups_past(plan: StepPlan, capacity: int) -> None:
    """Groups beyond the capacity go alone: their rows come after all others already."""
    if plan.group_length.size > capacity:
        plan.group_start = plan.group_start[: capacity + 1]
        plan.group_blocks, plan.group_length = plan.group_blocks[:capacity], plan.group_length[:capacity]


def pack_biases(staging: Staging, asked: SamplingMirror, joins: Joins) -> PackedBiases | None:
    """Takes the joins into `asked`, and what that changed in its pool of biases to the device."""
    before, asked.moved = asked.bias_end, False
    asked.join(joins)
    first = 0 if asked.moved else before
    if asked.bias_end == first:
        return None
    new = slice(first, asked.bias_end)
    start = staging.add(asked.bias_first.astype(np.int32)) if asked.moved else None
    return PackedBiases(first, staging.add(asked.bias_ids[new]), staging.add(asked.bias_values[new]), start)


def pack_rows_that_join(staging: Staging, joins: Joins, bias_start: Int64) -> Place:
    """A line a row: its columns, then its table, of few widths, since kernels are compiled for a multiple."""
    words = -(-(JOIN_WORDS + joins.blocks.shape[1]) // 16) * 16
    lines = np.empty((joins.rows.size, words), np.int32)
    pack_joins(joins, bias_start, lines)
    return staging.add(lines)


def pack_new_blocks(staging: Staging, new_blocks: Int32) -> Place:
    lines = np.full((-(-new_blocks.shape[0] // 16) * 16, 3), -1, np.int32)
    lines[: new_blocks.shape[0]] = new_blocks
    return staging.add(lines)


def pack_chunks(staging: Staging, chunks: Chunks, tokens: int, capacity: int, dump_slot: int) -> PackedChunks:
    """tokens, capacity: how many tokens and chunks the step takes, padding included."""
    count, padded = chunks.context.size, capacity
    positions, slots = np.zeros(tokens, np.int64), np.full(tokens, dump_slot, np.int64)
    ids = np.zeros(tokens, np.int32)
    size = chunks.tokens.size
    positions[:size] = chunk_positions(chunks)
    slots[:size] = chunk_slots(chunks, positions[:size])
    ids[:size] = chunks.tokens
    start = np.full(padded + 1, size, np.int32)
    start[: count + 1] = chunks.start
    context = np.zeros(padded, np.int32)
    context[:count] = chunks.context
    return PackedChunks(
        staging.add(ids), staging.add(positions), staging.add(slots), staging.add(start), staging.add(context),
        staging.add(_widened(chunks.blocks)),
    )  # fmt: skip


def chunk_positions(chunks: Chunks) -> Int64:
    """[tokens]: each token's position in its prompt."""
    offset = (chunks.context - chunks.start[:-1]).astype(np.int64)
    return np.repeat(offset, np.diff(chunks.start)) + np.arange(chunks.tokens.size)


def chunk_slots(chunks: Chunks, at: Int64) -> Int64:
    """[tokens]: where each token at its position `at` goes."""
    chunk = np.repeat(np.arange(chunks.context.size), np.diff(chunks.start))
    block: Int32 = chunks.blocks[chunk, at // BLOCK_SIZE]
    return block.astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE


def prefill_inputs(staging: Staging, packed: PackedChunks, chunks: Chunks) -> PrefillInputs:
    return PrefillInputs(
        start=staging.view(packed.start),
        context=staging.view(packed.context),
        block_table=staging.view(packed.blocks),
        tokens=chunks.tokens.size,
    )


def _widened(blocks: Int32) -> Int32:
    """[chunks, width], the width a multiple of 16."""
    out = np.zeros((blocks.shape[0], -(-blocks.shape[1] // 16) * 16), np.int32)
    out[:, : blocks.shape[1]] = blocks
    return out

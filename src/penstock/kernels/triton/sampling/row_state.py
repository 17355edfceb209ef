"""Updates of the per-row arrays on the device (RowState): start rows, add blocks to rows, and make
the token arrays of a step. `advance.py` ends the step.

Each update is one launch; the host never waits for the device. A row is a sequence's place in the
batch. Knows rows, blocks and ids; no sequences."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.inputs import Queries
from penstock.kernels.row_state import FROM_DEVICE, SCRATCH_BLOCK, RowState
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import has_pdl, release, wait
from penstock.row_table import JOIN_WORDS

_BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _take_drafts(
    row_ids,
    offset,
    draft,
    drafts,
    count,
    DEVICE: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    ahead = tl.load(offset + i, mask=there, other=0)
    takes = (ahead > 0) & (tl.load(draft + i, mask=there, other=0) == DEVICE)
    row = tl.load(row_ids + i, mask=takes, other=0).to(tl.int64)
    token = tl.load(drafts + row * DRAFTS + ahead - 1, mask=takes, other=0)
    tl.store(draft + i, token, mask=takes)


def take_drafts(row_ids: Tensor, queries: Queries, rows: RowState) -> None:
    """Replaces draft tokens equal to FROM_DEVICE in queries.draft with the row's own drafts,
    rows.drafts. row_ids: [S] int32, row of each query."""
    count = row_ids.shape[0]
    if count:
        _take_drafts[(cdiv(count, _BLOCK),)](
            row_ids,
            queries.offset,
            queries.draft,
            rows.drafts,
            count,
            DEVICE=FROM_DEVICE,
            DRAFTS=rows.drafts.shape[1],
            BLOCK=_BLOCK,
            num_warps=4,
        )


@triton.jit(
    do_not_specialize=["count", "dump_block", "table_width"]
)  # not specialized: these sizes differ between machines, and kernels would be compiled for each
def _prepare(
    row_ids,
    offset,
    draft,
    last_token,
    length,
    done,
    block_table,
    table_width,
    slot_token,
    token_ids,
    positions,
    slots,
    count,
    dump_block,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    row = tl.load(row_ids + i, mask=there, other=0).to(tl.int64)
    ahead = tl.load(offset + i, mask=there, other=0)
    token = tl.load(last_token + row, mask=there & (ahead == 0), other=0)
    token += tl.load(draft + i, mask=there & (ahead > 0), other=0)
    stored = tl.load(length + row, mask=there, other=0) + ahead
    over = tl.load(done + row, mask=there, other=1) != 0
    entry = tl.minimum(stored // SLOTS, table_width - 1)
    block = tl.load(block_table + row * table_width + entry, mask=there, other=0).to(tl.int64)
    slot = tl.where(over, dump_block, block) * SLOTS + stored % SLOTS
    tl.store(token_ids + i, token, mask=there)
    tl.store(positions + i, stored, mask=there)
    tl.store(slots + i, slot, mask=there)
    tl.store(slot_token + slot, token, mask=there)


def prepare(
    row_ids: Tensor,
    queries: Queries,
    rows: RowState,
    slot_token: Tensor,
    dump_block: int,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """Computes token id, position and KV slot of each of the S queries. They are written to the
    first S entries of token_ids, positions and slots (of any integer dtype that can hold them). The
    token ids are also stored in slot_token [blocks, 16] int32, at the same slots. row_ids: [S]
    int32, row of each query. Slots of rows that are done are in dump_block, a block that is never
    read."""
    count = row_ids.shape[0]
    if count:
        early = has_pdl(row_ids.device)
        _prepare[(cdiv(count, _BLOCK),)](
            row_ids,
            queries.offset,
            queries.draft,
            rows.last_token,
            rows.length,
            rows.done,
            rows.block_table,
            rows.block_table.stride(0),
            slot_token,
            token_ids,
            positions,
            slots,
            count,
            dump_block,
            SLOTS=BLOCK_SIZE,
            BLOCK=_BLOCK,
            EARLY=early,
            num_warps=4,
            launch_pdl=bool(early),
        )


@triton.jit(do_not_specialize=["words", "table_width"])
def _join(
    packed,
    state,
    base,
    stride,
    block_table,
    words,
    table_width,
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    SCRATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = packed + tl.program_id(0).to(tl.int64) * words
    row = tl.load(at).to(tl.int64)
    if row >= 0:
        word = tl.arange(0, WORDS_PAD)
        there = (word > 0) & (word < WORDS)
        place = tl.load(base + word, mask=there, other=0) + row * tl.load(
            stride + word, mask=there, other=0
        )
        tl.store(state + place, tl.load(at + word, mask=there, other=0), mask=there)
        for first in range(0, table_width, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            block = tl.load(at + WORDS + entry, mask=entry < words - WORDS, other=SCRATCH)
            tl.store(block_table + row * table_width + entry, block, mask=entry < table_width)


def join(packed: Tensor, rows: RowState) -> None:
    """Starts k rows. packed: [k, JOIN_WORDS + width] int32 from pack_joins. The rest of each row's
    block table, after `width` blocks, becomes the scratch block."""
    k, words = packed.shape
    if k:
        _join[(k,)](
            packed,
            rows.words,
            rows.word_base,
            rows.word_stride,
            rows.block_table,
            words,
            rows.block_table.stride(0),
            WORDS=JOIN_WORDS,
            WORDS_PAD=next_power_of_2(JOIN_WORDS),
            SCRATCH=SCRATCH_BLOCK,
            BLOCK=_BLOCK,
            num_warps=1,
        )


@triton.jit(do_not_specialize=["count", "table_width"])
def _grow(new_blocks, block_table, table_width, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(new_blocks + i * 3, mask=i < count, other=-1).to(tl.int64)
    entry = tl.load(new_blocks + i * 3 + 1, mask=row >= 0, other=0)
    block = tl.load(new_blocks + i * 3 + 2, mask=row >= 0, other=0)
    tl.store(block_table + row * table_width + entry, block, mask=row >= 0)


def grow(new_blocks: Tensor, rows: RowState) -> None:
    """Adds blocks to rows' block tables. new_blocks: [m, 3] int32: row (-1: skip), index in its
    block table, block."""
    count = new_blocks.shape[0]
    if count:
        _grow[(cdiv(count, _BLOCK),)](
            new_blocks,
            rows.block_table,
            rows.block_table.stride(0),
            count,
            BLOCK=_BLOCK,
            num_warps=4,
        )

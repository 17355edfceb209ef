"""Updates of the per-row arrays in plain torch. They start rows, add blocks to rows, and make the
token arrays of a step; `advance.py` ends the step.

A row is a sequence's place in the batch. Knows rows, blocks and ids; no sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.inputs import Queries
from penstock.kernels.row_state import FROM_DEVICE, SCRATCH_BLOCK, RowState
from penstock.row_table import JOIN_WORDS

_BLOCK_BITS = BLOCK_SIZE.bit_length() - 1


def join(packed: Tensor, rows: RowState) -> None:
    """Starts k rows. packed: [k, JOIN_WORDS + width] int32 from pack_joins. The rest of each row's
    block table, after `width` blocks, becomes the scratch block."""
    packed = packed[packed[:, 0] >= 0]
    row = packed[:, 0].to(torch.int64)
    place = rows.word_base[1:] + row[:, None] * rows.word_stride[1:]
    rows.words[place] = packed[:, 1:JOIN_WORDS]
    width = min(packed.shape[1] - JOIN_WORDS, rows.block_table.shape[1])
    rows.block_table[row] = SCRATCH_BLOCK
    rows.block_table[row, :width] = packed[:, JOIN_WORDS : JOIN_WORDS + width]


def grow(new_blocks: Tensor, rows: RowState) -> None:
    """Adds blocks to rows' block tables. new_blocks: [m, 3] int32: row (-1: skip), index in its
    block table, block."""
    row, index, block = new_blocks[new_blocks[:, 0] >= 0].unbind(1)
    rows.block_table[row.to(torch.int64), index.to(torch.int64)] = block


def take_drafts(row_ids: Tensor, queries: Queries, rows: RowState) -> None:
    """Replaces draft tokens equal to FROM_DEVICE in queries.draft with the row's own drafts,
    rows.drafts. row_ids: [S] int32, row of each query."""
    at = ((queries.offset > 0) & (queries.draft == FROM_DEVICE)).nonzero()[:, 0]
    queries.draft[at] = rows.drafts[
        row_ids[at].to(torch.int64), queries.offset[at].to(torch.int64) - 1
    ]


def prepare(
    row_ids: Tensor,
    queries: Queries | None,
    rows: RowState,
    slot_token: Tensor,
    dump_block: int,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """Writes token id, position and KV slot of each of the S queries to the first S entries of
    token_ids, positions and slots (int64). Also stores the token ids in slot_token [blocks, 16]
    int32, at the same slots. row_ids: [S] int32, row of each query.

    queries: None if every query has its row's newest token. Slots of rows that are done are in the
    dump block, which is never read."""
    count, row = row_ids.shape[0], row_ids.to(torch.int64)
    token = rows.last_token.index_select(0, row)
    position = rows.length.index_select(0, row).to(torch.int64)
    if queries is not None:
        position += queries.offset
        token = torch.where(queries.offset > 0, queries.draft, token)
    over = rows.done.index_select(0, row) != 0
    # A flat index and shifts take 17 us at 8,192 rows on a CPU; table[row, position // BLOCK_SIZE]
    # takes 49 us.
    table = rows.block_table
    entry = row * table.shape[1] + (position >> _BLOCK_BITS).clamp_(max=table.shape[1] - 1)
    block = table.view(-1).index_select(0, entry)
    slot = (torch.where(over, dump_block, block).to(torch.int64) << _BLOCK_BITS) + (
        position & (BLOCK_SIZE - 1)
    )
    token_ids[:count], positions[:count], slots[:count] = token, position, slot
    slot_token.view(-1).index_copy_(0, slot, token)

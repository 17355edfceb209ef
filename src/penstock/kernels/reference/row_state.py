"""The step's own bookkeeping in plain torch: rows join and grow, a step's arrays are made, its draw is taken in.

Whole columns and row ids in, nothing asked back. It knows rows, blocks and ids; no sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.reference.tile_draw import BAD_LOGITS
from penstock.kernels.row_state import SCRATCH_BLOCK, RowState
from penstock.row_table import JOIN_WORDS

NO_TOKEN = -1  # schedule.step's: the row was done before the step, or is padding
_BLOCK_BITS = BLOCK_SIZE.bit_length() - 1


def join(packed: Tensor, rows: RowState) -> None:
    """Rows come to life: packed [k, JOIN_WORDS + width] int32 as pack_joins made it. Tables are scratch past width."""
    packed = packed[packed[:, 0] >= 0]
    row = packed[:, 0].to(torch.int64)
    place = rows.word_base[1:] + row[:, None] * rows.word_stride[1:]
    rows.words[place] = packed[:, 1:JOIN_WORDS]
    width = min(packed.shape[1] - JOIN_WORDS, rows.block_table.shape[1])
    rows.block_table[row] = SCRATCH_BLOCK
    rows.block_table[row, :width] = packed[:, JOIN_WORDS : JOIN_WORDS + width]


def grow(new_blocks: Tensor, rows: RowState) -> None:
    """new_blocks [m, 3] int32: row (-1: nothing), index in its table, block."""
    row, index, block = new_blocks[new_blocks[:, 0] >= 0].unbind(1)
    rows.block_table[row.to(torch.int64), index.to(torch.int64)] = block


def prepare(
    row_ids: Tensor,
    rows: RowState,
    slot_token: Tensor,
    dump_block: int,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """row_ids [S] int32 -> the first S entries of token_ids, positions, slots (int64), and each row's token stored
    beside its K and V, slot_token [blocks, 16] int32.

    Rows that are done go to the dump block, at their own offset.
    """
    count, row = row_ids.shape[0], row_ids.to(torch.int64)
    token = rows.last_token.index_select(0, row)
    position = rows.length.index_select(0, row).to(torch.int64)
    over = rows.done.index_select(0, row) != 0
    # Flat, and with shifts: at 8,192 rows on a CPU 17 us; table[row, position // BLOCK_SIZE] takes 49.
    table = rows.block_table
    entry = row * table.shape[1] + (position >> _BLOCK_BITS).clamp_(max=table.shape[1] - 1)
    block = table.view(-1).index_select(0, entry)
    slot = (torch.where(over, dump_block, block).to(torch.int64) << _BLOCK_BITS) + (position & (BLOCK_SIZE - 1))
    token_ids[:count], positions[:count], slots[:count] = token, position, slot
    slot_token.view(-1).index_copy_(0, slot, token)


def advance(row_ids: Tensor, drawn: Tensor, rows: RowState, told: Tensor | None = None) -> Tensor:
    """Takes a step's draw into the rows. row_ids [S], drawn [S] int32 -> what the host is told, [S] int32.

    A row that was done before tells NO_TOKEN and stays as it is; one with BAD_LOGITS is done from now on.
    """
    row = row_ids.to(torch.int64)
    done = rows.done.index_select(0, row) != 0
    drawn = torch.where(done, NO_TOKEN, drawn)
    moved = drawn >= 0
    token = drawn.clamp(min=0)
    length = rows.length.index_select(0, row) + moved
    over = rows.is_end[token.to(torch.int64)] & (rows.ignore_eos[row] == 0)
    over |= (rows.stop_ids[row] == token[:, None]).any(1)
    over |= length + 1 >= rows.limit[row]
    rows.last_token.index_copy_(0, row, torch.where(moved, drawn, rows.last_token[row]))
    rows.length.index_copy_(0, row, length)
    rows.done.index_copy_(0, row, (done | (drawn == BAD_LOGITS) | (moved & over)).to(torch.int32))
    return drawn if told is None else told.copy_(drawn)

"""Drafts tokens by prompt lookup: a row's last tokens are looked for earlier in its own prompt and
output, and what followed them is drafted (prompt lookup decoding, 2023)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.row_state import RowState
from penstock.kernels.triton.grid import next_power_of_2

_BLOCK = 2048  # positions that a program compares at once


@triton.jit(do_not_specialize=["table_width"])
def _draft_ngrams(
    row_ids,
    last_token,
    length,
    done,
    block_table,
    table_width,
    slot_token,
    drafts,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFTS_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Kernel of `draft_ngrams`, with a program for each query. Only a row's first query works.
    LONGEST, SHORTEST: as there. DRAFTS: drafts of a row."""
    i = tl.program_id(0)
    row = tl.load(row_ids + i).to(tl.int64)
    before = tl.load(row_ids + i - 1, mask=i > 0, other=-1)
    if (before != row) & (tl.load(done + row) == 0):
        stored = tl.load(length + row)
        last = tl.load(last_token + row)
        table = block_table + row * table_width
        best = tl.full((), -1, tl.int64)
        for first in range(0, stored, BLOCK):
            at = first + tl.arange(0, BLOCK)
            same = at < stored
            matched = tl.zeros((BLOCK,), tl.int64)
            for back in tl.static_range(LONGEST):
                newest = last
                if back > 0:
                    end = tl.maximum(stored - back, 0)
                    newest = tl.load(
                        slot_token
                        + tl.load(table + end // SLOTS).to(tl.int64) * SLOTS
                        + end % SLOTS
                    )
                same = same & (at >= back) & (stored >= back)
                entry = tl.load(table + (at - back) // SLOTS, mask=same, other=0).to(tl.int64)
                slot = entry * SLOTS + (at - back) % SLOTS
                same = same & (tl.load(slot_token + slot, mask=same, other=-1) == newest)
                matched += same.to(tl.int64)
            rank = tl.where(matched >= SHORTEST, (matched << 32) | at.to(tl.int64), -1)
            best = tl.maximum(best, tl.max(rank, 0))
        end = (best & 0xFFFFFFFF).to(tl.int32)
        ahead = tl.arange(0, DRAFTS_PAD)
        source = end + 1 + ahead % tl.maximum(stored - end, 1)
        found = (ahead < DRAFTS) & (best >= 0) & (source < stored)
        entry = tl.load(table + source // SLOTS, mask=found, other=0).to(tl.int64)
        token = tl.load(slot_token + entry * SLOTS + source % SLOTS, mask=found, other=0)
        token = tl.where(found, token, last)
        tl.store(drafts + row * DRAFTS + ahead, token, mask=ahead < DRAFTS)


def draft_ngrams(
    row_ids: Tensor, rows: RowState, slot_token: Tensor, longest: int, shortest: int
) -> None:
    """Writes rows.drafts of the step's rows. row_ids: [S] int32, row of each query; a row's queries
    are adjacent. slot_token: [blocks, 16] int32, the tokens stored at each KV slot.

    Among the earlier positions where at least `shortest` of a row's last tokens stand, it takes the
    one where most do (at most `longest` are compared), and of several the latest. The tokens after
    it are drafted; past the row's end they repeat. A row without such a position repeats its last
    token. Rows that are done keep their drafts."""
    drafts = rows.drafts.shape[1]
    if row_ids.shape[0]:
        _draft_ngrams[(row_ids.shape[0],)](
            row_ids,
            rows.last_token,
            rows.length,
            rows.done,
            rows.block_table,
            rows.block_table.stride(0),
            slot_token,
            rows.drafts,
            LONGEST=longest,
            SHORTEST=shortest,
            DRAFTS=drafts,
            DRAFTS_PAD=next_power_of_2(drafts),
            SLOTS=BLOCK_SIZE,
            BLOCK=_BLOCK,
            num_warps=8,
        )

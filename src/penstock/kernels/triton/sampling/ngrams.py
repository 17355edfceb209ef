"""Drafts tokens by prompt lookup: a row's last tokens are looked for earlier in its own prompt and
output, and in the texts of ended samples. What followed them is drafted (prompt lookup decoding,
2023)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.row_state import RowState
from penstock.kernels.triton.grid import next_power_of_2

_BLOCK = 2048  # positions that a program compares at once


@triton.jit
def _slot(table, at, there, SLOTS: tl.constexpr):
    """Returns the KV slots of a row's positions `at`, where `there` is True. table: the row's block
    table."""
    return tl.load(table + at // SLOTS, mask=there, other=0).to(tl.int64) * SLOTS + at % SLOTS


@triton.jit
def _best(
    text,
    count,
    table,
    slot_token,
    stored,
    last,
    OWN: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the best position among the first `count` of a text: number of equal tokens << 32 |
    position, int64; -1: none. OWN: the text is the row's, at the KV slots of `table`; else it
    begins at `text`. stored: position of the row's newest token, which is `last`."""
    best = tl.full((), -1, tl.int64)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        same = at < count
        matched = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range(LONGEST):
            newest = last
            if back > 0:
                newest = tl.load(
                    slot_token + _slot(table, tl.maximum(stored - back, 0), True, SLOTS)
                )
            same = same & (at >= back) & (stored >= back)
            if OWN:
                place = slot_token + _slot(table, at - back, same, SLOTS)
            else:
                place = text + at - back
            same = same & (tl.load(place, mask=same, other=-1) == newest)
            matched += same.to(tl.int64)
        rank = tl.where(matched >= SHORTEST, (matched << 32) | at.to(tl.int64), -1)
        best = tl.maximum(best, tl.max(rank, 0))
    return best


@triton.jit(do_not_specialize=["table_width"])
def _draft_ngrams(
    row_ids,
    last_token,
    length,
    done,
    text_slot,
    block_table,
    table_width,
    slot_token,
    texts,
    text_filled,
    drafts,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFTS_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Kernel of `draft_ngrams`, with a program for each query. Only a row's first query works.
    LONGEST, SHORTEST: as there. WIDTH: tokens of a text; 0: there are no texts. DRAFTS: drafts of a
    row."""
    i = tl.program_id(0)
    row = tl.load(row_ids + i).to(tl.int64)
    before = tl.load(row_ids + i - 1, mask=i > 0, other=-1)
    if (before != row) & (tl.load(done + row) == 0):
        stored = tl.load(length + row)
        last = tl.load(last_token + row)
        table = block_table + row * table_width
        best = _best(
            texts, stored, table, slot_token, stored, last, True, LONGEST, SHORTEST, SLOTS, BLOCK
        )
        end = (best & 0xFFFFFFFF).to(tl.int32)
        ahead = tl.arange(0, DRAFTS_PAD)
        source = end + 1 + ahead % tl.maximum(stored - end, 1)
        found = (ahead < DRAFTS) & (best >= 0) & (source < stored)
        follow = tl.load(slot_token + _slot(table, source, found, SLOTS), mask=found, other=0)
        follow = tl.where(found, follow, last)
        if WIDTH:
            slot = tl.load(text_slot + row).to(tl.int64)
            filled = tl.load(text_filled + slot, mask=slot >= 0, other=0)
            text = texts + tl.maximum(slot, 0) * WIDTH
            there = _best(
                text,
                filled,
                table,
                slot_token,
                stored,
                last,
                False,
                LONGEST,
                SHORTEST,
                SLOTS,
                BLOCK,
            )
            if (there >> 32) > (best >> 32):
                source = (there & 0xFFFFFFFF).to(tl.int32) + 1 + ahead
                found = (ahead < DRAFTS) & (source < filled)
                follow = tl.where(found, tl.load(text + source, mask=found, other=0), last)
        tl.store(drafts + row * DRAFTS + ahead, follow, mask=ahead < DRAFTS)


def draft_ngrams(
    row_ids: Tensor, rows: RowState, slot_token: Tensor, longest: int, shortest: int
) -> None:
    """Writes rows.drafts of the step's rows. row_ids: [S] int32, row of each query; a row's queries
    are adjacent. slot_token: [blocks, 16] int32, the tokens stored at each KV slot.

    Among the earlier positions where at least `shortest` of a row's last tokens stand, it takes the
    one where most do (at most `longest` are compared); of several one in its own text before one in
    rows.texts, and the latest. The tokens after it are drafted; past the row's end they repeat,
    past a text's end the row's last token is. So it is for a row without such a position. Rows that
    are done keep their drafts."""
    drafts = rows.drafts.shape[1]
    if row_ids.shape[0]:
        _draft_ngrams[(row_ids.shape[0],)](
            row_ids,
            rows.last_token,
            rows.length,
            rows.done,
            rows.text_slot,
            rows.block_table,
            rows.block_table.stride(0),
            slot_token,
            rows.texts,
            rows.text_filled,
            rows.drafts,
            LONGEST=longest,
            SHORTEST=shortest,
            WIDTH=rows.texts.shape[1],
            DRAFTS=drafts,
            DRAFTS_PAD=next_power_of_2(drafts),
            SLOTS=BLOCK_SIZE,
            BLOCK=_BLOCK,
            num_warps=8,
        )

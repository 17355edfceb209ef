"""Drafts tokens by prompt lookup, in plain torch: a row's last tokens are looked for earlier in its
own prompt and output, and in the texts of ended samples. What followed them is drafted (prompt
lookup decoding, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.row_state import RowState


def draft_ngrams(
    row_ids: Tensor, rows: RowState, slot_token: Tensor, longest: int, shortest: int
) -> None:
    """Writes rows.drafts of the step's rows. row_ids: [S] int32, row of each query. slot_token:
    [blocks, 16] int32, the tokens stored at each KV slot.

    Among the earlier positions where at least `shortest` of a row's last tokens stand, it takes the
    one where most do (at most `longest` are compared); of several one in its own text before one in
    rows.texts, and the latest. The tokens after it are drafted; past the row's end they repeat,
    past a text's end the row's last token is. So it is for a row without such a position. Rows that
    are done keep their drafts."""
    row = row_ids.to(torch.int64).unique()
    row = row[rows.done[row] == 0]
    if not row.numel():
        return
    length = rows.length[row][:, None].to(torch.int64)
    at = torch.arange(int(length.max()) + 1, device=row.device)
    slot = rows.block_table[row][:, at // BLOCK_SIZE].to(torch.int64) * BLOCK_SIZE
    tokens = slot_token.view(-1)[slot + at % BLOCK_SIZE]
    last = rows.last_token[row][:, None]
    tokens = torch.where(at == length, last, tokens)
    newest = [tokens.gather(1, (length - back).clamp(min=0)) for back in range(longest)]
    best = _best(tokens, length, newest, length, shortest)
    end = best & 0xFFFFFFFF
    ahead = torch.arange(rows.drafts.shape[1], device=row.device)
    source = torch.where(best >= 0, end + 1 + ahead % (length - end).clamp(min=1), length)
    drafts = tokens.gather(1, source)
    if rows.texts.shape[0]:
        slots = rows.text_slot[row].to(torch.int64)
        texts = rows.texts[slots.clamp(min=0)]
        filled = torch.where(slots >= 0, rows.text_filled[slots.clamp(min=0)], 0)[:, None]
        there = _best(texts, filled, newest, length, shortest)
        source = (there & 0xFFFFFFFF) + 1 + ahead
        follow = torch.where(
            source < filled, texts.gather(1, source.clamp(max=texts.shape[1] - 1)), last
        )
        drafts = torch.where(there >> 32 > best >> 32, follow, drafts)
    rows.drafts[row] = drafts


def _best(
    tokens: Tensor, ends: Tensor, newest: list[Tensor], length: Tensor, shortest: int
) -> Tensor:
    """Returns the best position of each text as number of equal tokens << 32 | position, [R, 1]
    int64; -1: none. tokens: [R, width]. ends: [R, 1], the texts' lengths. newest: the row's last
    tokens, each [R, 1], the newest first. length: [R, 1], index of the newest in its row."""
    at = torch.arange(tokens.shape[1], device=tokens.device)
    same, matched = at < ends, torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device)
    for back, token in enumerate(newest):
        same = same & (at >= back) & (length >= back) & (tokens.roll(back, 1) == token)
        matched += same
    rank = torch.where(matched >= shortest, matched << 32 | at, -1)
    return rank.max(1, keepdim=True).values

"""Drafts tokens by prompt lookup, in plain torch: a row's last tokens are looked for earlier in its
own prompt and output, and what followed them is drafted (prompt lookup decoding, 2023)."""

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
    one where most do (at most `longest` are compared), and of several the latest. The tokens after
    it are drafted; past the row's end they repeat. A row without such a position repeats its last
    token. Rows that are done keep their drafts."""
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
    same, matched = at < length, torch.zeros_like(tokens)
    for back in range(longest):
        newest = tokens.gather(1, (length - back).clamp(min=0))
        same = same & (at >= back) & (length >= back) & (tokens.roll(back, 1) == newest)
        matched += same
    rank = torch.where(matched >= shortest, matched.to(torch.int64) << 32 | at, -1)
    best = rank.max(1, keepdim=True).values
    end = best & 0xFFFFFFFF
    ahead = torch.arange(rows.drafts.shape[1], device=row.device)
    source = torch.where(best >= 0, end + 1 + ahead % (length - end).clamp(min=1), length)
    rows.drafts[row] = tokens.gather(1, source)

"""Ends a step on the device, in plain torch. It compares drafts with the sampled tokens, and stores
each row's new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import Queries
from penstock.kernels.reference.sampling.tile_draw import BAD_LOGITS
from penstock.kernels.row_state import RowState

# equals schedule.step.NO_TOKEN: no token, as the row was done before the step or is padding
NO_TOKEN = -1


def advance(
    row_ids: Tensor,
    queries: Queries | None,
    drawn: Tensor,
    rows: RowState,
    told: Tensor | None = None,
) -> Tensor:
    """Stores a step's sampled tokens in the rows; returns the tokens for the host, [S] int32.
    row_ids: [S], row of each of the S queries. drawn: [S] int32, token sampled for each query.
    told: buffer for the result.

    A row takes the token of its first query. It takes the token of each following query as long as
    that query's draft equals the token before it, until the row ends. Other queries return
    NO_TOKEN, as do rows that were done before. A row whose token is BAD_LOGITS becomes done.
    queries: None if no row has more than one query."""
    told = torch.empty_like(drawn) if told is None else told
    if queries is None:
        return told.copy_(_take(row_ids.to(torch.int64), drawn, rows))
    told.fill_(NO_TOKEN)
    for offset in range(int(queries.offset.max()) + 1 if row_ids.shape[0] else 0):
        at = (queries.offset == offset).nonzero()[:, 0]
        if offset:
            # drafts are never negative, so a query after one with NO_TOKEN is dropped here
            at = at[told[at - 1] == queries.draft[at]]
        told[at] = _take(row_ids[at].to(torch.int64), drawn[at], rows)
    return told


def _take(row: Tensor, drawn: Tensor, rows: RowState) -> Tensor:
    """Stores one sampled token a row; returns the tokens for the host, [S] int32. row: [S] int64,
    distinct rows. drawn: [S] int32."""
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
    return drawn

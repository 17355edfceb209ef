"""Ends a step on the device. It compares drafts with the sampled tokens, and stores each row's new
tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import Queries
from penstock.kernels.reference.sampling.tile_draw import BAD_LOGITS
from penstock.kernels.row_state import RowState
from penstock.kernels.triton.grid import cdiv
from penstock.kernels.triton.pdl import has_pdl, release, wait

_BLOCK = 256
# equals schedule.step.NO_TOKEN: no token, as the row was done before the step or is padding
NO_TOKEN = -1


@triton.jit(do_not_specialize=["count"])
def _advance(
    row_ids,
    offset,
    draft,
    drawn,
    last_token,
    length,
    done,
    limit,
    ignore_eos,
    stop_ids,
    is_end,
    told,
    count,
    NONE: tl.constexpr,
    BAD: tl.constexpr,
    STOPS: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `advance`. A lane whose query has offset 0 handles that query's row; the row's
    other queries follow it. row_ids, offset, draft, drawn, told: [count]. Other tensors: columns of
    RowState. NONE, BAD: NO_TOKEN, BAD_LOGITS. STOPS: stop ids per row. DRAFTS: most drafts per row.
    EARLY: see pdl.py."""
    wait(EARLY)
    release(EARLY)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # lanes of queries with offset 0, each of which handles a row
    first = (i < count) & (tl.load(offset + i, mask=i < count, other=1) == 0)
    row = tl.load(row_ids + i, mask=first, other=0).to(tl.int64)
    was = tl.load(length + row, mask=first, other=0)
    most = tl.load(limit + row, mask=first, other=0)
    ends = tl.load(ignore_eos + row, mask=first, other=1) == 0
    live = first & (tl.load(done + row, mask=first, other=1) == 0)
    here, going, drew = first, live, tl.full((BLOCK,), NONE, tl.int32)
    for j in tl.static_range(DRAFTS + 1):
        if j > 0:
            at = (i + j < count) & first
            here = here & at & (tl.load(offset + i + j, mask=at, other=0) == j)
            going = going & here & (tl.load(draft + i + j, mask=here, other=NONE) == drew)
        drew = tl.where(going, tl.load(drawn + i + j, mask=going, other=NONE), drew)
        tl.store(told + i + j, tl.where(going, drew, NONE), mask=here)
        moved = going & (drew >= 0)
        over = (tl.load(is_end + drew, mask=moved, other=0) != 0) & ends
        for k in tl.static_range(STOPS):
            over = over | (tl.load(stop_ids + row * STOPS + k, mask=moved, other=-1) == drew)
        over = over | (was + j + 2 >= most)
        tl.store(last_token + row, drew, mask=moved)
        tl.store(length + row, was + j + 1, mask=moved)
        tl.store(done + row, (over | (drew == BAD)).to(tl.int32), mask=going)
        going = moved & (over == 0)


def advance(
    row_ids: Tensor, queries: Queries, drawn: Tensor, rows: RowState, told: Tensor | None = None
) -> Tensor:
    """Stores the tokens of a step in the rows; returns the tokens for the host, [S] int32. row_ids:
    [S], row of each of the S queries. drawn: [S] int32, token sampled for each query. told: buffer
    for the result.

    A row takes the token of its first query. It takes the token of each following query as long as
    that query's draft equals the token before it, until the row ends. The result is NO_TOKEN for
    all other queries, and for rows that were done before. A row whose token is BAD_LOGITS becomes
    done. Only the padding row may occur more than once in a step."""
    told = torch.empty_like(drawn) if told is None else told
    count = row_ids.shape[0]
    if count:
        early = has_pdl(row_ids.device)
        _advance[(cdiv(count, _BLOCK),)](
            row_ids,
            queries.offset,
            queries.draft,
            drawn,
            rows.last_token,
            rows.length,
            rows.done,
            rows.limit,
            rows.ignore_eos,
            rows.stop_ids,
            rows.is_end,
            told,
            count,
            NONE=NO_TOKEN,
            BAD=BAD_LOGITS,
            STOPS=rows.stop_ids.shape[1],
            DRAFTS=rows.drafts.shape[1],
            BLOCK=_BLOCK,
            EARLY=early,
            num_warps=4,
            launch_pdl=bool(early),
        )
    return told

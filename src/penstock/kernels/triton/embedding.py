"""Token ids to rows of the embedding table, one launch. It knows ids and a table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.pdl import has_pdl, release, wait

_BLOCK = 2048


@triton.jit
def _embed(ids, table, out, d, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    release(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64)
    value = tl.load(table + token * d + column, mask=column < d)
    tl.store(out + row * d + column, value, mask=column < d)


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """ids [T] of any integer dtype, each in the vocabulary, table [vocabulary, d] contiguous -> [T, d]."""
    out = torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype, device=table.device)
    if ids.shape[0]:
        d = table.shape[1]
        block = min(_BLOCK, triton.next_power_of_2(d))
        early = has_pdl(table.device)
        _embed[(ids.shape[0], triton.cdiv(d, block))](
            ids, table, out, d, EARLY=early, BLOCK=block, num_warps=4, launch_pdl=bool(early)
        )
    return out

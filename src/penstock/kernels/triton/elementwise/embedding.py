"""Embedding: looks up rows of the table, in one launch. Knows ids and a table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import has_pdl, release, wait

_BLOCK = 2048


@triton.jit
def _embed(ids, table, out, first, rows, d, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64) - first
    there = (token >= 0) & (token < rows)
    value = tl.load(table + token * d + column, mask=(column < d) & there, other=0.0)
    tl.store(out + row * d + column, value, mask=column < d)


def embed(ids: Tensor, table: Tensor, first: int | None = None) -> Tensor:
    """Returns rows [T, d] of table for ids [T] of any integer dtype. table: [rows, d] contiguous,
    may be in pinned host memory (quant/gathered.py). first: token id of the table's first row, if
    the table has a range of the vocabulary; tokens outside it give 0. None: the table has the whole
    vocabulary."""
    out = torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype, device=ids.device)
    if ids.shape[0]:
        d = table.shape[1]
        block = min(_BLOCK, next_power_of_2(d))
        early = has_pdl(ids.device)
        _embed[(ids.shape[0], cdiv(d, block))](
            ids,
            table,
            out,
            first or 0,
            table.shape[0],
            d,
            EARLY=early,
            BLOCK=block,
            num_warps=4,
            launch_pdl=bool(early),
        )
    return out

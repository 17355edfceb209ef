"""Rows in eight bits, one launch: what attention leaves, for the product behind it. It knows rows; no layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fp8_rows import E4M3, Fp8Rows
from penstock.kernels.triton.pdl import has_pdl, release, wait


@triton.jit
def eight_bits(wide):
    """wide [R, D] -> its numbers in e4m3 and its scales [R, 1] (kernels/fp8_rows.py). What pads a row must be zeros."""
    wide = wide.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), axis=1, keep_dims=True) / 448.0, 1e-12)
    return tl.clamp(wide / scale, -448.0, 448.0).to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["rows"])
def _quantize(x, numbers, scales, rows, stride, d, EARLY: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    release(EARLY)
    wait(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, D)[None, :]
    there = (row < rows) & (column < d)
    eight, scale = eight_bits(tl.load(x + row.to(tl.int64) * stride + column, mask=there, other=0.0))
    tl.store(numbers + row.to(tl.int64) * d + column, eight, mask=there)
    tl.store(scales + row, scale, mask=row < rows)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """x [T, K] -> the same in eight bits."""
    (rows, d), out = x.shape, empty_fp8(x)
    if rows:
        width = triton.next_power_of_2(d)
        each = max(1, min(4, 1024 // width)) if rows > 256 else 1
        early = has_pdl(x.device)
        _quantize[(triton.cdiv(rows, each),)](
            x, out.numbers, out.scale, rows, x.stride(0), d, EARLY=early, ROWS=each, D=width,
            num_warps=max(1, min(16, width * each // 256)), launch_pdl=bool(early),
        )  # fmt: skip
    return out


def empty_fp8(like: Tensor, width: int | None = None) -> Fp8Rows:
    """Returns as many rows as `like` [T, K] has, of K or `width` numbers, not written yet."""
    rows, d = like.shape
    numbers = torch.empty((rows, width or d), dtype=E4M3, device=like.device)
    return Fp8Rows(numbers, torch.empty((rows, 1), dtype=torch.float32, device=like.device))

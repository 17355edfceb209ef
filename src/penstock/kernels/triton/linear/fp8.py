"""Quantizes rows of activations to e4m3 or to 16-bit fixed point. `quantize_rows` does so in a
launch of its own; other kernels call `store_rows` on their output. T: rows, K: numbers of a row.
Knows rows; no layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fixed_row import FixedRow, empty_fixed
from penstock.kernels.fp8_rows import E4M3, Form, Fp8Rows, Rows
from penstock.kernels.triton.fixed_row import store_fixed
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import early_of, release, wait

# representation of activation rows (kernels/fp8_rows.py) -> the kernels' argument FP8
BITS: dict[Form, int] = {"wide": 0, "eight": 1, "pair": 2, "fixed": 3}


@triton.jit
def store_fp8(wide, numbers, low, scales, at, there, row, row_there, FP8: tl.constexpr):
    """Quantizes R rows of D numbers to e4m3 and stores them, as kernels/fp8_rows.py defines. wide:
    [R, D] in any float dtype, zeros in padding. numbers, low, scales: output pointers. at: offsets
    [R, D] of the e4m3 numbers in `numbers`; there: mask [R, D]. row, row_there: offsets and mask
    [R, 1] for `scales`. FP8 = 2: also stores 16 times the rounding error as a second e4m3, at low +
    at."""
    wide = wide.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), axis=1, keep_dims=True) / 448.0, 1e-12)
    # rounding can make the largest magnitude exceed 448 by one float32 step; e4m3 rounds it to 448
    scaled = wide * tl.div_rn(1.0, scale)
    eight = scaled.to(tl.float8e4nv)
    tl.store(numbers + at, eight, mask=there)
    tl.store(scales + row, scale, mask=row_there)
    if FP8 == 2:
        tl.store(low + at, ((scaled - eight.to(tl.float32)) * 16.0).to(tl.float8e4nv), mask=there)


@triton.jit
def store_rows(
    wide, numbers, low, scales, at, there, row, row_there, d, FP8: tl.constexpr, D: tl.constexpr
):
    """Quantizes wide [R, D] and stores it. FP8 = 1 or 2: as `store_fp8` does. FP8 = 3: `wide` is a
    single row, stored in fixed point (kernels/fixed_row.py), whose sums go to `low`. d: numbers of
    a row without padding. Other parameters: see `store_fp8`."""
    if FP8 == 3:
        block = tl.arange(0, D // 16)
        values = tl.where(there, wide.to(tl.float32), 0.0).reshape(D // 16, 16)
        store_fixed(values, numbers, scales, low, block, block * 16 < d, d)
    else:
        store_fp8(wide, numbers, low, scales, at, there, row, row_there, FP8)


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    x,
    numbers,
    low,
    scales,
    rows,
    stride,
    d,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """Kernel of `quantize_rows`. A program quantizes ROWS rows of x [rows, d]. stride: between rows
    of x. D: d rounded up to a power of two. FP8: a value of BITS. EARLY: see pdl.py."""
    wait(EARLY)
    release(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, D)[None, :]
    there = (row < rows) & (column < d)
    wide = tl.load(x + row.to(tl.int64) * stride + column, mask=there, other=0.0)
    store_rows(
        wide, numbers, low, scales, row.to(tl.int64) * d + column, there, row, row < rows, d, FP8, D
    )


def quantize_rows(x: Tensor, form: Form = "eight") -> Fp8Rows | FixedRow:
    """Returns x [T, K] quantized. form: "eight" (e4m3), "pair" (e4m3 with a second e4m3 for the
    rounding error) or "fixed" (fixed point, T = 1 only); see kernels/fp8_rows.py."""
    (rows, d), out = x.shape, empty_rows(x, form)
    if rows:
        width = next_power_of_2(d)
        each = max(1, min(4, 1024 // width)) if rows > 256 else 1
        early = early_of(x.device, cdiv(rows, each))
        _quantize[(cdiv(rows, each),)](
            x,
            *pointers(out),
            rows,
            x.stride(0),
            d,
            FP8=BITS[form],
            EARLY=early,
            ROWS=each,
            D=width,
            num_warps=max(1, min(16, width * each // 256)),
            launch_pdl=bool(early),
        )
    return out


def empty_fp8(like: Tensor, form: Form, width: int | None = None) -> Fp8Rows:
    """Returns uninitialised e4m3 rows on the device of `like` [T, K]: T rows of `width` numbers, or
    of K if `width` is None. form: "eight" or "pair"."""
    shape = (like.shape[0], width or like.shape[1])
    numbers = torch.empty(shape, dtype=E4M3, device=like.device)
    scale = torch.empty((like.shape[0], 1), dtype=torch.float32, device=like.device)
    return Fp8Rows(numbers, scale, torch.empty_like(numbers) if form == "pair" else None)


def empty_rows(like: Tensor, form: Form, width: int | None = None) -> Fp8Rows | FixedRow:
    """Returns uninitialised rows as `empty_fp8` does; with form "fixed", one uninitialised
    fixed-point row."""
    return (
        empty_fixed(width or like.shape[1], like.device)
        if form == "fixed"
        else empty_fp8(like, form, width)
    )


def pointers(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the three tensors that kernels read: numbers, low and scale of Fp8Rows; numbers, sums
    and scale of a FixedRow; for an unquantized Tensor, the tensor three times."""
    if isinstance(rows, Tensor):
        return rows, rows, rows
    if isinstance(rows, FixedRow):
        return rows.numbers, rows.sums, rows.scale
    return rows.numbers, rows.numbers if rows.low is None else rows.low, rows.scale

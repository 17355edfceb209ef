"""RMS norms in one launch, computed in float32. A program handles one row or a few. A weight of the
model's dtype is applied after rounding to that dtype, as in HF; a float32 weight is applied before
it. The result may be quantized to eight bits in the same pass. T: tokens, d: hidden size. Knows
rows and a weight; no layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.linear.fp8 import BITS, empty_rows, pointers, store_rows
from penstock.kernels.triton.pdl import early_of, release, wait


@triton.jit
def _normed(x, weight, column, d, eps, dtype: tl.constexpr, WIDE: tl.constexpr):
    full = x.to(tl.float32)
    rounded = full * tl.rsqrt(tl.sum(full * full, axis=1) / d + eps)[:, None]
    if not WIDE:
        rounded = rounded.to(dtype).to(tl.float32)
    by = tl.load(weight + column, mask=column < d, other=0.0).to(tl.float32)
    return (rounded * by).to(dtype)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x,
    residual,
    weight,
    first,
    out,
    low,
    scales,
    rows,
    stride,
    d,
    eps,
    ADD: tl.constexpr,
    FIRST: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, D)[None, :]
    there = (row < rows) & (column < d)
    wide = tl.load(x + row.to(tl.int64) * stride + column, mask=there, other=0.0)
    dtype: tl.constexpr = x.dtype.element_ty
    if FIRST:
        wide = _normed(wide, first, column, d, eps, dtype, WIDE)
    if ADD:
        place = residual + row.to(tl.int64) * d + column
        before = tl.load(place, mask=there, other=0.0)
        wide = (wide.to(tl.float32) + before.to(tl.float32)).to(dtype)
        tl.store(place, wide, mask=there)
    normed = _normed(wide, weight, column, d, eps, dtype, WIDE)
    at = row.to(tl.int64) * d + column
    if FP8 > 0:
        store_rows(normed, out, low, scales, at, there, row, row < rows, d, FP8, D)
    else:
        tl.store(out + at, normed, mask=there)


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: Form = "wide") -> Rows:
    """Returns weight * (x / rms(x)) in x's dtype. x: [..., d], for another form [T, d]. weight:
    [d]."""
    flat = x.reshape(-1, x.shape[-1])
    normed = _launch(flat, None, weight, eps, form, None)
    return normed.view(x.shape) if isinstance(normed, Tensor) else normed


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    form: Form = "wide",
    first: Tensor | None = None,
) -> tuple[Rows, Tensor]:
    """Returns (norm of the sum, the sum) of x and residual [T, d]; residual (contiguous) is
    overwritten with the sum. first: weight of a norm of x before the sum, of the same dtype as
    `weight`."""
    assert residual.is_contiguous(), "the residual is written in place"
    assert first is None or first.dtype == weight.dtype
    return _launch(x, residual, weight, eps, form, first), residual


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, form: Form, first: Tensor | None
) -> Rows:
    rows, d = x.shape
    out = (
        torch.empty((rows, d), dtype=x.dtype, device=x.device)
        if form == "wide"
        else empty_rows(x, form)
    )
    if rows:
        width = next_power_of_2(d)
        each = max(1, min(4, 1024 // width)) if rows > 256 else 1
        early = early_of(x.device, cdiv(rows, each))
        # Two norms of 16,384 rows of 2,560 take 114 us with 16 warps and 92 us with 4. Wider rows
        # need more warps, or registers spill.
        most = max(4, width // 1024) if rows > 256 and first is not None else 16
        warps = max(1, min(most, width * each // 256))
        _rms_norm[(cdiv(rows, each),)](
            x,
            x if residual is None else residual,
            weight,
            weight if first is None else first,
            *pointers(out),
            rows,
            x.stride(0),
            d,
            eps,
            ADD=residual is not None,
            FIRST=first is not None,
            FP8=BITS[form],
            EARLY=early,
            WIDE=weight.dtype == torch.float32,
            ROWS=each,
            D=width,
            num_warps=warps,
            launch_pdl=bool(early),
            # A fused multiply-add would skip the rounding between the first norm and the sum, which
            # changes results by up to 0.02.
            enable_fp_fusion=first is None,
        )
    return out

"""RMS norms in one launch, computed in float32. A program handles one row or a few. A weight of the
model's dtype is applied after rounding to that dtype, as in HF; a float32 weight is applied before
it. The result may be quantized to eight bits in the same pass. T: tokens, d: hidden size. Knows
rows and a weight; no layer."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.linear.fp8 import BITS, empty_rows, pointers, store_rows
from penstock.kernels.triton.pdl import early_of, release, wait


@triton.jit
def _normed(x, by, d, eps, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Returns the norm of x [rows, D] in dtype. by: the weight [1, D]."""
    full = x.to(tl.float32)
    rounded = full * tl.rsqrt(tl.sum(full * full, axis=1) / d + eps)[:, None]
    if not WIDE:
        rounded = rounded.to(dtype).to(tl.float32)
    return (rounded * by.to(tl.float32)).to(dtype)


@triton.jit
def _weight(weight, column, d):
    """Loads a weight [1, D]. Kernels call this before `wait`, as weights are constant: read after
    the sum of squares, they would cost a second access to memory."""
    return tl.load(weight + column, mask=column < d, other=0.0)


@triton.jit
def _plus(one, other, dtype: tl.constexpr):
    return (one.to(tl.float32) + other.to(tl.float32)).to(dtype)


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
    column = tl.arange(0, D)[None, :]
    by = _weight(weight, column, d)
    of_first = _weight(first, column, d) if FIRST else by
    wait(EARLY)
    release(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    there = (row < rows) & (column < d)
    wide = tl.load(x + row.to(tl.int64) * stride + column, mask=there, other=0.0)
    dtype: tl.constexpr = x.dtype.element_ty
    if FIRST:
        wide = _normed(wide, of_first, d, eps, dtype, WIDE)
    if ADD:
        place = residual + row.to(tl.int64) * d + column
        wide = _plus(wide, tl.load(place, mask=there, other=0.0), dtype)
        tl.store(place, wide, mask=there)
    normed = _normed(wide, by, d, eps, dtype, WIDE)
    at = row.to(tl.int64) * d + column
    if FP8 > 0:
        store_rows(normed, out, low, scales, at, there, row, row < rows, d, FP8, D)
    else:
        tl.store(out + at, normed, mask=there)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norms(
    x,
    residual,
    first,
    weight,
    second_weight,
    third_weight,
    out,
    second_out,
    third_out,
    rows,
    stride,
    d,
    eps,
    COUNT: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
):
    """Kernel of `add_rms_norms`. COUNT: number of norms of the sum."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)[None, :]
    of_x, by = _weight(first, column, d), _weight(weight, column, d)
    second = _weight(second_weight, column, d) if COUNT > 1 else by
    third = _weight(third_weight, column, d) if COUNT > 2 else by
    wait(EARLY)
    release(EARLY)
    there = column < d
    dtype: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + row * stride + column, mask=there, other=0.0)
    wide = _normed(wide, of_x, d, eps, dtype, WIDE)
    at = row * d + column
    wide = _plus(wide, tl.load(residual + at, mask=there, other=0.0), dtype)
    tl.store(residual + at, wide, mask=there)
    tl.store(out + at, _normed(wide, by, d, eps, dtype, WIDE), mask=there)
    if COUNT > 1:
        tl.store(second_out + at, _normed(wide, second, d, eps, dtype, WIDE), mask=there)
    if COUNT > 2:
        tl.store(third_out + at, _normed(wide, third, d, eps, dtype, WIDE), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _add_normed(
    stream,
    x,
    of_x,
    other,
    of_other,
    of_sum,
    scale,
    rows,
    stride,
    other_stride,
    d,
    eps,
    TWO: tl.constexpr,
    SCALED: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
):
    """Kernel of `add_normed`. of_x, of_other, of_sum: weights of norms; the last two and `other`
    only if TWO."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)[None, :]
    by_x = _weight(of_x, column, d)
    by_other = _weight(of_other, column, d) if TWO else by_x
    by_sum = _weight(of_sum, column, d) if TWO else by_x
    wait(EARLY)
    release(EARLY)
    there = column < d
    dtype: tl.constexpr = stream.dtype.element_ty
    made = tl.load(x + row * stride + column, mask=there, other=0.0)
    made = _normed(made, by_x, d, eps, dtype, WIDE)
    if TWO:
        more = tl.load(other + row * other_stride + column, mask=there, other=0.0)
        more = _normed(more, by_other, d, eps, dtype, WIDE)
        made = _normed(_plus(made, more, dtype), by_sum, d, eps, dtype, WIDE)
    place = stream + row * d + column
    total = _plus(tl.load(place, mask=there, other=0.0), made, dtype)
    if SCALED:
        total = (total.to(tl.float32) * tl.load(scale).to(tl.float32)).to(dtype)
    tl.store(place, total, mask=there)


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


def add_rms_norms(
    x: Tensor, residual: Tensor, first: Tensor, weights: tuple[Tensor, ...], eps: float
) -> tuple[list[Tensor], Tensor]:
    """Returns (norms of the sum, the sum) of residual [T, d] and the norm of x [T, d]; residual
    (contiguous) is overwritten with the sum. first: weight of the norm of x. weights: of the sum's
    norms, one to three of one dtype."""
    assert residual.is_contiguous(), "the residual is written in place"
    rows, d = x.shape
    outs = [torch.empty_like(residual) for _ in weights]
    if rows:
        all_weights, all_outs = ([*each, each[0], each[0]][:3] for each in (list(weights), outs))
        _add_rms_norms[(rows,)](
            x,
            residual,
            first,
            *all_weights,
            *all_outs,
            rows,
            x.stride(0),
            d,
            eps,
            COUNT=len(weights),
            WIDE=first.dtype == torch.float32,
            **_options(x),
        )
    return outs, residual


def add_normed(
    stream: Tensor,
    parts: tuple[tuple[Tensor, Tensor], ...],
    weight: Tensor | None,
    eps: float,
    scale: Tensor | None,
) -> Tensor:
    """Returns (stream + made) * scale, written to stream [T, d] (contiguous). parts: one or two of
    x [T, d] and the weight of its norm. weight: made is the norm of the sum of two normed parts;
    None: made is the one normed part. scale: [1]; None: 1."""
    assert stream.is_contiguous(), "the stream is written in place"
    (x, of_x), (other, of_other) = parts[0], parts[-1]
    rows, d = stream.shape
    if rows:
        _add_normed[(rows,)](
            stream,
            x,
            of_x,
            other,
            of_other,
            of_x if weight is None else weight,
            of_x if scale is None else scale,
            rows,
            x.stride(0),
            other.stride(0),
            d,
            eps,
            TWO=weight is not None,
            SCALED=scale is not None,
            WIDE=of_x.dtype == torch.float32,
            **_options(x),
        )
    return stream


def _options(x: Tensor, each: int = 1, summed: bool = True) -> dict[str, Any]:
    """Returns the options of kernels of which a program handles `each` rows of x [T, d]. summed:
    True if the norm of x is added to other numbers."""
    rows, width = x.shape[0], next_power_of_2(x.shape[1])
    early = early_of(x.device, cdiv(rows, each))
    # Two norms of 16,384 rows of 2,560 take 114 us with 16 warps and 92 us with 4. Wider rows need
    # more warps, or registers spill.
    most = max(4, width // 1024) if rows > 256 and summed else 16
    return {
        "EARLY": early,
        "D": width,
        "num_warps": max(1, min(most, width * each // 256)),
        "launch_pdl": bool(early),
        # A fused multiply-add would skip the rounding between the norm and the sum, which changes
        # results by up to 0.02.
        "enable_fp_fusion": not summed,
    }


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
        each = max(1, min(4, 1024 // next_power_of_2(d))) if rows > 256 else 1
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
            WIDE=weight.dtype == torch.float32,
            ROWS=each,
            **_options(x, each, first is not None),
        )
    return out

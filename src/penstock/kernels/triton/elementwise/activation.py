"""Activations of an MLP's gate, in one launch. T: tokens, F: inner size of the MLP. Knows one
matrix; no layer.

If the result is quantized to eight bits, a program handles a whole row, since the scale depends on
the row's largest magnitude. The same goes for one row in fixed point."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fixed_row import FixedRow
from penstock.kernels.fp8_rows import Form, Fp8Rows, Rows
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.linear.fp8 import BITS, empty_rows, pointers, store_rows
from penstock.kernels.triton.pdl import early_of, has_pdl, release, wait

_BLOCK = 1024
GATES = {"none": 0, "silu": 1, "gelu_tanh": 2}  # activation -> KIND of `gated`


@triton.jit
def both(a, b, c, d):
    """Adds two pairs: returns a + c and b + d. With it, `tl.reduce` sums gate and up together,
    which passes through shared memory once instead of twice."""
    return a + c, b + d


@triton.jit
def swish(gate, slope):
    """Returns gate / (1 + exp(-slope * gate)); silu has slope 1."""
    # a squared rsqrt, since rsqrt is one instruction and a division takes several
    root = tl.rsqrt(1.0 + tl.exp2(gate * slope * -1.4426950408889634))
    return gate * root * root


@triton.jit
def gelu_tanh(gate):
    """Returns gate * (1 + tanh(y)) / 2 (tanh approximation of GELU, arXiv:1606.08415), computed as
    gate / (1 + exp(-2 y))."""
    root = tl.rsqrt(1.0 + tl.exp2(gate * (-2.302208198 - 0.1029432396 * gate * gate)))
    return gate * root * root


@triton.jit
def gated(gate, slope, KIND: tl.constexpr):
    """Returns the activation of the gate. KIND: 1: swish with `slope`; 2: GELU."""
    return swish(gate, slope) if KIND == 1 else gelu_tanh(gate)


@triton.jit
def _store(
    value, out, low, scales, row, column, there, width, FP8: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes some columns of a row in the model's dtype, or (if FP8) a whole row in eight bits with
    its scale."""
    if FP8 > 0:
        alone = row + tl.zeros((1, 1), tl.int64)
        at = row * width + column[None, :]
        values = tl.where(there, value, 0.0)[None, :]
        store_rows(
            values, out, low, scales, at, there[None, :], alone, alone >= 0, width, FP8, BLOCK
        )
    else:
        tl.store(out + row * width + column, value, mask=there)


@triton.jit
def _gated(
    gate_up,
    out,
    low,
    scales,
    width,
    stride,
    GELU: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    gate = tl.load(gate_up + row * stride + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=there, other=0.0).to(tl.float32)
    value = gelu_tanh(gate) * up if GELU else swish(gate, 1.0) * up
    value = value.to(gate_up.dtype.element_ty)
    _store(value, out, low, scales, row, column, there, width, FP8, BLOCK)


@triton.jit
def _opened(
    x,
    gate,
    out,
    low,
    scales,
    width,
    x_stride,
    gate_stride,
    RELU: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    opening = tl.load(gate + row * gate_stride + column, mask=there, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + column, mask=there, other=0.0).to(tl.float32)
    value = value * tl.maximum(opening, 0.0) if RELU else value / (1.0 + tl.exp(-opening))
    value = value.to(x.dtype.element_ty)
    _store(value, out, low, scales, row, column, there, width, FP8, BLOCK)


@triton.jit
def opened_of(made, x, weight, scale, at, there, GATED: tl.constexpr):
    """Returns scale * made, or if GATED scale * made * sigmoid(x . weight), of a row's numbers in
    float32. The product and the sigmoid are rounded as in torch. made, x: pointers. at, there:
    indices of the row's numbers, all of them if GATED, and their mask. weight: float32, like
    `at`."""
    value = tl.load(made + at, mask=there, other=0.0).to(tl.float32) * scale
    if GATED:
        dtype = made.dtype.element_ty
        seen = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        opening = tl.sum(seen * weight).to(dtype).to(tl.float32)
        value *= (1.0 / (1.0 + tl.exp(-opening))).to(dtype).to(tl.float32)
    return value


@triton.jit
def _add_opened(
    out,
    made,
    x,
    gate,
    scale,
    width,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Kernel of `add_opened`, with one program per row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there, at = column < width, row * width + column
    weight = 0.0
    if GATED:
        # loaded before `wait`, since weights are constant
        weight = tl.load(gate + column, mask=there, other=0.0).to(tl.float32)
    wait(EARLY)
    release(EARLY)
    value = opened_of(made, x, weight, scale, at, there, GATED)
    value += tl.load(out + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


def add_opened(out: Tensor, made: Tensor, x: Tensor, gate: Tensor | None, scale: float) -> Tensor:
    """Adds scale * made * sigmoid(x . gate) to out, or scale * made without a gate; returns out.
    out, made, x: [T, d]. gate: [1, d]. The product and the sigmoid are rounded as in torch, the sum
    once."""
    rows, width = out.shape
    assert out.is_contiguous() and made.is_contiguous() and x.is_contiguous()
    if rows:
        early, block = early_of(out.device, rows), next_power_of_2(width)
        _add_opened[(rows,)](
            out,
            made,
            x,
            out if gate is None else gate,
            scale,
            width,
            GATED=gate is not None,
            EARLY=early,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
            launch_pdl=bool(early),
        )
    return out


def sigmoid_mul(x: Tensor, gate: Tensor, form: Form = "wide") -> Rows:
    """Returns x * sigmoid(gate), [T, F], in `form`. x, gate: [T, F], rows may have gaps. float32
    inside, rounded once."""
    return _launch_opened(x, gate, form, relu=False)


def relu2(x: Tensor, form: Form = "wide") -> Rows:
    """Returns max(x, 0) squared, [T, F], in `form`. x: [T, F]. float32 inside, rounded once."""
    return _launch_opened(x, x, form, relu=True)


def _launch_opened(x: Tensor, gate: Tensor, form: Form, *, relu: bool) -> Rows:
    rows, width = x.shape
    plain = form == "wide"
    out: Rows = (
        torch.empty((rows, width), dtype=x.dtype, device=x.device)
        if plain
        else empty_rows(x, form, width)
    )
    if rows:
        early = early_of(x.device, rows)
        block = _BLOCK if plain else next_power_of_2(width)
        _opened[(rows, cdiv(width, block))](
            x,
            gate,
            *((out, out, out) if plain else pointers(out)),
            width,
            x.stride(0),
            gate.stride(0),
            RELU=relu,
            FP8=0 if plain else BITS[form],
            EARLY=early,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
            launch_pdl=bool(early),
        )
    return out


def silu_mul(gate_up: Tensor, form: Form = "wide") -> Rows:
    """Returns silu(gate) * up, [T, F], in `form`. gate_up: [T, 2F], the gate first. float32 inside,
    rounded once."""
    return _launch(gate_up, False) if form == "wide" else _launch_whole(gate_up, False, form)


def gelu_mul(gate_up: Tensor, form: Form = "wide") -> Rows:
    """Returns gelu(gate) * up, [T, F], in `form`, with the tanh approximation. gate_up: [T, 2F],
    the gate first."""
    return _launch(gate_up, True) if form == "wide" else _launch_whole(gate_up, True, form)


def _launch(gate_up: Tensor, gelu: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        early = has_pdl(gate_up.device)
        _gated[(rows, cdiv(width, _BLOCK))](
            gate_up,
            out,
            out,
            out,
            width,
            gate_up.stride(0),
            GELU=gelu,
            FP8=0,
            EARLY=early,
            BLOCK=_BLOCK,
            num_warps=4,
            launch_pdl=bool(early),
        )
    return out


def _launch_whole(gate_up: Tensor, gelu: bool, form: Form) -> Fp8Rows | FixedRow:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_rows(gate_up, form, width)
    if rows:
        early, block = early_of(gate_up.device, rows), next_power_of_2(width)
        _gated[(rows, 1)](
            gate_up,
            *pointers(out),
            width,
            gate_up.stride(0),
            GELU=gelu,
            FP8=BITS[form],
            EARLY=early,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
            launch_pdl=bool(early),
        )
    return out

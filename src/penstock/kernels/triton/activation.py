"""The MLP's gate, one launch. It knows one matrix; no layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.pdl import has_pdl, release, wait

_BLOCK = 1024


@triton.jit
def _gated(gate_up, out, width, stride, GELU: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    release(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    gate = tl.load(gate_up + row * stride + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=there, other=0.0).to(tl.float32)
    if GELU:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        value = gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner))) * up
    else:
        value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=there)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2F], the gate first -> silu(gate) * up, [T, F]. float32 inside, rounded once."""
    return _launch(gate_up, gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2F], the gate first -> gelu(gate) * up, [T, F], in tanh's approximation."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: Tensor, gelu: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        early = has_pdl(gate_up.device)
        _gated[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, out, width, gate_up.stride(0), GELU=gelu, EARLY=early, BLOCK=_BLOCK, num_warps=4,
            launch_pdl=bool(early),
        )  # fmt: skip
    return out

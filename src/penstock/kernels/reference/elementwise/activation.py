"""The MLP's gate, and soft caps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.reference.linear.fp8 import in_form


def silu_mul(gate_up: Tensor, form: Form = "wide") -> Rows:
    """gate_up [T, 2F], the gate first -> silu(gate) * up, [T, F], in the form asked for.

    torch's silu has another exponential for the elements left over at the end of a thread's share,
    so a row's last bits would depend on the row count; its exp has one for all. In bf16 the
    difference drowns in the rounding.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.dtype == torch.bfloat16:
        gated = F.silu(gate).mul_(up)
    else:
        wide = gate.float()
        below = torch.neg(wide).exp_().add_(1)
        gated = torch.div(wide, below, out=below).to(gate.dtype).mul_(up)
    return in_form(gated, form)


def gelu_mul(gate_up: Tensor, form: Form = "wide") -> Rows:
    """gate_up [T, 2F], the gate first -> gelu(gate) * up, [T, F]; GELU in tanh's approximation
    (arXiv:1606.08415)."""
    gate, up = gate_up.chunk(2, dim=-1)
    gated = F.gelu(gate, approximate="tanh").mul_(up)
    return in_form(gated, form)


def sigmoid_mul(x: Tensor, gate: Tensor, form: Form = "wide") -> Rows:
    """x [T, F], gate [T, F] -> x * sigmoid(gate), [T, F], in the form asked for."""
    return in_form(over_sigmoid(x.float(), gate).to(x.dtype), form)


def relu2(x: Tensor, form: Form = "wide") -> Rows:
    """x [T, F] -> max(x, 0) squared, [T, F], in the form asked for."""
    return in_form(F.relu(x).square_(), form)


def over_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x, gate of one shape -> x * sigmoid(gate) float32, by the exponential that is the same for
    every element."""
    below = torch.neg(gate.float()).exp_().add_(1)
    return torch.div(x, below, out=below)


def add_opened(out: Tensor, made: Tensor, x: Tensor, gate: Tensor | None, scale: float) -> Tensor:
    """out, made, x [T, d], gate [1, d] -> out, to which scale * made * sigmoid(x . gate) is added;
    without a gate scale * made."""
    if gate is None:
        return out.add_(made, alpha=scale)
    return out.addcmul_(made, F.linear(x, gate).sigmoid_(), value=scale)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """logits, overwritten -> cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118)."""
    return logits.div_(cap).tanh_().mul_(cap)

"""Activations of an MLP's gate, and soft caps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.reference.linear.fp8 import in_form


def silu_mul(gate_up: Tensor, form: Form = "wide") -> Rows:
    """Returns silu(gate) * up, [T, F], in `form`. gate_up: [T, 2F], the gate first.

    In float32 it is computed by torch's exp. torch's silu computes the last elements of a thread's
    share by another exponential, so a row's last bits would depend on the number of rows. In bf16
    the difference is smaller than the rounding."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.dtype == torch.bfloat16:
        gated = F.silu(gate).mul_(up)
    else:
        wide = gate.float()
        below = torch.neg(wide).exp_().add_(1)
        gated = torch.div(wide, below, out=below).to(gate.dtype).mul_(up)
    return in_form(gated, form)


def gelu_mul(gate_up: Tensor, form: Form = "wide") -> Rows:
    """Returns gelu(gate) * up, [T, F], in `form`, with the tanh approximation of GELU
    (arXiv:1606.08415). gate_up: [T, 2F], the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    gated = F.gelu(gate, approximate="tanh").mul_(up)
    return in_form(gated, form)


def sigmoid_mul(x: Tensor, gate: Tensor, form: Form = "wide") -> Rows:
    """Returns x * sigmoid(gate), [T, F], in `form`. x, gate: [T, F]."""
    return in_form(over_sigmoid(x.float(), gate).to(x.dtype), form)


def relu2(x: Tensor, form: Form = "wide") -> Rows:
    """Returns max(x, 0) squared, [T, F], in `form`. x: [T, F]."""
    return in_form(F.relu(x).square_(), form)


def over_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x * sigmoid(gate) in float32, computed by torch's exp. torch's own sigmoid would make
    a row's last bits depend on the number of rows. x, gate: of the same shape."""
    below = torch.neg(gate.float()).exp_().add_(1)
    return torch.div(x, below, out=below)


def add_opened(out: Tensor, made: Tensor, x: Tensor, gate: Tensor | None, scale: float) -> Tensor:
    """Adds scale * made * sigmoid(x . gate) to out, or scale * made if gate is None; returns out.
    It adds a shared expert's output `made`. out, made, x: [T, d]. gate: [1, d]."""
    if gate is None:
        return out.add_(made, alpha=scale)
    return out.addcmul_(made, F.linear(x, gate).sigmoid_(), value=scale)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Returns cap * tanh(logits / cap) in place (Gemma 2, arXiv:2408.00118)."""
    return logits.div_(cap).tanh_().mul_(cap)

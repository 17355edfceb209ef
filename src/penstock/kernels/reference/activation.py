"""The MLP's gate, and soft caps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.fp8_rows import Rows
from penstock.kernels.reference.fp8 import quantize_rows


def silu_mul(gate_up: Tensor, fp8: bool = False) -> Rows:
    """gate_up [T, 2F], the gate first -> silu(gate) * up, [T, F]; fp8: in eight bits.

    torch's silu has another exponential for the elements left over at the end of a thread's share, so a row's last bits
    would depend on the row count; its exp has one for all. In bf16 the difference drowns in the rounding.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.dtype == torch.bfloat16:
        gated = F.silu(gate).mul_(up)
    else:
        wide = gate.float()
        below = torch.neg(wide).exp_().add_(1)
        gated = torch.div(wide, below, out=below).to(gate.dtype).mul_(up)
    return quantize_rows(gated) if fp8 else gated


def gelu_mul(gate_up: Tensor, fp8: bool = False) -> Rows:
    """gate_up [T, 2F], the gate first -> gelu(gate) * up, [T, F]; GELU in tanh's approximation (arXiv:1606.08415).
    fp8: in eight bits."""
    gate, up = gate_up.chunk(2, dim=-1)
    gated = F.gelu(gate, approximate="tanh").mul_(up)
    return quantize_rows(gated) if fp8 else gated


def softcap(logits: Tensor, cap: float) -> Tensor:
    """logits, overwritten -> cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118)."""
    return logits.div_(cap).tanh_().mul_(cap)

"""The MLP's gate."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2F], the gate first -> silu(gate) * up, [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up

"""Linear: a weight and perhaps a bias, for `ops.linear`. Fusing (qkv, gate and up) is whoever places the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.ops import Ops


@dataclass(slots=True)
class Linear:
    """x `[T, in]` -> `[T, out]`."""

    weight: Any  # [out, in] until prepare(); then whatever ops.prepare_linear made of it
    bias: Tensor | None  # [out]

    @classmethod
    def empty(cls, out: int, into: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
        weight = torch.empty(out, into, dtype=dtype, device=device)
        return cls(weight, torch.empty(out, dtype=dtype, device=device) if bias else None)

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def prepare(self, ops: Ops) -> None:
        """Once, after the weight is filled: arranges it as the kernel wants it, and lets the first form go."""
        self.weight = ops.prepare_linear(self.weight)

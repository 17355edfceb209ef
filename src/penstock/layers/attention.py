"""Attention: one fused product in, rotary and store, attention over the paged cache, one product out.

What prefill, decode and prefix groups are lies inside `ops.attention`; this layer doesn't know them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.inputs import AttentionInputs
from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear


@dataclass(slots=True)
class Attention:
    """Grouped-query attention (arXiv:2305.13245) with rotary positions."""

    qkv: Linear  # [(heads + 2 kv_heads) * width, d]: q's rows, then k's, then v's
    out: Linear  # [d, heads * width]
    q_norm: Tensor | None  # [width]: q and k are normed head by head before they are rotated
    k_norm: Tensor | None
    eps: float
    heads: int
    kv_heads: int
    width: int
    window: int | None  # a token sees itself and the window - 1 tokens before it

    def __call__(self, ops: Ops, x: Tensor, inputs: AttentionInputs, kv: Tensor, cos_sin: Tensor) -> Tensor:
        """x `[T, d]`, kv `[blocks, kv_heads, 2, 16, width]`, cos_sin `[positions, 2, width / 2]` -> `[T, d]`."""
        heads, width = self.heads, self.width
        qkv = self.qkv(ops, x)
        q = ops.rotary_and_store(
            qkv, cos_sin, inputs, kv, heads, self.kv_heads, width, self.q_norm, self.k_norm, self.eps
        )
        seen = ops.attention(q, kv, inputs, width**-0.5, self.window)
        return self.out(ops, seen.reshape(-1, heads * width))

"""What a gated delta rule is made of: its heads, its small weights (arXiv:2412.06464). It knows
shapes; no kernel.

A value head h keeps a matrix S [key width, value width] of a sequence, and a token with key k,
value v and query q, which it shares with value heads of the same key head, changes it by a decay a
in (0, 1) and a rate b in (0, most_rate):

    S <- a S + k b (v - a k S)        answer: q S

    a = exp(decay * softplus(given + step bias))    decay = -exp(A_log)    b = most_rate *
    sigmoid(given)

q and k have length 1, and q is divided by the root of its width. q, k and v come through a short
convolution and silu; the answer leaves through an RMS norm, head by head, and silu(z) times it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # configs are read without torch
    from torch import Tensor

NORM_EPS = 1e-6  # beside the squared length of q and k


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of one layer, on this rank. Neighbouring value heads share a key head."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    @property
    def key_size(self) -> int:
        """Returns the numbers of a token's keys, and of its queries."""
        return self.key_heads * self.key_width

    @property
    def value_size(self) -> int:
        """Returns the numbers of a token's values."""
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Returns how many channels the convolution has: those of q, then k, then v."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Small weights of one layer, on this rank."""

    taps: Tensor  # [channels, taps]
    decay: Tensor  # [value_heads] float32, below 0
    step_bias: Tensor  # [value_heads] float32
    norm: Tensor  # [value_width]
    eps: float  # of the norm
    most_rate: float = 1.0

"""Head sizes and small weights of a gated delta rule layer (arXiv:2412.06464). Knows shapes; no
kernel.

Each value head keeps a state matrix S [key width, value width] per sequence. A token has a key k, a
value v and a query q; value heads of one key head share k and q. A token changes S by a decay a in
(0, 1) and a rate b in (0, most_rate):

  S <- a S + k b (v - a k S)        output: q S
  a = exp(decay * softplus(given + step bias))    decay = -exp(A_log)
  b = most_rate * sigmoid(given)

`given` is an output of the layer's projection for the token: one number for a, another for b. q and
k are normed to length 1, and q is divided by the square root of its width. q, k and v come from a
short convolution followed by silu. The output goes through an RMS norm per head and is multiplied
by silu(z), where z is another output of the projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this module is imported to read configs, which needs no torch
    from torch import Tensor

NORM_EPS = 1e-6  # added to the squared length of q and k


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Numbers and widths of a layer's heads, on this tensor parallel rank. Neighbouring value heads
    share a key head."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    @property
    def key_size(self) -> int:
        """Numbers of a token's keys over all heads; its queries have as many."""
        return self.key_heads * self.key_width

    @property
    def value_size(self) -> int:
        """Numbers of a token's values over all heads."""
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of q, then k, then v."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The small weights of a layer, on this tensor parallel rank."""

    taps: Tensor  # [channels, taps]: weights of the short convolution
    decay: Tensor  # [value_heads] float32, below 0: -exp(A_log)
    step_bias: Tensor  # [value_heads] float32
    norm: Tensor  # [value_width]: weight of the output's RMS norm
    eps: float  # eps of the norm
    most_rate: float = 1.0

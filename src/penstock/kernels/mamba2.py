"""Head sizes and small weights of a Mamba2 layer (arXiv:2405.21060). Knows shapes; no kernel.

A head keeps a state S [state width, head width] per sequence. A token with x, B and C changes it by
a step dt; heads of one group share B and C:

  S <- exp(dt a) S + dt B x        output: C S + skip x
  dt = softplus(given + step bias)    a = -exp(A_log)

`given` is the head's output of the layer's first projection for dt. x, B and C come from a short
convolution followed by silu. Another operation gates and norms the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this module is imported to read configs, which needs no torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mamba2Heads:
    """Numbers and widths of a layer's heads, on this tensor parallel rank. Neighbouring heads share
    a group."""

    heads: int
    head_width: int
    groups: int
    state_width: int

    @property
    def size(self) -> int:
        """Numbers of a token's x over all heads; its gate and its output have as many."""
        return self.heads * self.head_width

    @property
    def group_size(self) -> int:
        """Numbers of a token's B over all groups; its C has as many."""
        return self.groups * self.state_width

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of x, then B, then C."""
        return self.size + 2 * self.group_size

    @property
    def columns(self) -> int:
        """Outputs of the first product per token: gate z, channels, dt."""
        return self.size + self.channels + self.heads


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The small weights of a layer, on this tensor parallel rank."""

    taps: Tensor  # [channels, taps]: weights of the short convolution
    taps_bias: Tensor | None  # [channels]
    a: Tensor  # [heads] float32, below 0: -exp(A_log)
    step_bias: Tensor  # [heads] float32
    skip: Tensor  # [heads] float32

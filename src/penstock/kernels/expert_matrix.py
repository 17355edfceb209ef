"""ExpertMatrix: the matrices of a mixture's experts, stacked, and Experts: what an operation of experts is made of.

It draws how numbers and scales lie; no kernels, no layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import E4M3

GROUP = 128  # neighbours of a row that share a scale, where scales go by group


@dataclass(slots=True, frozen=True)
class ExpertMatrix:
    """E matrices [N, K] that are multiplied from the right: x [T, K] -> x @ matrix.T.

    numbers: [E, N, K] of the model's dtype, or e4m3.   scale: float32, of e4m3 alone: a row's [E, N], or one for each
    128 neighbours of a row, [E, N, ceil(K / 128)].
    """

    numbers: Tensor
    scale: Tensor | None = None

    @property
    def in_eight_bits(self) -> bool:
        return self.numbers.dtype == E4M3

    @property
    def by_group(self) -> bool:
        """Whether a row has several scales."""
        return self.scale is not None and self.scale.dim() == 3

    def widened(self, expert: int) -> Tensor:
        """Returns an expert's matrix [N, K] in float32."""
        numbers = self.numbers[expert].float()
        if self.scale is None:
            return numbers
        scale = self.scale[expert]
        if not self.by_group:
            return numbers * scale[:, None]
        return numbers * scale.repeat_interleave(GROUP, 1)[:, : numbers.shape[1]]


@dataclass(slots=True, frozen=True)
class Experts:
    """The experts of a layer: gate_up [E, 2F, d] (an expert's gate first), down [E, d, F], and who is sent to them.

    top_k: experts a token.   renormalise: whether a token's weights over its experts add up to 1.
    """

    gate_up: ExpertMatrix
    down: ExpertMatrix
    top_k: int
    renormalise: bool
    dtype: torch.dtype  # of the model's rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns (experts, d, F)."""
        count, d, inner = self.down.numbers.shape
        return count, d, inner

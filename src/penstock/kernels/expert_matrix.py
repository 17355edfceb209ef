"""ExpertMatrix: the matrices of a mixture's experts, stacked, and Experts: what an operation of experts is made of.

It draws how numbers and scales lie; no kernels, no layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import E4M3, spread

FOURS = 32  # the same of numbers in four bits
E2M1 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
)  # what the lower three bits of such a number say; the fourth is its sign


@dataclass(slots=True, frozen=True)
class ExpertMatrix:
    """E matrices [N, K] that are multiplied from the right: x [T, K] -> x @ matrix.T.

    numbers: [E, N, K] of the model's dtype, or e4m3; or bytes [E, N, K / 2] of two numbers in four bits each (MXFP4:
    e2m1, OCP Microscaling Formats 1.0): of 32 neighbours the first 16 are the lower halves of 16 bytes, the others the
    upper ones.   scale: of e4m3 float32, a row's [E, N], or one for 128 neighbours of a row, [E, N, ceil(K / 128)]; of
    four bits bytes [E, N, K / 32], of which each says 2 ** (byte - 127).   bias: [E, N] of the model's dtype.
    """

    numbers: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None

    @property
    def in_eight_bits(self) -> bool:
        return self.numbers.dtype == E4M3

    @property
    def in_four_bits(self) -> bool:
        return self.numbers.dtype == torch.uint8

    @property
    def by_group(self) -> bool:
        """Whether a row has several scales."""
        return self.in_eight_bits and self.scale is not None and self.scale.dim() == 3

    def widened(self, expert: int) -> Tensor:
        """Returns an expert's matrix [N, K] in float32."""
        if self.in_four_bits:
            return self._from_four(expert)
        numbers = self.numbers[expert].float()
        if self.scale is None:
            return numbers
        scale = self.scale[expert]
        if not self.by_group:
            return numbers * scale[:, None]
        return numbers * spread(scale, numbers.shape[1])

    def _from_four(self, expert: int) -> Tensor:
        assert self.scale is not None
        octets = self.numbers[expert].unflatten(1, (-1, FOURS // 2))
        codes = torch.cat((octets & 15, octets >> 4), -1).long()
        worth = torch.tensor((*E2M1, *(-each for each in E2M1)), device=octets.device)
        powers = torch.exp2(self.scale[expert].float() - 127)
        return (worth[codes] * powers[..., None]).flatten(1)


@dataclass(slots=True, frozen=True)
class Experts:
    """The experts of a layer: gate_up [E, 2F, d] (an expert's gate first), down [E, d, F], and who is sent to them.

    top_k: experts a token.   renormalise: whether a token's weights over its experts add up to 1.   clamp: (a, most):
    the middle is g * sigmoid(a * g) * (u + 1) with g at most `most` and u within it (gpt-oss); None: silu(g) * u.
    """

    gate_up: ExpertMatrix
    down: ExpertMatrix
    top_k: int
    renormalise: bool
    dtype: torch.dtype  # of the model's rows
    clamp: tuple[float, float] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns (experts, d, F)."""
        count, d, inner = self.down.numbers.shape
        return count, d, 2 * inner if self.down.in_four_bits else inner

"""ExpertMatrix: the stacked matrices of a mixture's experts. Experts: all weights and rules of a
layer's experts.

Describes the layout of numbers and scales; no kernels, no layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.fp4_groups import MX_GROUP
from penstock.kernels.fp4_matrix import widen_fp4
from penstock.kernels.fp8_rows import E4M3, spread
from penstock.kernels.int_matrix import ZERO_OF_FOUR, unpack_four
from penstock.kernels.routing import Routing

FOURS = MX_GROUP  # neighbours packed together, never cut between ranks
Gate = Literal["silu", "gelu_tanh", "none"]


@dataclass(slots=True, frozen=True)
class ExpertMatrix:
    """E matrices [N, K], multiplied as x [T, K] -> x @ matrix.T.

    numbers: [E, N, K] of the model's dtype, or e4m3, or int8; or bytes [E, N, K / 2] of two
    four-bit numbers, integers (`kernels/int_matrix.py`) or floats (`kernels/fp4_matrix.py`): of 32
    neighbours the first 16 are the lower halves of 16 bytes, the others the upper ones. scale: of
    e4m3, float32 [E, N], or per 128 neighbours of a row [E, N, ceil(K / 128)]; of MXFP4, bytes [E,
    N, K / 32]; of NVFP4, e4m3 [E, N, K / 16] with whole [E, N]; of integers, floats [E, N, groups],
    and zero alike if there are zero points. bias: [E, N] of the model's dtype."""

    numbers: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    zero: Tensor | None = None
    whole: Tensor | None = None

    @property
    def in_eight_bits(self) -> bool:
        return self.numbers.dtype == E4M3

    @property
    def in_four_bits(self) -> bool:
        return self.numbers.dtype == torch.uint8

    @property
    def in_fp4(self) -> bool:
        """True if numbers are four-bit floats. MXFP4's scales are integers, also if a column joins
        them into words."""
        if not self.in_four_bits or self.scale is None:
            return False
        return self.scale.dtype == E4M3 or not self.scale.is_floating_point()

    @property
    def integers(self) -> int:
        """Bits of integer numbers; 0: numbers are not integers."""
        return (
            8
            if self.numbers.dtype == torch.int8
            else 4
            if self.in_four_bits and not self.in_fp4
            else 0
        )

    @property
    def group(self) -> int:
        """Neighbours of a row of integers that share a scale."""
        assert self.scale is not None
        return self.numbers.shape[2] * (2 if self.in_four_bits else 1) // self.scale.shape[2]

    @property
    def by_group(self) -> bool:
        """True if a row of integers or e4m3 has several scales."""
        if self.scale is None or self.in_fp4 or self.scale.dim() < 3:
            return False
        return self.in_eight_bits or self.scale.shape[2] > 1

    @property
    def scales(self) -> int:
        """Kind of a row's scales: 0 none, 1 one, 2 several; of four-bit floats, in the layout of
        kernels/triton/experts/moe.py: 3 one for every 16 numbers, 4 one for every 32."""
        if self.scale is None:
            return 0
        if self.in_fp4:
            return 3 if self.scale.dim() == 4 else 4
        return 1 + self.by_group

    def widened(self, expert: int) -> Tensor:
        """Returns an expert's matrix [N, K] in float32."""
        if self.in_fp4:
            assert self.scale is not None
            whole = None if self.whole is None else self.whole[expert]
            return widen_fp4(self.numbers[expert], self.scale[expert], whole)
        if self.integers:
            return self._from_integers(expert)
        numbers = self.numbers[expert].float()
        if self.scale is None:
            return numbers
        scale = self.scale[expert]
        if not self.by_group:
            return numbers * scale[:, None]
        return numbers * spread(scale, numbers.shape[1])

    def _from_integers(self, expert: int) -> Tensor:
        assert self.scale is not None
        four, scale = self.in_four_bits, self.scale[expert].float()
        numbers = unpack_four(self.numbers[expert]) if four else self.numbers[expert]
        zero = (
            (ZERO_OF_FOUR if four else 0)
            if self.zero is None
            else self.zero[expert].float()[..., None]
        )
        return (
            (numbers.float().unflatten(1, (scale.shape[1], -1)) - zero) * scale[..., None]
        ).flatten(1)


@dataclass(slots=True, frozen=True)
class Experts:
    """The experts of a layer: gate_up [E, 2F, d] (an expert's gate first), down [E, d, F], and the
    routing to them.

    gate: the activation of an expert's gate, which multiplies up. "none": gate_up is [E, F, d], up
    alone, and the middle is max(u, 0) squared (Nemotron 3). clamp: (a, most): the middle is g *
    sigmoid(a * g) * (u + 1) with g at most `most` and u within +-most (gpt-oss); None: gate(g) * u.
    correction: [E] float32, added to the experts' worth for the choice, not to weights.
    answer_scale: [E] float32, factor of each expert's final weight (Gemma 4)."""

    gate_up: ExpertMatrix
    down: ExpertMatrix
    routing: Routing
    dtype: torch.dtype  # dtype of the model's rows
    clamp: tuple[float, float] | None = None
    correction: Tensor | None = None
    gate: Gate = "silu"
    answer_scale: Tensor | None = None

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.routing.top_k

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns (experts, d, F)."""
        count, d, inner = self.down.numbers.shape
        return count, d, 2 * inner if self.down.in_four_bits else inner

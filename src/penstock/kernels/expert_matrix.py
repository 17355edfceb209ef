"""ExpertMatrix: one matrix of each expert of a layer, stacked. Experts: all weights and rules of a
layer's mixture of experts.

Describes the layout of numbers and scales; no kernels, no layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.fp4_groups import MX_GROUP
from penstock.kernels.fp4_matrix import widen_fp4
from penstock.kernels.fp8_rows import E4M3, spread
from penstock.kernels.int_matrix import ZERO_OF_FOUR, unpack_four
from penstock.kernels.routing import Routing

# inputs that are packed together and share an MXFP4 scale; tensor parallel splits don't divide them
FOURS = MX_GROUP
Gate = Literal["silu", "gelu_tanh", "none"]


@dataclass(slots=True, frozen=True)
class ExpertMatrix:
    """E matrices [N, K], one per expert. A matrix maps x [T, K] to x @ matrix.T. N: outputs, K:
    inputs.

    numbers: [E, N, K] in the model's dtype, e4m3 or int8; or uint8 [E, N, K / 2] with two four-bit
    numbers per byte, int4 (`kernels/int_matrix.py`) or e2m1 (`kernels/fp4_matrix.py`). Of 32 inputs
    the first 16 are the low nibbles of 16 bytes, the other 16 their high nibbles. scale: for e4m3,
    float32 [E, N] or [E, N, ceil(K / 128)]; for MXFP4, bytes [E, N, K / 32]; for NVFP4, e4m3 [E, N,
    K / 16], with `whole` [E, N] as the factor of a row's scales; for integers, floats [E, N,
    groups]. zero: zero points of integers, shaped like scale; None: symmetric. bias: [E, N] in the
    model's dtype."""

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
        """True if numbers are four-bit floats. Their scales are e4m3 or integers (MXFP4's bytes, or
        int32 words of them)."""
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
        """Inputs that share a scale, for integers."""
        assert self.scale is not None
        return self.numbers.shape[2] * (2 if self.in_four_bits else 1) // self.scale.shape[2]

    @property
    def by_group(self) -> bool:
        """True if integers or e4m3 numbers have one scale per group of inputs, not per row."""
        if self.scale is None or self.in_fp4 or self.scale.dim() < 3:
            return False
        return self.in_eight_bits or self.scale.shape[2] > 1

    @property
    def scales(self) -> int:
        """A number that tells kernels how scales are stored: 0 no scales, 1 one per row, 2 one per
        group of inputs. For four-bit floats, in the layout of kernels/triton/experts/moe.py: 3 one
        for 16 inputs, 4 one for 32."""
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
class SharedOutput:
    """The output of a shared expert, which is added to that of the experts: scale * made, or with a
    gate scale * made * sigmoid(x . gate). made: function that returns [T, d], after waiting for the
    launches that compute it. gate: [1, d]."""

    made: Callable[[], Tensor]
    gate: Tensor | None
    scale: float


@dataclass(slots=True, frozen=True)
class Experts:
    """The experts of a layer: gate_up [E, 2F, d] (the gate's rows first), down [E, d, F], and the
    rules by which they are chosen. E: experts, F: inner size of an expert, d: hidden size. With g
    the gate's output and u up's, the input of down is act(g) * u.

    gate: the activation act. "none": there is no gate, gate_up is [E, F, d], and the input of down
    is max(u, 0) squared (Nemotron 3). clamp: (a, most): the input of down is g * sigmoid(a * g) *
    (u + 1), with g at most `most` and u from -most to most (gpt-oss); None: act(g) * u. correction:
    [E] float32, added to an expert's value when experts are chosen, but not to its weight.
    answer_scale: [E] float32, factor of an expert's final weight (Gemma 4)."""

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

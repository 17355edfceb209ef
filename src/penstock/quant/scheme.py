"""Scheme: how a matrix lies in a checkpoint, and the operation that multiplies by it. Each scheme is a class here.

    plain   [out, in] in a float dtype, rounded to the model's
    fp8     [out, in] e4m3 with a float scale a row or one for all (`weight_scale`), kept as they are

It knows names and numbers; a layer decides which of its matrices has which scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.quant.weight import Part, Weight

Multiply = Callable[[Tensor, Any, Tensor | None], Tensor]  # x [T, in], what prepare made, bias [out] -> [T, out]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix that is ready to be multiplied by: the operation, and the arrangement of numbers that it takes."""

    multiply: Multiply
    matrix: Any  # the operation's own: no layer looks into it


class Scheme(Protocol):
    """`parts` name matrices [out, in] without the `.weight` that a checkpoint adds."""

    def weights(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> dict[str, Weight]:
        """Returns what has to be loaded, by the scheme's own words for them."""

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        """Arranges what was loaded for its operation, and lets the loaded form go."""


class Plain:
    """Unquantized."""

    def weights(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> dict[str, Weight]:
        return {"weight": Weight([_named(part, "weight") for part in parts], dtype, device)}

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        return Product(ops.linear, ops.prepare_linear(weights["weight"].take()))


class Fp8:
    """Float8 e4m3 with float32 scales, as compressed-tensors stores it: a scale a row (`channel`), or one a tensor."""

    def __init__(self, scales: str = "channel") -> None:
        if scales not in ("channel", "tensor"):
            raise ValueError(f"fp8 has scales by channel or by tensor, not by {scales}")
        self.scales = scales

    def weights(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> dict[str, Weight]:
        numbers = [_named(part, "weight") for part in parts]
        e4m3 = Weight(numbers, torch.float8_e4m3fn, device, stored=frozenset({"F8_E4M3"}))
        return {"weight": e4m3, "scale": Weight([self._scale(part) for part in parts], torch.float32, device)}

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        matrix, scale = weights["weight"].take(), weights["scale"]
        rows = [part.local_shape[0] for part in weights["weight"].parts]
        each = scale.take().flatten()
        if self.scales == "tensor":
            each = torch.repeat_interleave(each, torch.tensor(rows, device=each.device))
        return Product(ops.linear_fp8, ops.prepare_linear_fp8(matrix, each))

    def _scale(self, part: Part) -> Part:
        """A row's scale goes with its row; one of a whole tensor is every rank's."""
        name = f"{part.name}.weight_scale"
        if self.scales == "tensor":
            return Part(name, (1,))
        rows = part.shape[0]
        return Part(name, (rows, 1), 0, part.shares, part.share) if part.cut == 0 else Part(name, (rows, 1))


def _named(part: Part, suffix: str) -> Part:
    return Part(f"{part.name}.{suffix}", part.shape, part.cut, part.shares, part.share)


PLAIN = Plain()

"""Float8 weights: e4m3 numbers and float32 scales, read as a checkpoint has them or made from wide ones at load.

    channel   a scale a row [out]: `weight_scale` [out, 1], as compressed-tensors stores it
    tensor    one scale: `weight_scale` [1]
    made      `weight` in a float dtype: the numbers are made while it is loaded, a scale a row

Made numbers are those that llm-compressor writes for the same weights, bit for bit: scale = the row's largest magnitude
/ 448 and number = weight / scale, both rounded to the checkpoint's own dtype before the number is rounded to e4m3
(compressed-tensors, `calculate_qparams` and `_quantize`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import E4M3, E4M3_MOST
from penstock.kernels.ops import Ops
from penstock.quant.scheme import Product, named
from penstock.quant.weight import Part, Weight


class Fp8:
    """Float8 on disk, with a scale a row (`channel`), or one a tensor."""

    def __init__(self, scales: str = "channel") -> None:
        if scales not in ("channel", "tensor"):
            raise ValueError(f"fp8 has scales by channel or by tensor, not by {scales}")
        self.scales = scales

    def weights(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> dict[str, Weight]:
        numbers = [named(part, "weight") for part in parts]
        e4m3 = Weight(numbers, E4M3, device, stored=frozenset({"F8_E4M3"}))
        scale = Weight([self._scale(part) for part in parts], torch.float32, device)
        return {"weight": e4m3, "scale": scale}

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        matrix, scale = weights["weight"].take(), weights["scale"]
        rows = [part.local_shape[0] for part in weights["weight"].parts]
        each = scale.take().flatten()
        if self.scales == "tensor":
            each = torch.repeat_interleave(each, torch.tensor(rows, device=each.device))
        return fp8_product(ops, matrix, each)

    def _scale(self, part: Part) -> Part:
        """A row's scale goes with its row; one of a whole tensor is every rank's."""
        name = f"{part.name}.weight_scale"
        if self.scales == "tensor":
            return Part(name, (1,))
        rows = part.shape[0]
        return Part(name, (rows, 1), 0, part.shares, part.share) if part.cut == 0 else Part(name, (rows, 1))


class Fp8FromFloats:
    """Wide numbers on disk, float8 in memory."""

    def weights(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> dict[str, Weight]:
        return {"weight": MadeFp8([named(part, "weight") for part in parts], device)}

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        made = weights["weight"]
        assert isinstance(made, MadeFp8)
        return fp8_product(ops, made.take(), made.scale)


class MadeFp8(Weight):
    """Numbers in e4m3 and `scale` [rows] float32, filled from wide ones."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        super().__init__(parts, E4M3, device)
        self.scale = torch.empty(self.shape[0], dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + 4 * self.shape[0]

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        """A row's scale is that of the whole row, also where ranks have a piece of it each."""
        numbers, scale = to_fp8(tensor.to(place.device))
        place.copy_(part.local(numbers))
        first = sum(p.local_shape[0] for p in self.parts[: self.parts.index(part)])
        own = part.local(scale) if part.cut == 0 else scale
        self.scale[first : first + own.shape[0]] = own[:, 0]


def to_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """matrix [out, in] in a float dtype -> its numbers [out, in] e4m3 and scales [out, 1] of that dtype."""
    scale = matrix.abs().amax(1, keepdim=True) / E4M3_MOST
    scale = scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps)
    return (matrix / scale).clamp_(-E4M3_MOST, E4M3_MOST).to(E4M3), scale


def fp8_product(ops: Ops, matrix: Tensor, scale: Tensor) -> Product:
    """Returns the product by a matrix [out, in] e4m3 with a scale a row [out] float32."""
    prepared = ops.prepare_linear_fp8(matrix, scale, ops.dtype)
    return Product(ops.linear_fp8, prepared, prepared.form, prepared.streamed)

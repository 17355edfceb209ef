"""Weights in float8: e4m3 numbers with float scales. They are read from a quantized checkpoint, or
made from a float dtype at load. Scales of a matrix in a checkpoint:

  channel   one scale per row: `weight_scale` [out, 1], as compressed-tensors stores it
  tensor    one scale: `weight_scale` (Hugging Face: `weight_scale_inv`) [1]
  block     one scale per block of 128 x 128, smaller at the edges: `weight_scale` (Hugging Face:
            `weight_scale_inv`) [out / 128, in / 128]
  none      `weight` in a float dtype, quantized at load with one scale per row

Float8 made at load is bit for bit that of llm-compressor: scale = the row's largest magnitude / 448
and number = weight / scale, both rounded to the checkpoint's own dtype before the number is rounded
to e4m3 (compressed-tensors, `calculate_qparams` and `_quantize`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.kernels.fp8_rows import E4M3, E4M3_MOST
from penstock.kernels.ops import Ops
from penstock.parallel.sharded_weight import FLOATS, Arranged, MadeWeight, Part, Weight
from penstock.quant.beside import no_zeros, read_past
from penstock.quant.read_compressed import BLOCK
from penstock.quant.scheme import Product, named

SCALES = (1e-6, 2e-6)  # range of random scales for dummy weights; e4m3 numbers reach 448
_ROWS_AT_ONCE = 16_384  # rows of a matrix that `fp8_copy` quantizes at once


class Fp8:
    """The scheme of float8 checkpoints with one scale per row (`channel`) or per matrix (`tensor`).
    suffix: of the scale tensor's name."""

    def __init__(self, scales: str = "channel", suffix: str = "weight_scale") -> None:
        if scales not in ("channel", "tensor"):
            raise ValueError(f"fp8 has scales by channel or by tensor, not by {scales}")
        self.scales, self.suffix = scales, suffix

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        numbers = [named(part, "weight") for part in parts]
        scales = [self._scale(part) for part in parts]
        scale = Weight(scales, torch.float32, device, counts=0, drawn=SCALES)
        zeros = [
            Part(part.name.replace(self.suffix, "weight_zero_point"), part.shape) for part in scales
        ]
        kept = {
            "weight": _numbers(numbers, device),
            "scale": scale,
            "zeros": no_zeros(zeros, device),
        }
        return kept | read_past(parts, device)

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        matrix, scale = weights["weight"].take(), weights["scale"]
        rows = [part.local_shape[0] for part in weights["weight"].parts]
        each = scale.take().flatten()
        if self.scales == "tensor":
            each = torch.repeat_interleave(each, torch.tensor(rows, device=each.device))
        return matrix, each

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        return fp8_product(ops, *self.arrays(weights))

    def _scale(self, part: Part) -> Part:
        """Returns the Part of a matrix's scales. One scale per row is split among ranks like the
        rows; one scale per matrix is held by every rank."""
        name = f"{part.name}.{self.suffix}"
        if self.scales == "tensor":
            return Part(name, (1,))
        rows = part.shape[0]
        return part.over(name, (rows, 1)) if part.cut == 0 else Part(name, (rows, 1))


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """The scheme of float8 checkpoints with one scale for each block of 128 x 128 numbers.

    In memory each row has a scale for every 128 inputs. So matrices can be fused, and split by rows
    among tensor parallel ranks, even if 128 doesn't divide the number of rows. A split by inputs
    must go between blocks."""

    suffix: str = "weight_scale"

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        on_disk, arrays = [], []
        for part in parts:
            _check_cut(part)
            rows, groups = (-(-size // BLOCK) for size in part.shape)
            on_disk.append(Part(f"{part.name}.{self.suffix}", (rows, groups)))
            shape = (part.shape[0], groups)
            arrays.append(
                Part(part.name, shape)
                if groups == 1 and part.cut == 1
                else part.over(part.name, shape)
            )
        scale = Arranged(
            on_disk,
            arrays,
            torch.float32,
            device,
            stored=FLOATS,
            arrange=_rows_of_blocks,
            drawn=SCALES,
        )
        numbers = _numbers([named(part, "weight") for part in parts], device)
        return {"weight": numbers, "scale": scale} | read_past(parts, device)

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        return weights["weight"].take(), weights["scale"].take()

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        prepared = ops.prepare_linear_fp8_groups(*self.arrays(weights), ops.dtype)
        return Product(ops.linear_fp8_groups, prepared, prepared.form, prepared.streamed)


def _rows_of_blocks(scale: Tensor, array: Part) -> Tensor:
    """Expands block scales [out / 128, in / 128] to one scale for each row and 128 inputs, [out, in
    / 128]. array: the Part of the result."""
    return scale.float().repeat_interleave(BLOCK, 0)[: array.shape[0]]


def _check_cut(part: Part) -> None:
    if part.cut == 1 and part.shares > 1 and part.shape[1] % (BLOCK * part.shares):
        raise UsageError(
            f"{part.name} has {part.shape[1]} inputs in blocks of {BLOCK}, and {part.shares} ranks"
            " would cut through one: take fewer, or the model's unquantized checkpoint"
        )


def _numbers(parts: Sequence[Part], device: torch.device) -> Weight:
    return Weight(parts, E4M3, device, stored=frozenset({"F8_E4M3"}), drawn=(-E4M3_MOST, E4M3_MOST))


class Fp8FromFloats:
    """The scheme that reads matrices in a float dtype and quantizes them to float8 at load."""

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        return {"weight": MadeFp8([named(part, "weight") for part in parts], device)}

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        made = weights["weight"]
        assert isinstance(made, MadeFp8)
        return made.take(), made.scale

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        return fp8_product(ops, *self.arrays(weights))


class MadeFp8(MadeWeight):
    """A matrix of e4m3 numbers with `scale` [rows] float32, quantized at load from a matrix in a
    float dtype."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        super().__init__(parts, E4M3, device)
        self.scale = torch.empty(self.shape[0], dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + 4 * self.shape[0]

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        """Quantizes whole rows and stores this rank's share of the result, so that scales don't
        depend on the tensor parallel split."""
        numbers, scale = to_fp8(tensor.to(place.device))
        place.copy_(part.local(numbers))
        first = sum(p.local_shape[0] for p in self.parts[: self.parts.index(part)])
        own = part.local(scale) if part.cut == 0 else scale
        self.scale[first : first + own.shape[0]] = own[:, 0]


def to_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes matrix [out, in], of a float dtype, with one scale per row. Returns e4m3 numbers
    [out, in] and scales [out, 1] of the matrix's dtype."""
    scale = matrix.abs().amax(1, keepdim=True) / E4M3_MOST
    scale = scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps)
    return (matrix / scale).clamp_(-E4M3_MOST, E4M3_MOST).to(E4M3), scale


def multiplies_fp8(ops: Ops) -> bool:
    """Returns True if products with float8 weights read them as they are, faster than wide ones."""
    return ops.why["linear_fp8"][0] != "reference"


def fp8_copy(ops: Ops, matrix: Tensor) -> Product:
    """Returns the product with a float8 copy of a matrix [out, in] of a float dtype."""
    numbers = torch.empty(matrix.shape, dtype=E4M3, device=matrix.device)
    scale = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    # some rows at a time: what is computed on the way takes several times their memory
    for first in range(0, matrix.shape[0], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        numbers[rows], each = to_fp8(matrix[rows])
        scale[rows] = each[:, 0]
    return fp8_product(ops, numbers, scale)


def fp8_product(ops: Ops, matrix: Tensor, scale: Tensor) -> Product:
    """Returns the product with a float8 matrix. matrix: [out, in] e4m3. scale: one per row, [out]
    float32."""
    prepared = ops.prepare_linear_fp8(matrix, scale, ops.dtype)
    return Product(ops.linear_fp8, prepared, prepared.form, prepared.streamed)

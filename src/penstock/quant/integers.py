"""Weights in integers of four and eight bits: the schemes that read them from a quantized
checkpoint, or make them from a float dtype at load. In memory all have the layout of
kernels/int_matrix.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.kernels.int_matrix import ZERO_OF_FOUR, pack_four
from penstock.kernels.ops import Ops
from penstock.parallel.sharded_weight import MadeWeight, Part, Weight
from penstock.quant.int_forms import FORMS, at, check_form, cut_groups, packed_shape
from penstock.quant.rounding import nearest, usual_scale
from penstock.quant.scheme import Product, plain_product
from penstock.quant.stored_quantization import StoredForm

# inputs of an int4 scale group: the first size that divides the matrix's inputs
MADE_GROUPS = (128, 64, 32)
# Matrices with fewer inputs get groups of 32, since small models lose more by int4 (LOG.md,
# 2026-11-27).
SHORT = 768


@dataclass(frozen=True, slots=True)
class IntStored:
    """The scheme of integer checkpoints, in a packing of quant/int_forms.py."""

    form: StoredForm

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        for part in parts:
            check_form(part, self.form)
        return FORMS[self.form.packing](self.form, parts, dtype, device)

    def made_of(self, ops: Ops, matrix: Tensor) -> Product:
        """Returns the product with a tied output head: the embedding's matrix, for which quantized
        checkpoints store no quantized copy. It is quantized to int8 if the checkpoint has 8 bits,
        and not quantized if it has 4."""
        return (
            IntFromFloats(8).made_of(ops, matrix)
            if self.form.bits == 8
            else plain_product(ops, matrix)
        )

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor, ...]:
        return tuple(
            weights[name].take() for name in ("weight", "scale", "zero") if name in weights
        )

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        return int_product(ops, *self.arrays(weights))


@dataclass(frozen=True, slots=True)
class IntFromFloats:
    """The scheme that reads matrices in a float dtype and quantizes them to integers at load: 8
    bits with one scale per row, or 4 bits with one scale per group of inputs."""

    bits: int

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        return {"weight": MadeInt(parts, self.bits, dtype, device)}

    def made_of(self, ops: Ops, matrix: Tensor) -> Product:
        group = (
            matrix.shape[1] if self.bits == 8 else made_group(Part("lm_head", tuple(matrix.shape)))
        )
        numbers, scale = to_int(matrix, self.bits, group, ops.dtype)
        packed = (
            numbers if self.bits == 8 else pack_four(numbers.add_(ZERO_OF_FOUR).view(torch.uint8))
        )
        return int_product(ops, packed, scale)

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor, ...]:
        made = weights["weight"]
        assert isinstance(made, MadeInt)
        return made.take(), made.scale

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        return int_product(ops, *self.arrays(weights))


class MadeInt(MadeWeight):
    """A matrix of integers with `scale` [rows, groups] of the model's dtype, quantized at load from
    a matrix in a float dtype."""

    def __init__(
        self, parts: Sequence[Part], bits: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.bits, into = bits, parts[0].shape[1]
        self.group = into if bits == 8 else made_group(parts[0])
        stored = [at(part, "weight", part.shape) for part in parts]
        self._wide = dict(zip(stored, parts, strict=True))
        packed = [p.over(p.name, packed_shape(p.shape, bits)) for p in parts]
        super().__init__(packed, torch.int8 if bits == 8 else torch.uint8, device, counts=8 // bits)
        self.parts = tuple(stored)
        starts = [sum(self._rows[:number]) for number in range(len(stored))]
        self._starts = dict(zip(stored, starts, strict=True))
        groups = cut_groups(parts[0], self.group, "--quantization int8")
        self.scale = torch.empty((self.shape[0], groups), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.scale.nbytes

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        """Quantizes whole rows and stores this rank's share of the result, so that scales don't
        depend on the tensor parallel split."""
        wide = self._wide[part]
        numbers, scale = to_int(tensor.to(place.device), self.bits, self.group, self.scale.dtype)
        packed = (
            numbers if self.bits == 8 else pack_four(numbers.add_(ZERO_OF_FOUR).view(torch.uint8))
        )
        place.copy_(_share(wide, packed))
        own = scale if wide.cut == 1 and scale.shape[1] == 1 else _share(wide, scale)
        self.scale.narrow(0, self._starts[part], own.shape[0]).copy_(own)


def to_int(matrix: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes matrix [out, in], of a float dtype, symmetrically with rounding to nearest. group:
    inputs that share a scale. Returns integers [out, in] int8 in the range of `bits` bits, and
    scales [out, in / group] of `dtype`.

    If `dtype` is the checkpoint's, the integers are those of llm-compressor (compressed-tensors,
    `calculate_qparams` and `_quantize`): scale = the group's largest magnitude * 2 / (2**bits - 1).
    """
    groups = matrix.view(matrix.shape[0], -1, group)
    scale = usual_scale(groups, bits, dtype)
    return nearest(groups, scale, bits).to(torch.int8).flatten(1), scale


def int_product(ops: Ops, numbers: Tensor, scale: Tensor, zero: Tensor | None = None) -> Product:
    """Returns the product with an integer matrix. numbers, scale, zero (None: symmetric): in the
    layout of kernels/int_matrix.py."""
    prepared = ops.prepare_linear_int(numbers, scale, zero, ops.dtype)
    return Product(ops.linear_int, prepared, prepared.form, prepared.streamed)


def made_group(part: Part) -> int:
    """Returns the inputs of an int4 scale group for a matrix that is quantized at load."""
    into = part.shape[1]
    group = next((group for group in MADE_GROUPS[2 * (into < SHORT) :] if into % group == 0), None)
    if group is None:
        raise UsageError(
            f"{part.name} has {into} inputs, which groups of 32 don't divide: four bits cannot be"
            " made of it, take --quantization int8",
            param="quantization",
        )
    return group


def _share(part: Part, array: Tensor) -> Tensor:
    """Returns this rank's share of an array [out, columns], split like the matrix `part`."""
    return part.over(part.name, tuple(array.shape)).local(array)

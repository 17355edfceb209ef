"""Weights in four-bit floats: NVFP4 and MXFP4. They are read from a quantized checkpoint, or made
from a float dtype at load. In memory all have the layout of kernels/fp4_matrix.py. Tensors in a
checkpoint:

  compressed-tensors   `weight_packed` uint8 [out, in / 2]: two neighbours a byte, the first in the
                       low nibble. NVFP4: `weight_scale` e4m3 [out, in / 16], which is divided by
                       `weight_global_scale` [1]. MXFP4: `weight_scale` uint8 [out, in / 32]
  ModelOpt (NVFP4)     `weight` like weight_packed, `weight_scale` e4m3 [out, in / 16], which is
                       multiplied by `weight_scale_2` []
  unquantized          `weight` in a float dtype; NVFP4 is made while it is loaded

NVFP4 made at load is bit for bit that of compressed-tensors (`generate_gparam`,
`calculate_qparams`, `cast_to_fp4`). The global scale is 448 * 6 / the matrix's largest magnitude. A
group's scale is its largest magnitude / 6 times the global scale, in e4m3. A number is rounded to
the nearest E2M1 value; ties go to the one whose last bit is 0. For a bfloat16 checkpoint, the
global scale and a group's largest magnitude / 6 are rounded to bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import CheckpointError, UsageError
from penstock.kernels.fp4_groups import MX_GROUP, NV_GROUP
from penstock.kernels.fp4_matrix import E2M1_MOST, NO_NUMBER
from penstock.kernels.fp8_rows import E4M3, E4M3_MOST
from penstock.kernels.int_matrix import SPAN, pack_four
from penstock.kernels.ops import Ops
from penstock.parallel.sharded_weight import FLOATS, Arranged, MadeWeight, Part, Weight
from penstock.quant.beside import read_past
from penstock.quant.int_forms import array, at, cut_groups, packed_shape, unpack_words
from penstock.quant.scheme import Product
from penstock.quant.stored_quantization import StoredForm

BYTES = frozenset({"U8"})
# range of random scale bytes for dummy weights. A byte b means 2 ** (b - 127), and e2m1 numbers
# reach 6.
DUMMY_POWERS = (118, 122)
DUMMY_WHOLE = 1e-6  # size of a dummy weight's global scale; group scales reach 448
LEAST_SCALE = 0.125  # scale of an all-zero group, from compressed-tensors
# Midpoints between E2M1's magnitudes. A number above one is rounded up. A number that equals one is
# rounded to the even neighbour, so every second bound is lowered to the largest float32 below the
# midpoint.
_HALFWAY = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
_BOUNDS = torch.where(torch.arange(7) % 2 == 1, _HALFWAY.nextafter(torch.zeros(())), _HALFWAY)


@dataclass(frozen=True, slots=True)
class Fp4Stored:
    """The scheme of NVFP4 or MXFP4 checkpoints, packed by compressed-tensors or ModelOpt (see the
    module's docstring)."""

    form: StoredForm

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        for part in parts:
            _check_spans(part)
        of_modelopt = self.form.packing == "modelopt"
        numbers = [
            at(p, "weight" if of_modelopt else "weight_packed", packed_shape(p.shape, 4))
            for p in parts
        ]
        kept: dict[str, Weight] = {
            "weight": Arranged(
                numbers,
                [array(p, packed_shape(p.shape, 4)) for p in parts],
                torch.uint8,
                device,
                stored=BYTES,
                counts=2,
                arrange=lambda octets, _: pack_four(unpack_words(octets, 4)),
            ),
        }
        if self.form.kind == "mxfp4":
            kept["scale"] = PowerScales(
                [_groups(p, "weight_scale", MX_GROUP) for p in parts], device
            )
        else:
            kept["scale"] = E4m3Scales(
                [_groups(p, "weight_scale", NV_GROUP) for p in parts], device
            )
            kept["whole"] = WholeScale(
                parts, "weight_scale_2" if of_modelopt else "weight_global_scale", device
            )
        return kept | read_past(parts, device)

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor | None, ...]:
        whole = weights["whole"].take() if "whole" in weights else None
        return weights["weight"].take(), weights["scale"].take(), None, whole

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        return fp4_product(ops, self.arrays(weights))


class PowerScales(Weight):
    """MXFP4's group scales, uint8 [out, in / 32]. A byte b means 2 ** (b - 127); 255 means NaN and
    is refused."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        super().__init__(parts, torch.uint8, device, stored=BYTES, counts=0)

    def are_finite(self, numbers: Tensor) -> Tensor:
        return (numbers != NO_NUMBER).all()

    def draw(self, generator: torch.Generator, wide: torch.dtype) -> None:
        for part, place in self.places():
            whole = torch.empty(part.shape, dtype=torch.uint8, device=place.device)
            self.fill(part, place, whole.random_(*DUMMY_POWERS, generator=generator))


class E4m3Scales(Weight):
    """NVFP4's group scales, e4m3 [out, in / 16]."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        stored = frozenset({"F8_E4M3"})
        super().__init__(parts, E4M3, device, stored=stored, counts=0, drawn=(0.0, E4M3_MOST))

    def are_finite(self, numbers: Tensor) -> Tensor:
        return numbers.float().isfinite().all()


class WholeScale(Arranged):
    """NVFP4's global scale of a matrix, repeated for each row: [out] float64. It multiplies the
    group scales of the row, so a global scale by which they are divided is stored as its
    reciprocal. suffix: name of the checkpoint tensor."""

    def __init__(self, matrices: Sequence[Part], suffix: str, device: torch.device) -> None:
        divides = suffix == "weight_global_scale"
        drawn = (1 / DUMMY_WHOLE, 2 / DUMMY_WHOLE) if divides else (DUMMY_WHOLE / 2, DUMMY_WHOLE)

        def of_each_row(number: Tensor, rows: Part) -> Tensor:
            wide = number.double().reciprocal() if divides else number.double()
            return wide.view(1).expand(rows.shape)

        super().__init__(
            [at(p, suffix, (1,)) for p in matrices],
            [_rows(p) for p in matrices],
            torch.float64,
            device,
            stored=FLOATS,
            arrange=of_each_row,
            drawn=drawn,
        )

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        number = float(tensor)
        if not 0 < number < float("inf"):
            raise CheckpointError(
                f"tensor {part.name!r} is {number:g}, and must be a positive number, the scale of a"
                " whole matrix: download the checkpoint again, or take another"
            )
        super().fill(part, place, tensor)


@dataclass(frozen=True, slots=True)
class Fp4FromFloats:
    """The scheme that reads matrices in a float dtype and quantizes them to NVFP4 at load."""

    def weights(
        self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Weight]:
        return {"weight": MadeFp4(parts, device)}

    def arrays(self, weights: dict[str, Weight]) -> tuple[Tensor | None, ...]:
        made = weights["weight"]
        assert isinstance(made, MadeFp4)
        return made.take(), made.scale, None, made.whole

    def prepare(self, ops: Ops, weights: dict[str, Weight]) -> Product:
        return fp4_product(ops, self.arrays(weights))


class MadeFp4(MadeWeight):
    """An NVFP4 matrix that is made at load from a matrix in a float dtype. Arrays: packed numbers
    [rows, in / 2], `scale` [rows, groups] e4m3, and `whole` [rows] float64, the factor of a row's
    scales."""

    whole: Tensor

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        for part in parts:
            check_made(part)
        stored = [at(part, "weight", part.shape) for part in parts]
        self._wide = dict(zip(stored, parts, strict=True))
        super().__init__(
            [array(p, packed_shape(p.shape, 4)) for p in parts], torch.uint8, device, counts=2
        )
        self.parts = tuple(stored)
        starts = [sum(self._rows[:number]) for number in range(len(stored))]
        self._starts = dict(zip(stored, starts, strict=True))
        self.scale = torch.empty(
            (self.shape[0], self.shape[1] * 2 // NV_GROUP), dtype=E4M3, device=device
        )
        self.whole = torch.empty(self.shape[0], dtype=torch.float64, device=device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.scale.nbytes + self.whole.nbytes

    def _arrays(self) -> Iterator[Tensor]:
        yield from (self.value, self.scale, self.whole)

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        """Quantizes the whole matrix and stores this rank's share, so that scales don't depend on
        the number of tensor parallel ranks."""
        wide = self._wide[part]
        numbers, scale, divisor = to_nvfp4(tensor.to(place.device))
        place.copy_(array(wide, packed_shape(wide.shape, 4)).local(pack_four(numbers)))
        own = array(wide, tuple(scale.shape)).local(scale)
        rows = slice(self._starts[part], self._starts[part] + own.shape[0])
        self.scale[rows].copy_(own)
        self.whole[rows] = divisor.double().reciprocal()


def to_nvfp4(matrix: Tensor, most: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes matrix [out, in], of a float dtype, to NVFP4. Returns e2m1 numbers as uint8 [out,
    in], 0 to 15 and not packed; group scales [out, in / 16] e4m3; and the global scale float32 [1].
    Readers divide group scales by it.

    most: the largest magnitude, which determines the global scale; None: that of the matrix."""
    # a float16 can't represent the global scale
    wide = matrix.float() if matrix.dtype == torch.float16 else matrix
    groups = wide.view(wide.shape[0], -1, NV_GROUP)
    largest = groups.abs().amax(2)
    divisor = whole_divisor(largest.max() if most is None else most.to(wide))
    scale = (divisor * (largest / E2M1_MOST)).clamp_(max=E4M3_MOST).to(E4M3).float()
    scale.masked_fill_(scale == 0, LEAST_SCALE)
    scaled = groups / (scale / divisor)[..., None]
    magnitudes = torch.bucketize(scaled.abs(), _BOUNDS.to(scaled.device), out_int32=True)
    return (
        (magnitudes | (scaled < 0).int() << 3).to(torch.uint8).flatten(1),
        scale.to(E4M3),
        divisor,
    )


def whole_divisor(most: Tensor) -> Tensor:
    """Returns NVFP4's global scale float32 [1], by which readers divide a matrix's group scales; 1
    for a matrix of zeros. most: the matrix's largest magnitude."""
    divisor = E4M3_MOST * E2M1_MOST / most.clamp(min=torch.finfo(most.dtype).tiny)
    return divisor.nan_to_num(1.0, 1.0, 1.0).float().reshape(1)


def fp4_product(ops: Ops, arrays: tuple[Tensor | None, ...]) -> Product:
    """Returns the product with a matrix of four-bit floats. arrays: numbers, scales, None and
    `whole` in the layout of kernels/fp4_matrix.py, as `ForExperts.arrays` returns them."""
    numbers, scale, _, whole = arrays
    assert numbers is not None and scale is not None
    prepared = ops.prepare_linear_fp4(numbers, scale, whole, ops.dtype)
    return Product(ops.linear_fp4, prepared, prepared.form, prepared.streamed)


def in_fp4(weights: Iterable[Weight]) -> bool:
    """Returns True if any of a model's weights is in NVFP4 or MXFP4."""
    return any(isinstance(weight, MadeFp4 | PowerScales | E4m3Scales) for weight in weights)


def check_made(part: Part) -> None:
    """Raises UsageError if a matrix can't be quantized to NVFP4 because of its shape or its tensor
    parallel split."""
    if part.shape[1] % SPAN:
        raise UsageError(
            f"{part.name} has {part.shape[1]} inputs, which {SPAN} doesn't divide: NVFP4 cannot be"
            " made of it, take --quantization int8",
            param="quantization",
        )
    cut_groups(part, SPAN, "--quantization int8")


def _check_spans(part: Part) -> None:
    """Raises an error unless a rank's inputs are a multiple of 32, the numbers that are packed
    together."""
    if part.shape[1] % SPAN:
        raise CheckpointError(
            f"{part.name} has {part.shape[1]} inputs, and four-bit floats are read where {SPAN}"
            " divides them: take another quantization of this model"
        )
    cut_groups(part, SPAN)


def _groups(part: Part, suffix: str, group: int) -> Part:
    """Returns the Part of a matrix's group scales [out, in / group], split among ranks like the
    matrix. group: inputs of a group."""
    return part.over(f"{part.name}.{suffix}", (part.shape[0], part.shape[1] // group))


def _rows(part: Part) -> Part:
    """Returns the Part of an array with one number per row of a matrix, [out]. It is split like the
    matrix's rows. If ranks split the matrix by inputs, every rank holds the whole array."""
    shape = part.shape[:1]
    return part.over(part.name, shape) if part.cut == 0 else Part(part.name, shape)

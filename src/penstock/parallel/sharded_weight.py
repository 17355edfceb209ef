"""Weight: a model's array that names its checkpoint tensors. Loading, cutting for ranks and
counting parameters are loops over such weights.

Knows names, shapes and numbers; no files, no layers, no kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.parallel.layout import stretch

FLOATS = frozenset({"F64", "F32", "BF16", "F16"})  # safetensors' names of floating-point dtypes
DUMMY_RANGE = 1e-3


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint, and the share of it that this rank holds.

    name, shape: in the checkpoint. cut: the dimension that is divided into `shares`; None: every
    rank holds the whole tensor. share: index of this rank's share. unit: each share begins
    at a multiple of it; shares may differ by one unit. fused: if this tensor stacks several
    matrices and is split, one Part for each matrix, since each is split on its own."""

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    shares: int = 1
    share: int = 0
    unit: int = 1
    fused: tuple[Part, ...] = ()

    @classmethod
    def of_fused(cls, name: str, parts: Sequence[Part]) -> Part:
        """Returns the Part of one checkpoint tensor [sum of out, in] in which these matrices [out,
        in] are stacked. Each matrix is split over ranks by rows."""
        rows, shares = sum(part.shape[0] for part in parts), max(part.shares for part in parts)
        return cls(
            name, (rows, *parts[0].shape[1:]), 0, shares, fused=tuple(parts) if shares > 1 else ()
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.fused:
            return (sum(part.local_shape[0] for part in self.fused), *self.shape[1:])
        return tuple(self.bounds[1] if d == self.cut else n for d, n in enumerate(self.shape))

    @property
    def bounds(self) -> tuple[int, int]:
        """Returns (first, length) of this rank's share along `cut`."""
        assert self.cut is not None, "every rank holds it whole"
        return stretch(self.shape[self.cut], self.unit, self.shares, self.share)

    def local(self, tensor: Tensor) -> Tensor:
        """Returns this rank's share of the checkpoint's tensor, a view."""
        if self.cut is None or self.shares == 1:
            return tensor
        if self.fused:
            pieces = torch.split(tensor, [part.shape[0] for part in self.fused])
            return torch.cat(
                [part.local(piece) for part, piece in zip(self.fused, pieces, strict=True)]
            )
        return tensor.narrow(self.cut, *self.bounds)

    def over(self, name: str, shape: tuple[int, ...]) -> Part:
        """Returns the Part of another tensor, split over ranks in the same way as this one. name,
        shape: of that tensor in the checkpoint."""
        fused = tuple(part.over(name, (part.shape[0], *shape[1:])) for part in self.fused)
        return Part(name, shape, self.cut, self.shares, self.share, self.unit, fused)


class Weight:
    """An array that checkpoint tensors fill one after the other along its first dimension.

    parts: the checkpoint tensors, in order. stored: dtypes they may have on disk. transform:
    float32 -> float32, applied to each tensor before rounding (Gemma's norms are stored as w and
    used as 1 + w). again: other names under which a checkpoint may store the same numbers a second
    time (a tied head). counts: model parameters per element (0 for a scale, 2 for a byte of two
    packed numbers). drawn: (lowest, highest) dummy number. optional: True if a checkpoint may lack
    the weight. fills_by_share: True if a rank needs to read only its share of the tensor to fill
    the array."""

    optional = False
    fills_by_share = True
    in_host = False  # True: the array lies in host memory, beside a GPU

    def __init__(
        self,
        parts: Sequence[Part],
        dtype: torch.dtype,
        device: torch.device,
        *,
        shape: tuple[int, ...] | None = None,
        stored: frozenset[str] = FLOATS,
        transform: Callable[[Tensor], Tensor] | None = None,
        again: tuple[str, ...] = (),
        counts: int = 1,
        drawn: tuple[float, float] = (-DUMMY_RANGE, DUMMY_RANGE),
    ) -> None:
        self.parts, self.stored, self.transform, self.again = tuple(parts), stored, transform, again
        self._counts, self._drawn = counts, drawn
        shapes = [part.local_shape for part in self.parts]
        self._rows = [shape[0] if shape else 1 for shape in shapes]
        self._flat_shape = (sum(self._rows), *shapes[0][1:])
        self.shape = shape or self._flat_shape  # shape that the layer's code sees
        self.dtype = dtype
        self._value: Tensor | None = torch.empty(self.shape, dtype=dtype, device=device)

    @property
    def value(self) -> Tensor:
        """The numbers, `shape` of `dtype`. Raises AssertionError after `take`."""
        assert self._value is not None, f"{self.parts[0].name} has been given away"
        return self._value

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def numbers(self) -> int:
        """Number of model parameters in this weight."""
        return self._counts * math.prod(self.shape)

    @property
    def is_small(self) -> bool:
        """True for scales, norms and biases."""
        return self._counts == 0 or len(self.shape) == 1

    def are_finite(self, numbers: Tensor) -> Tensor:
        """Returns a bool tensor on the device: True if all of `numbers`, a part of this weight, are
        finite."""
        return numbers.isfinite().all()

    def take(self) -> Tensor:
        """Returns the numbers and drops them here: a kernel keeps its own arrangement instead."""
        value, self._value = self.value, None
        return value

    def reorder(self, rows: Tensor) -> None:
        """Permutes the rows of this weight, if it has len(rows) rows:
        new row n is old row rows[n]."""
        for array in self._arrays():
            if array.shape[:1] == rows.shape:
                numbers = array.view(torch.uint8) if array.dtype == torch.float8_e4m3fn else array
                numbers.copy_(numbers.index_select(0, rows))

    def _arrays(self) -> Iterator[Tensor]:
        yield self.value

    def places(self) -> Iterator[tuple[Part, Tensor]]:
        """Yields each checkpoint tensor's Part with the view of this array that it fills."""
        flat, first = self.value.view(self._flat_shape), 0
        for part, rows in zip(self.parts, self._rows, strict=True):
            yield part, flat[first : first + rows]
            first += rows

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        """Writes a checkpoint tensor, or this rank's share of it, into `place`,
        transformed and rounded."""
        local = tensor if tuple(tensor.shape) == part.local_shape else part.local(tensor)
        place.copy_(
            (local if self.transform is None else self.transform(local.float())).view(place.shape)
        )

    def draw(self, generator: torch.Generator, wide: torch.dtype) -> None:
        """Fills the weight with dummy numbers, which depend on the generator's state alone: a rank
        draws the whole weight and takes its share.

        wide: the model's dtype; numbers of a dtype that no generator can draw are drawn in it."""
        dtype = self.dtype if self.dtype in (torch.float32, torch.bfloat16, torch.float16) else wide
        if dtype == self.dtype and all(part.shares == 1 for part in self.parts):
            self.value.uniform_(*self._drawn, generator=generator)
            return
        rows = sum(part.shape[0] for part in self.parts)
        device = self.value.device
        whole = torch.empty((rows, *self.parts[0].shape[1:]), dtype=dtype, device=device)
        whole.uniform_(*self._drawn, generator=generator)
        first = 0
        for part, place in self.places():
            place.copy_(part.local(whole.narrow(0, first, part.shape[0])))
            first += part.shape[0]


class MadeWeight(Weight):
    """A weight that is quantized at load, from a checkpoint tensor in a float dtype. Dummy numbers
    are drawn in that dtype and quantized too."""

    fills_by_share = False  # a scale depends on the whole row, so every rank reads whole tensors
    scale: Tensor

    def _arrays(self) -> Iterator[Tensor]:
        yield from (self.value, self.scale)

    def draw(self, generator: torch.Generator, wide: torch.dtype) -> None:
        for part, place in self.places():
            drawn = torch.empty(part.shape, dtype=wide, device=place.device)
            self.fill(part, place, drawn.uniform_(*self._drawn, generator=generator))


class Arranged(Weight):
    """An array [out, ...] whose checkpoint tensors have another arrangement: transposed, packed or
    in blocks.

    stored_parts: the whole checkpoint tensors. parts: this rank's shares of the arrays that
    `arrange` makes of each tensor. A tensor is first arranged whole and then split over ranks."""

    fills_by_share = False

    def __init__(
        self,
        stored_parts: Sequence[Part],
        parts: Sequence[Part],
        dtype: torch.dtype,
        device: torch.device,
        *,
        stored: frozenset[str],
        arrange: Callable[[Tensor, Part], Tensor],
        counts: int = 0,
        drawn: tuple[float, float] = (-DUMMY_RANGE, DUMMY_RANGE),
    ) -> None:
        super().__init__(parts, dtype, device, stored=stored, counts=counts, drawn=drawn)
        self.arrays = dict(zip(stored_parts, self.parts, strict=True))
        self.parts, self._arrange = tuple(stored_parts), arrange

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        array = self.arrays[part]
        place.copy_(array.local(self._arrange(tensor.to(place.device), array)))

    def draw(self, generator: torch.Generator, wide: torch.dtype) -> None:
        """Draws random bytes in the checkpoint's packed arrangement, in which every bit pattern is
        valid, and arranges them like a loaded tensor."""
        device = self.value.device
        for part, place in self.places():
            if "I32" in self.stored:
                word = torch.iinfo(torch.int32)
                drawn = torch.empty(part.shape, dtype=torch.int32, device=device)
                drawn.random_(word.min, word.max, generator=generator)
            elif "U8" in self.stored:
                drawn = torch.empty(part.shape, dtype=torch.uint8, device=device).random_(
                    0, 256, generator=generator
                )
            else:
                drawn = torch.empty(part.shape, dtype=torch.float32, device=device)
                drawn.uniform_(*self._drawn, generator=generator)
            self.fill(part, place, drawn)


class Expected(Weight):
    """A checkpoint tensor that is only checked, not kept: it must have the values that the engine
    assumes.

    right: function that returns True if a tensor has these values; None: any values are accepted.
    wrong: end of the error message if it returns False."""

    fills_by_share = False

    def __init__(
        self,
        parts: Sequence[Part],
        device: torch.device,
        *,
        stored: frozenset[str] | None = None,
        right: Callable[[Tensor, Part], bool] | None = None,
        wrong: str = "",
        optional: bool = False,
    ) -> None:
        empty = [Part(part.name, (0,)) for part in parts]
        super().__init__(empty, torch.uint8, device, stored=stored or frozenset(), counts=0)
        self.parts, self._right, self._wrong = tuple(parts), right, wrong
        self.optional, self.unread = optional, right is None

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        if self._right is not None and not self._right(tensor, part):
            raise CheckpointError(f"tensor {part.name!r} {self._wrong}")

    def draw(self, generator: torch.Generator, wide: torch.dtype) -> None:
        """Does nothing, since this weight keeps no numbers."""

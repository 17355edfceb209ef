"""Weight: an array of a model that describes itself, so that loading, cutting and counting are
loops over weights.

It knows names, shapes and numbers; no files, no layers, no kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.parallel.layout import stretch

FLOATS = frozenset({"F64", "F32", "BF16", "F16"})  # safetensors' names
DUMMY_RANGE = 1e-3


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint, and the share of it that this rank holds.

    name, shape: the checkpoint's.   cut: the dimension that is divided into `shares`, None: every
    rank holds it whole. unit: what no cut goes through, of that dimension; shares may differ by
    one. fused: the matrices that stand one after the other in this tensor, each cut in its own way;
    of several ranks.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    shares: int = 1
    share: int = 0
    unit: int = 1
    fused: tuple[Part, ...] = ()

    @classmethod
    def of_fused(cls, name: str, parts: Sequence[Part]) -> Part:
        """Returns the tensor that holds these matrices `[out, in]`, cut by rows, one after the
        other."""
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
        """Returns the share of another array that is cut as this one is."""
        fused = tuple(part.over(name, (part.shape[0], *shape[1:])) for part in self.fused)
        return Part(name, shape, self.cut, self.shares, self.share, self.unit, fused)


class Weight:
    """An array that a checkpoint's tensors fill one after the other along its first dimension.

    parts: those tensors, in order.   stored: the dtypes that they may have on disk.   transform:
    float32 -> float32, done to each before it is rounded (Gemma's norms are stored as w and used as
    1 + w).   again: names under which a checkpoint may hold the same numbers a second time (a tied
    head).   counts: how many of the model's numbers an element stands for (a scale for none, a
    packed byte for two).   drawn: between what dummy numbers are drawn. optional: a checkpoint may
    lack it.   fills_by_share: what a rank holds comes of its share of a tensor alone.
    """

    optional = False
    fills_by_share = True
    in_host = False  # whether it lies in the host's memory, beside a GPU

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
        self.shape = shape or self._flat_shape  # as the layer sees it
        self.dtype = dtype
        self._value: Tensor | None = torch.empty(self.shape, dtype=dtype, device=device)

    @property
    def value(self) -> Tensor:
        """The numbers, `shape` of `dtype`.
        Gone once a layer has made its own arrangement of them."""
        assert self._value is not None, f"{self.parts[0].name} has been given away"
        return self._value

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def numbers(self) -> int:
        """Numbers of the model that it holds."""
        return self._counts * math.prod(self.shape)

    @property
    def is_small(self) -> bool:
        """Whether it is one number for many of the model's: a scale, a norm, a bias."""
        return self._counts == 0 or len(self.shape) == 1

    def are_finite(self, numbers: Tensor) -> Tensor:
        """Returns whether all of these, of its own, are finite: a bool on their device."""
        return numbers.isfinite().all()

    def take(self) -> Tensor:
        """Returns the numbers and lets go of them: a kernel's arrangement takes their place."""
        value, self._value = self.value, None
        return value

    def reorder(self, rows: Tensor) -> None:
        """Row n becomes what was row rows[n], in every array that has so many rows."""
        for array in self._arrays():
            if array.shape[:1] == rows.shape:
                numbers = array.view(torch.uint8) if array.dtype == torch.float8_e4m3fn else array
                numbers.copy_(numbers.index_select(0, rows))

    def _arrays(self) -> Iterator[Tensor]:
        yield self.value

    def places(self) -> Iterator[tuple[Part, Tensor]]:
        """Yields each part with the view of the numbers that it fills."""
        flat, first = self.value.view(self._flat_shape), 0
        for part, rows in zip(self.parts, self._rows, strict=True):
            yield part, flat[first : first + rows]
            first += rows

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        """Writes a checkpoint's tensor, or the share of it, into its place: cut, transformed and
        rounded."""
        local = tensor if tuple(tensor.shape) == part.local_shape else part.local(tensor)
        place.copy_(
            (local if self.transform is None else self.transform(local.float())).view(place.shape)
        )

    def draw(self, generator: torch.Generator, wide: torch.dtype) -> None:
        """Fills it with dummy numbers, the same for the same generator: a rank draws the whole and
        takes its share.

        wide: the dtype of the model, in which numbers are drawn that no generator draws as they
        are.
        """
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
    """Numbers that are made of a checkpoint's wide ones while they are filled; dummy ones of wide
    dummy ones."""

    fills_by_share = False  # a row's scale is that of the whole row
    scale: Tensor

    def _arrays(self) -> Iterator[Tensor]:
        yield from (self.value, self.scale)

    def draw(self, generator: torch.Generator, wide: torch.dtype) -> None:
        for part, place in self.places():
            drawn = torch.empty(part.shape, dtype=wide, device=place.device)
            self.fill(part, place, drawn.uniform_(*self._drawn, generator=generator))


class Arranged(Weight):
    """An array [out, ...] that is made of tensors which lie otherwise on disk: transposed, packed,
    by blocks.

    stored_parts: those tensors, whole.   parts: the arrays that `arrange` makes of each, and this
    rank's share of them. A tensor is arranged whole, and cut then.
    """

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
        """Draws the tensors as a checkpoint would have them: any bits of a word are numbers."""
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
    """What a checkpoint has beside the numbers and must say what we take for granted: nothing is
    kept of it.

    right: a tensor -> whether it says so; None: it may say anything.   wrong: the rest of the error
    where it doesn't.
    """

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
        """There is nothing to draw."""

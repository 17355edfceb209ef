"""Weight: an array of a model that describes itself, so that loading, cutting and counting are loops over weights.

It knows names, shapes and numbers; no files, no layers, no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = frozenset({"F64", "F32", "BF16", "F16"})  # safetensors' names


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint, and the share of it that this rank holds.

    name, shape: the checkpoint's.   cut: the dimension that is divided into `shares`, None: every rank holds it whole.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    shares: int = 1
    share: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(n // self.shares if d == self.cut else n for d, n in enumerate(self.shape))

    def local(self, tensor: Tensor) -> Tensor:
        """Returns this rank's share of the checkpoint's tensor, a view."""
        if self.cut is None or self.shares == 1:
            return tensor
        size = self.shape[self.cut] // self.shares
        return tensor.narrow(self.cut, self.share * size, size)


class Weight:
    """An array that a checkpoint's tensors fill one after the other along its first dimension.

    parts: those tensors, in order.   stored: the dtypes that they may have on disk.   transform: float32 -> float32,
    done to each before it is rounded (Gemma's norms are stored as w and used as 1 + w).   again: names under which a
    checkpoint may hold the same numbers a second time (a tied head).
    """

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
    ) -> None:
        self.parts, self.stored, self.transform, self.again = tuple(parts), stored, transform, again
        shapes = [part.local_shape for part in self.parts]
        rows = sum(s[0] if s else 1 for s in shapes)
        self._flat_shape = (rows, *shapes[0][1:])
        self.shape = shape or self._flat_shape  # as the layer sees it
        self.dtype = dtype
        self._value: Tensor | None = torch.empty(self.shape, dtype=dtype, device=device)

    @property
    def value(self) -> Tensor:
        """The numbers, `shape` of `dtype`. Gone once a layer has made its own arrangement of them."""
        assert self._value is not None, f"{self.parts[0].name} has been given away"
        return self._value

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size

    def take(self) -> Tensor:
        """Returns the numbers and lets go of them: a kernel's arrangement takes their place."""
        value, self._value = self.value, None
        return value

    def places(self) -> Iterator[tuple[Part, Tensor]]:
        """Yields each part with the view of the numbers that it fills."""
        flat, first = self.value.view(self._flat_shape), 0
        for part in self.parts:
            last = first + (part.local_shape[0] if part.local_shape else 1)
            yield part, flat[first:last]
            first = last

    def fill(self, part: Part, place: Tensor, tensor: Tensor) -> None:
        """Writes a checkpoint's tensor into its place, cut, transformed and rounded."""
        local = part.local(tensor)
        place.copy_((local if self.transform is None else self.transform(local.float())).view(place.shape))

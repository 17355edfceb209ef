"""Gathered: a table of which a step reads few rows, such as an embedding. For a model on a GPU the
table may be in host memory.

Kernels then read it over the bus; the CUDA driver pins its pages. torch's own pinned memory is not
used, since it rounds sizes up to the next power of two: it would take 8 GiB for the 5.3 GiB table
of Gemma 4 E4B."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.parallel.sharded_weight import Part, Weight

DRAWN_AT_ONCE = 1 << 24  # random numbers made at a time for dummy weights
PORTABLE_AND_MAPPED = 3  # cudaHostRegister's flags


class Gathered(Weight):
    """A table [rows, width]. in_host: True if the table is in host memory and its readers run on a
    GPU."""

    def __init__(
        self, part: Part, dtype: torch.dtype, device: torch.device, *, in_host: bool = False
    ) -> None:
        self.in_host = in_host and device.type != "cpu"
        beside = self.in_host and device.type == "cuda"
        super().__init__([part], dtype, torch.device("meta") if beside else device)
        if beside:
            self._value = pinned(part.local_shape, dtype)

    def draw(self, generator: torch.Generator, wide: torch.dtype) -> None:
        """Fills the table with random numbers for dummy weights. The numbers are the same in host
        and in device memory."""
        for piece in torch.split(self.value, max(1, DRAWN_AT_ONCE // self.shape[1])):
            drawn = torch.empty(piece.shape, dtype=self.dtype, device=generator.device)
            piece.copy_(drawn.uniform_(*self._drawn, generator=generator))


class _Registered(mmap.mmap):
    """Memory pages that the driver pins. They are unpinned when the object is freed."""

    address: int | None = None

    def __del__(self) -> None:
        if self.address is not None and not sys.is_finalizing():
            torch.cuda.synchronize()  # waits for kernels that read the pages
            _driver().cudaHostUnregister(self.address)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns host memory that GPU kernels can read. Raises CapacityError if the driver can't pin
    it."""
    size = math.prod(shape) * dtype.itemsize
    pages = _Registered(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages alive
    failed = int(_driver().cudaHostRegister(flat.data_ptr(), size, PORTABLE_AND_MAPPED))
    if failed:
        raise CapacityError(
            f"the driver refuses to hold {size / 2**30:.2f} GiB of host memory in its place for the"
            f" GPU (CUDA error {failed}): give the container more memory, or keep the table on the"
            " card by per_layer_embeddings gpu",
            param="per_layer_embeddings",
        )
    pages.address = flat.data_ptr()
    return flat.view(dtype).view(*shape)


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

"""Staging: pinned buffer for a step's input. All of a step's input is packed in it as int32 words
and sent by one asynchronous copy.

    fixed part, always at one address (read by graphs):
        rows | skip | offset | draft | group start | group length
    loose part, packed anew each step (read by single launches):
        group blocks, copies, new blocks, joins, chunks

Unchanged fixed content isn't sent again: a step with the same rows as the last sends nothing.

Knows arrays and addresses; not how a step uses them. A pinned buffer is written again only once its
copy is done: there are more buffers than steps in flight, so in practice nothing waits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.schedule.step import Int32

log = logging.getLogger(__name__)

# pinned buffers: more than steps in flight (`steps_ahead` is at most 3)
RING = 6
LOOSE_WORDS = 1 << 20  # size of the loose part; arrays that don't fit get memory of their own
_FIXED = ("rows", "skip", "offset", "draft", "group_start", "group_length")
_ALIGN = 4  # words: 16 bytes, for kernels' wide loads and int64 views
_KINDS = {"i4": torch.int32, "f4": torch.float32, "i8": torch.int64}


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copies an array to the device; on the CPU the result shares its memory.

    The copy to a GPU uses pinned memory, which torch keeps until the copy is done: nothing waits.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class Staging:
    """Staging buffers. capacity: queries per step, padding included; groups: prefix groups per
    step."""

    def __init__(self, capacity: int, groups: int, device: torch.device) -> None:
        self.device = device
        sizes = (capacity, capacity, capacity, capacity, groups + 1, groups)
        starts = np.cumsum([0, *(_aligned(size) for size in sizes)]).tolist()
        self._fixed: int = starts[-1]
        self._words = self._fixed + (LOOSE_WORDS if device.type == "cuda" else LOOSE_WORDS >> 4)
        self._device = torch.zeros(self._words, dtype=torch.int32, device=device)
        self.rows, self.skip, self.offset, self.draft, self.group_start, self.group_length = (
            self._device[first : first + size] for first, size in zip(starts, sizes, strict=False)
        )
        self._places = dict(zip(_FIXED, starts, strict=False))
        # one buffer is enough on the CPU: a copy is done when it returns
        self._ring = [
            _Buffer.of(self._words, device) for _ in range(RING if device.type == "cuda" else 1)
        ]
        self._turn = 0
        self._buffer = self._ring[0]
        self._end = self._fixed
        # name -> arguments (values, fill, size) of write() since begin()
        self._now: dict[str, tuple[Int32, int, int]] = {}
        # name -> arguments of the write() whose content the device has
        self._sent: dict[str, tuple[Int32, int, int]] = {}

    def begin(self) -> None:
        """Takes the next pinned buffer and clears the arguments of write()."""
        self._turn = (self._turn + 1) % len(self._ring)
        self._buffer = self._ring[self._turn]
        self._buffer.wait()
        self._end = self._fixed
        self._now = {}

    def write(self, name: str, values: Int32, fill: int, size: int) -> None:
        """Sets the first `size` words of the fixed array `name`: `values`, padded with `fill`. The
        caller must not change `values` afterwards."""
        self._now[name] = (values, fill, size)

    def add(self, array: NDArray[np.generic]) -> Tensor:
        """Adds an array to the loose part; returns its tensor on the device. Its dtype is int32,
        float32, int64, or bool (which becomes int32). Valid after send(), until the next step is
        launched."""
        if array.dtype == np.bool_ or array.dtype == np.uint8:
            array = array.astype(np.int32)
        words: Int32 = np.ascontiguousarray(array).view(np.int32).reshape(-1)
        first, last = self._end, self._end + words.size
        if last > self._words:
            return to_device(array, self.device)
        self._buffer.words[first:last] = words
        self._end = _aligned(last)
        return self._device[first:last].view(_KINDS[array.dtype.str[1:]]).view(array.shape)

    def send(self) -> None:
        """Sends by one copy on the current stream; sends nothing if the device has everything
        already."""
        begin = self._fixed if self._is_there() else 0
        self._sent = self._now
        if begin == self._end:
            return
        if begin == 0:
            buffer = self._buffer.words
            for name, (values, fill, size) in self._now.items():
                first = self._places[name]
                buffer[first : first + values.size] = values
                buffer[first + values.size : first + size] = fill
        self._device[begin : self._end].copy_(
            self._buffer.pinned[begin : self._end], non_blocking=True
        )
        self._buffer.sent()

    def forget(self) -> None:
        """Marks the fixed part as overwritten on the device: the next step sends it again."""
        self._sent = {}

    def _is_there(self) -> bool:
        """Returns True if the device has the fixed part of this step."""
        if self._now.keys() != self._sent.keys():
            return False
        for name, (values, fill, size) in self._now.items():
            held, filled, length = self._sent[name]
            if (fill, size) != (filled, length):
                return False
            if values is not held and not np.array_equal(values, held):
                return False
        return True


class MappedMasks:
    """A board of masks [places, words] in the host's memory, readable by the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words: Int32 | None = None
        self._there: Tensor | None = None

    def open(self, words: Int32) -> None:
        """Makes the GPU able to read this board in host memory, so that the host copies no masks of
        it. It stays mapped until `close`."""
        if self._device.type != "cuda":
            return
        with torch.cuda.device(self._device):
            failed = int(torch.cuda.cudart().cudaHostRegister(words.ctypes.data, words.nbytes, 0))  # type: ignore[no-untyped-call]
            if failed:
                log.warning(
                    "masks are copied by the host: the GPU cannot read its memory (CUDA error %d)",
                    failed,
                )
                return
            self._words, self._there = words, torch.as_tensor(_Mapped(words), device=self._device)

    def take(self, words: Int32, places: Int32) -> Tensor:
        """Returns the masks words[places] on the device, int32 [places, words]."""
        if words is not self._words or self._there is None:
            return to_device(words.take(places, axis=0), self._device)
        return self._there.index_select(0, to_device(places, self._device))

    def close(self) -> None:
        if self._words is not None:
            torch.cuda.cudart().cudaHostUnregister(self._words.ctypes.data)  # type: ignore[no-untyped-call]
            self._words = self._there = None


class _Mapped:
    """Wraps an array so that torch uses its memory by address."""

    def __init__(self, array: NDArray[np.int32]) -> None:
        self.__cuda_array_interface__ = {
            "data": (array.ctypes.data, False),
            "shape": array.shape,
            "typestr": array.dtype.str,
            "version": 3,
        }


@dataclass(slots=True)
class _Buffer:
    pinned: Tensor
    words: Int32
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, words: int, device: torch.device) -> _Buffer:
        there = device.type == "cuda"
        pinned = torch.zeros(words, dtype=torch.int32, pin_memory=there)
        return cls(pinned, pinned.numpy(), torch.cuda.Event() if there else None)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def sent(self) -> None:
        if self.event is not None:
            self.event.record()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

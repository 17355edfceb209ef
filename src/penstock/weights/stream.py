"""Stream: reads a checkpoint's tensors onto a GPU. Threads read pieces of the files into a few
pinned buffers; each piece is copied to the device while the next is read. Tensors come in file
order.

  files --pread--> pinned, 2 a thread --copy, the thread's stream--> a tensor on the device -->
  Weight.fill

One thread that copies mapped pages, as loading for a CPU does (`checkpoint.read_tensors`), reaches
about 8 GB/s. Pinning host memory for whole tensors would take as long as copying them. Besides the
model, the device holds up to AHEAD bytes of tensors that are being read, but at least two tensors.
Knows entries and bytes; not which weight they fill."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.weights.checkpoint import AGAIN, Entry

PIECE = 16 << 20  # bytes of a file read at once
AHEAD = 512 << 20
READERS = 8
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def stream_tensors(entries: list[Entry], device: torch.device) -> Iterator[tuple[Entry, Tensor]]:
    """Yields each entry with its tensor on the device, valid for work on the current stream. Raises
    CheckpointError if a file cannot be read."""
    under_way: deque[tuple[Entry, Tensor, list[Future[None]]]] = deque()
    reader, ahead = _Reader(device), 0
    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "penstock-read") as pool:
        try:
            for entry in sorted(entries, key=lambda each: (each.shard, each.start)):
                tensor = torch.empty(entry.bytes, dtype=torch.uint8, device=device)
                reader.mark()
                starts = range(0, entry.bytes, PIECE)
                under_way.append(
                    (entry, tensor, [pool.submit(reader.read, entry, tensor, at) for at in starts])
                )
                ahead += entry.bytes
                while ahead > AHEAD and len(under_way) > 1:
                    ahead -= under_way[0][0].bytes
                    yield _arrived(reader, *under_way.popleft())
            while under_way:
                yield _arrived(reader, *under_way.popleft())
        finally:
            pool.shutdown(cancel_futures=True)
            reader.meet()  # waits for copies before the tensors' memory is reused


def _arrived(
    reader: _Reader, entry: Entry, tensor: Tensor, pieces: list[Future[None]]
) -> tuple[Entry, Tensor]:
    for piece in pieces:
        piece.result()
    reader.meet()
    return entry, entry.of_bytes(tensor.view(TORCH_DTYPES[entry.dtype]))


class _Reader:
    """Reads pieces of files onto the device. Any thread may call `read`; each thread has two pinned
    buffers, and on CUDA its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._own = device, threading.local()
        self._streams: list[torch.cuda.Stream] = []
        self._allocated: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Records an event on the current stream, after the work that may still read the memory
        that was just allocated. Copies into that memory wait for the event."""
        if self._device.type == "cuda":
            self._allocated = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._allocated.record()

    def meet(self) -> None:
        """Makes the current stream wait for all copies that have begun."""
        for stream in list(self._streams):
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def read(self, entry: Entry, tensor: Tensor, at: int) -> None:
        """Copies the piece of an entry that begins at byte `at` to its tensor."""
        own = self._own
        if not hasattr(own, "buffers"):
            self._begin()
        own.turn ^= 1
        buffer, done = own.buffers[own.turn], own.done[own.turn]
        if done is not None:
            done.synchronize()
        piece = buffer[: min(PIECE, entry.bytes - at)]
        _read_into(piece, entry, at)
        # on the CPU own.stream is None, which torch.cuda.stream accepts and ignores
        with torch.inference_mode(), torch.cuda.stream(own.stream):
            if own.stream is not None:
                own.stream.wait_event(self._allocated)
            tensor[at : at + piece.shape[0]].copy_(piece, non_blocking=True)
            if done is not None:
                done.record()

    def _begin(self) -> None:
        """Creates this thread's buffers, stream and events before its first piece."""
        own, cuda = self._own, self._device.type == "cuda"
        own.turn, own.stream, own.done = 0, None, [None, None]
        with torch.cuda.device(self._device) if cuda else nullcontext():
            own.buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
            if cuda:
                own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                own.done = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
                self._streams.append(own.stream)


def _read_into(piece: Tensor, entry: Entry, at: int) -> None:
    """Fills a buffer with the entry's bytes from byte `at` on. preadv releases the GIL, so threads
    read in parallel."""
    view = memoryview(piece.numpy())  # type: ignore[arg-type]
    try:
        with entry.shard.open("rb", buffering=0) as file:
            for place, left in entry.places(at, len(view)):
                while left:
                    count = os.preadv(file.fileno(), [view[:left]], place)
                    if not count:
                        raise CheckpointError(f"{entry.shard} is cut short: {AGAIN}")
                    view, place, left = view[count:], place + count, left - count
    except OSError as error:
        raise CheckpointError(
            f"{entry.shard} cannot be read ({error.strerror}): {AGAIN}"
        ) from error

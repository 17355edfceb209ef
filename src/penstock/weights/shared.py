"""Weights in another process's memory, read like a checkpoint. Their description is checked first.

CPU memory is a file of /dev/shm. It is read, not mapped, so that a truncated file gives an error
and no SIGBUS. Knows shared memories and entries; not which parameter a tensor fills."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.json_keys import shown
from penstock.shared_weights import SharedStretch, SharedTensor, SharedWeights
from penstock.weights.checkpoint import ITEM_BYTES, MOST_DIMS, Entry
from penstock.weights.cuda_handles import close_handle, open_handle
from penstock.weights.stream import TORCH_DTYPES, stream_tensors

SHM = Path("/dev/shm")
_NAME = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)


class OpenedWeights:
    """A context manager that opens shared weights and closes their memories at the end. Raises
    CheckpointError for a faulty description, or for memory that no longer exists."""

    def __init__(self, shared: SharedWeights, device: torch.device) -> None:
        self._shared, self._device = shared, device
        self._on_gpu: dict[Path, Tensor] = {}
        self.entries: dict[str, Entry] = {}

    def __enter__(self) -> OpenedWeights:
        try:
            files = [
                self._open(number, memory) for number, memory in enumerate(self._shared.memories)
            ]
            for tensor in self._shared.tensors:
                if tensor.name in self.entries:
                    raise _refused(f"tensor {shown(tensor.name)} is told of twice")
                self.entries[tensor.name] = _entry(tensor, files, self._shared.memories)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)  # waits for the kernels that read the memories
        self._close()

    def read(self, entries: list[Entry]) -> Iterator[tuple[Entry, Tensor]]:
        """Yields each entry with its tensor. Tensors in GPU memory are views of it; others are
        copied to the device."""
        yield from stream_tensors(
            [entry for entry in entries if entry.shard not in self._on_gpu], self._device
        )
        for entry in entries:
            if (memory := self._on_gpu.get(entry.shard)) is not None:
                lies = memory[entry.start : entry.start + entry.bytes]
                yield entry, lies.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)

    def _open(self, number: int, memory: SharedStretch) -> Path:
        """Opens a shared memory; returns the path by which entries name it: its file, or an
        invented path for GPU memory. number: index of the memory in the description."""
        if memory.kind == "shm":
            return _file_of(memory)
        if self._device.type != "cuda":
            raise _refused(
                f"memory {number} is a GPU's, and this engine runs on {self._device}: share it"
                " as shm"
            )
        name = Path(f"memory {number} of the GPU")
        self._on_gpu[name] = open_handle(memory.handle, memory.size)
        return name

    def _close(self) -> None:
        while self._on_gpu:
            close_handle(self._on_gpu.popitem()[1])


def _file_of(memory: SharedStretch) -> Path:
    if _NAME.fullmatch(memory.name) is None:
        raise _refused(f"the shared memory's name {shown(memory.name)} is none of /dev/shm")
    file = SHM / memory.name
    if file.is_symlink() or not file.is_file():
        raise _refused(
            f"the shared memory {memory.name!r} is not there: has the process that gave it ended?"
        )
    if file.stat().st_size < memory.size:
        raise _refused(
            f"the shared memory {memory.name!r} has {file.stat().st_size} bytes, not {memory.size}"
        )
    return file


def _entry(tensor: SharedTensor, files: list[Path], memories: tuple[SharedStretch, ...]) -> Entry:
    name, item = shown(tensor.name), ITEM_BYTES.get(tensor.dtype)
    if item is None:
        raise _refused(
            f"tensor {name} is of dtype {shown(tensor.dtype)}, and not of {', '.join(ITEM_BYTES)}"
        )
    if not 0 <= tensor.memory < len(files):
        raise _refused(f"tensor {name} lies in memory {tensor.memory}, and there are {len(files)}")
    if len(tensor.shape) > MOST_DIMS or min(tensor.shape, default=0) < 0:
        raise _refused(f"tensor {name} has no shape of up to {MOST_DIMS} sizes")
    end = tensor.offset + item * math.prod(tensor.shape)
    if tensor.offset < 0 or tensor.offset % item or end > memories[tensor.memory].size:
        raise _refused(
            f"tensor {name} doesn't lie within its memory, or not where its numbers may begin"
        )
    return Entry(tensor.name, files[tensor.memory], tensor.dtype, tensor.shape, tensor.offset)


def _refused(message: str) -> CheckpointError:
    return CheckpointError(f"shared weights: {message}", param="shared")

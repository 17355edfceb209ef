"""SharedWeights: weights in another process's memory. It says where the tensors of a trainer's
process lie, so that an engine can read them.

A memory is either `shm`, a file of /dev/shm by its name, or `cuda`, a GPU allocation by CUDA's raw
handle. A tensor has a name, a dtype as safetensors spells it, a shape, the index of its memory, and
the offset in bytes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class SharedStretch:
    """A region of shared memory. Its owner must not change it until the engine reports that it has
    read it."""

    kind: Literal["shm", "cuda"]
    size: int  # size of the region in bytes
    name: str = ""
    handle: bytes = b""  # CUDA's handle of the allocation; base64 in JSON


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A contiguous tensor in a shared memory region."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    memory: int = 0  # index of the region in SharedWeights.memories


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The locations of all tensors of a checkpoint in shared memory."""

    memories: tuple[SharedStretch, ...]
    tensors: tuple[SharedTensor, ...]


WeightsSource = Path | SharedWeights

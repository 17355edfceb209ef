"""SharedWeights: where the tensors of another process lie, in words alone: what a trainer says to
an engine.

memories    shm: a file of /dev/shm, by its name      cuda: an allocation on a GPU, by CUDA's
handle, as raw bytes tensors     name, dtype as safetensors spell it, shape, which memory, from
which byte on
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class SharedStretch:
    """A stretch of memory that its owner keeps as it is until it is told that it was read."""

    kind: Literal["shm", "cuda"]
    size: int  # bytes
    name: str = ""
    handle: bytes = b""  # base64 in JSON


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor, all of it, its numbers one behind the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    memory: int = 0  # place among the memories


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """All tensors of a checkpoint."""

    memories: tuple[SharedStretch, ...]
    tensors: tuple[SharedTensor, ...]


WeightsSource = Path | SharedWeights

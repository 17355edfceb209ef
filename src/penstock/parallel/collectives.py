"""Collectives: sums and gathers over the ranks of one model; each rank is a process of this
machine.
  Gloo    on the CPU: each rank gathers all parts and adds them in rank order, in float32
  GPUs    ranks/gpu_collectives.py has the same methods: by a kernel of Penstock, or NCCL
Every rank gets bit-identical sums, so every rank draws the same tokens. Knows tensors; no layers,
no steps."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from penstock.errors import EngineError

_dist: Any = torch.distributed  # torch's type stubs lack names used here


class Collectives(Protocol):
    """One rank's end of the collective operations; every rank calls them in the same order."""

    def connect(self) -> None:
        """Meets the other ranks, which call this at about the same time. Does nothing if it is
        connected already. Raises EngineError if a rank does not connect in time."""

    def ready(self) -> None:
        """Marks the end of compiling and loading. Waits may be long before this call; after it, a
        wait much longer than a step means that another rank hangs."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's x, all of one shape and dtype."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns every rank's x, all of one shape and dtype: [ranks, *x.shape]."""

    def check(self) -> None:
        """Raises EngineError if a collective operation timed out waiting for a rank. Checks the
        steps whose results the host has already read."""

    def describe(self) -> str:
        """Returns one line that names the method of summing."""

    def abort(self) -> None:
        """Makes this rank's collectives stop waiting for other ranks.
        A second call does nothing."""

    def close(self) -> None:
        """Frees shared memory and handles. Call it when no collective operation is running. A
        second call does nothing."""


class Gloo:
    """Collectives on the CPU. meeting: path of a file by which the ranks find each other; all ranks
    see it, and each model has a new one. seconds: the longest wait for another rank. A call raises
    EngineError after that wait, or at once if another rank's process has ended."""

    def __init__(self, meeting: Path, rank: int, size: int, seconds: float) -> None:
        self._meeting, self._rank, self._size, self._longest = (
            meeting,
            rank,
            size,
            timedelta(seconds=seconds),
        )
        self._group: Any = None

    def connect(self) -> None:
        if self._group is not None:
            return
        try:
            store = _dist.FileStore(str(self._meeting), self._size)
            store.set_timeout(self._longest)
            self._group = gloo_group(store, self._rank, self._size, self._longest)
        except RuntimeError as error:
            raise EngineError(
                f"rank {self._rank} did not meet the others: {first_line(error)}"
            ) from error
        # all ranks are connected: the meeting file is no longer needed
        self.all_reduce(torch.zeros(1))

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.all_gather(x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        assert self._group is not None, "ranks meet before they add"
        parts = torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device)
        try:
            self._group.allgather([list(parts)], [x.contiguous()]).wait()
        except RuntimeError as error:
            raise EngineError(f"rank {self._rank} lost the others: {first_line(error)}") from error
        return parts

    def ready(self) -> None:
        """Does nothing: a call that waits too long raises at any time."""

    def check(self) -> None:
        """Does nothing: the failed call itself has raised."""

    def describe(self) -> str:
        return "gloo"

    def abort(self) -> None:
        """Does nothing: a waiting rank gets an error when the other ranks' sockets close."""

    def close(self) -> None:
        """Does nothing: Gloo has no shared memory to free."""


def gloo_group(store: Any, rank: int, size: int, longest: timedelta) -> Any:
    """Returns gloo's process group of `size` ranks of this machine. store: torch's key-value store
    through which the ranks find each other. longest: the longest wait of an operation."""
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = longest
    return gloo(store, rank, size, options)


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message; torch appends a trace to it."""
    return str(error).partition("\n")[0]

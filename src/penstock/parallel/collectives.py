"""Collectives: how the ranks of one model, each a process of this machine, add up what they have
and gather what is small.

    Gloo    on the CPU: each gathers all parts and adds them in the ranks' order, in float32
    GPUs    ranks/gpu_collectives.py, by the same protocol: a kernel of ours, or NCCL for all

A sum is the same to the bit everywhere, whatever it is a sum of, and so are the tokens that are
drawn from it. It knows tensors; no layers, no plans.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from penstock.errors import EngineError

_dist: Any = torch.distributed  # its types leave out what is used here


class Collectives(Protocol):
    """One rank's end of what all ranks do at once, in the same order."""

    def connect(self) -> None:
        """Meets the other ranks, which come at about the same time, unless it has. EngineError
        where one doesn't."""

    def ready(self) -> None:
        """From here on nobody compiles or loads: who waits much longer than a step takes waits for
        one that hangs."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's x, all of one shape and dtype."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns every rank's x, all of one shape and dtype: [ranks, *x.shape]."""

    def check(self) -> None:
        """Raises EngineError where a rank was waited for in vain in a step that has been read."""

    def describe(self) -> str:
        """Says how they add up, in a line."""

    def abort(self) -> None:
        """Has whoever still waits for others wait no longer than it must. Twice is once."""

    def close(self) -> None:
        """Lets go of what they share, when no call is under way any more. Twice is once."""


class Gloo:
    """Serves as Collectives, on the CPU. meeting: a file that all ranks see, new for each model.
    seconds: the longest that a rank waits for the others; one that has ended is seen at once, and
    each call raises EngineError for it."""

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
        self.all_reduce(torch.zeros(1))  # all are there now: the file is needed no more

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
        """Nothing changes: a call that waits too long raises at any time."""

    def check(self) -> None:
        """Nothing is left to tell: the call itself has raised."""

    def describe(self) -> str:
        return "gloo"

    def abort(self) -> None:
        """Whoever waits is told by the end of the others' sockets."""

    def close(self) -> None:
        """Nothing is shared."""


def gloo_group(store: Any, rank: int, size: int, longest: timedelta) -> Any:
    """Returns gloo's end of so many ranks of this machine, which meet at a store."""
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = longest
    return gloo(store, rank, size, options)


def first_line(error: Exception) -> str:
    """Returns the first line of what an error says; torch's go on with where they were raised."""
    return str(error).partition("\n")[0]

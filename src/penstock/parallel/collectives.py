"""Collectives: the sums over the ranks of one model, each a process of this machine, over gloo on the CPU.

Every rank gathers all parts and adds them in the ranks' order, in float32: the sum is the same to the bit everywhere,
whatever it is a sum of, and so are the tokens that are drawn from it. It knows tensors; no layers, no plans.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from penstock.errors import EngineError

_dist: Any = torch.distributed  # its types leave out what is used here


class Collectives:
    """One rank's end. meeting: a file that all ranks see, new for each model. seconds: the longest that a rank waits
    for the others; one that has ended is seen at once."""

    def __init__(self, meeting: Path, rank: int, size: int, seconds: float) -> None:
        self._meeting, self._rank, self._size, self._longest = meeting, rank, size, timedelta(seconds=seconds)
        self._group: Any = None

    def connect(self) -> None:
        """Meets the other ranks, which come at about the same time, unless it has. EngineError where one doesn't."""
        if self._group is not None:
            return
        gloo = _dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = self._longest
        try:
            store = _dist.FileStore(str(self._meeting), self._size)
            store.set_timeout(self._longest)
            self._group = gloo(store, self._rank, self._size, options)
        except RuntimeError as error:
            raise EngineError(f"rank {self._rank} did not meet the others: {_line(error)}") from error
        self.all_reduce(torch.zeros(1))  # all are there now: the file is needed no more

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's x, all of one shape and dtype. EngineError where a rank has ended."""
        assert self._group is not None, "ranks meet before they add"
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self._size)]
        try:
            self._group.allgather([parts], [x.contiguous()]).wait()
        except RuntimeError as error:
            raise EngineError(f"rank {self._rank} lost the others: {_line(error)}") from error
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)


def _line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]

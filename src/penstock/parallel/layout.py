"""Layout: which rank this is, of how many that hold one model together, and how they add up. It knows tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensor parallelism (Megatron-LM, arXiv:1909.08053) as layers see it."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _alone  # x -> the sum of every rank's x; x may be overwritten

    def share(self, pieces: int) -> tuple[int, int]:
        """Returns (shares, this rank's) of something that comes in `pieces`: where there are fewer than ranks, several
        ranks hold the same one. ValueError where they don't divide."""
        if pieces % self.size and self.size % pieces:
            raise ValueError(f"{pieces} pieces cannot be laid over {self.size} ranks evenly")
        shares = min(self.size, pieces)
        return shares, self.rank * shares // self.size


ALONE = Layout()

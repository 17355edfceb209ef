"""Layout: which rank this is, of how many that hold one model together, and how they add up. It
knows tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.errors import UsageError


def _alone(x: Tensor) -> Tensor:
    return x


def _alone_gathered(x: Tensor) -> Tensor:
    return x[None]


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensor parallelism (Megatron-LM, arXiv:1909.08053) as layers see it."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = (
        _alone  # x -> the sum of every rank's x; x may be overwritten
    )
    all_gather: Callable[[Tensor], Tensor] = (
        _alone_gathered  # x -> every rank's x, [size, *x.shape]: small ones
    )

    def share(self, pieces: int, what: str, *, repeats: bool = False) -> tuple[int, int]:
        """Returns (shares, this rank's) of something that comes in `pieces`. repeats: where there
        are fewer pieces than ranks, several ranks hold the same one. UsageError where they don't
        divide."""
        if pieces % self.size and not (repeats and self.size % pieces == 0):
            fit = [str(ranks) for ranks in range(1, min(pieces, 64) + 1) if pieces % ranks == 0]
            raise UsageError(
                f"{what}: {pieces} cannot be divided over {self.size} ranks: take one of"
                f" {', '.join(fit)}",
                param="tensor_parallel_size",
            )
        shares = min(self.size, pieces)
        return shares, self.rank * shares // self.size

    def near_share(self, pieces: int, what: str) -> tuple[int, int]:
        """Returns (shares, this rank's) of what may be cut into shares that differ by a piece.
        UsageError where there are fewer pieces than ranks."""
        if pieces < self.size:
            raise UsageError(
                f"{what}: {pieces} cannot be divided over {self.size} ranks: take {pieces} at most",
                param="tensor_parallel_size",
            )
        return self.size, self.rank


def stretch(length: int, unit: int, shares: int, share: int) -> tuple[int, int]:
    """Returns (first, length) of a share of something that is cut between units, the last of which
    may be short: shares differ by a unit at most."""
    units = -(-length // unit)
    first, last = (min(length, (share + ahead) * units // shares * unit) for ahead in (0, 1))
    return first, last - first


ALONE = Layout()

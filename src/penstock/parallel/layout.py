"""Layout: this rank's place among the ranks of a model. It holds the number of this rank, the
number of ranks, and the functions that sum and gather tensors over them. Knows tensors alone."""

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
        _alone  # x -> the sum of every rank's x; may overwrite x
    )
    all_gather: Callable[[Tensor], Tensor] = (
        _alone_gathered  # x -> every rank's x, [size, *x.shape]; for small tensors
    )

    def share(self, pieces: int, what: str, *, repeats: bool = False) -> tuple[int, int]:
        """Returns (number of shares, index of this rank's share) of a dimension that consists of
        `pieces` equal parts, such as heads. what: the dimension's name for the error. repeats: if
        there are fewer pieces than ranks, several ranks may hold the same one. Raises UsageError if
        the ranks don't divide the pieces."""
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
        """Returns (number of shares, index of this rank's share) for shares that may differ by one
        piece. what: the dimension's name for the error. Raises UsageError if there are fewer pieces
        than ranks."""
        if pieces < self.size:
            raise UsageError(
                f"{what}: {pieces} cannot be divided over {self.size} ranks: take {pieces} at most",
                param="tensor_parallel_size",
            )
        return self.size, self.rank


def stretch(length: int, unit: int, shares: int, share: int) -> tuple[int, int]:
    """Returns (first, length) of one share of a dimension that is split over ranks, between units.
    The last unit may be short; shares differ by one unit at most."""
    units = -(-length // unit)
    first, last = (min(length, (share + ahead) * units // shares * unit) for ahead in (0, 1))
    return first, last - first


ALONE = Layout()

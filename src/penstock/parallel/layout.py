"""Layout: which rank this is, of how many that hold one model together, and how they add up. It knows tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.errors import UsageError


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensor parallelism (Megatron-LM, arXiv:1909.08053) as layers see it."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Tensor], Tensor] = _alone  # x -> the sum of every rank's x; x may be overwritten

    def share(self, pieces: int, what: str, *, repeats: bool = False) -> tuple[int, int]:
        """Returns (shares, this rank's) of something that comes in `pieces`. repeats: where there are fewer pieces than
        ranks, several ranks hold the same one. UsageError where they don't divide."""
        if pieces % self.size and not (repeats and self.size % pieces == 0):
            raise UsageError(
                f"{what}: {pieces} cannot be divided over {self.size} ranks: take fewer, as many as divide it"
            )
        shares = min(self.size, pieces)
        return shares, self.rank * shares // self.size


ALONE = Layout()

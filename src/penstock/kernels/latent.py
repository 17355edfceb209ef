"""LatentSizes: the widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). It knows numbers alone; no
torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """rank: of the vector that all heads read.   turning: of the key beside it, which turns.   still: of a head's query
    and key that don't turn.   value: of a head's value."""

    rank: int
    turning: int
    still: int
    value: int

    @property
    def width(self) -> int:
        """Returns the numbers that a token stores."""
        return self.rank + self.turning

    @property
    def head(self) -> int:
        """Returns the numbers of a head's query."""
        return self.still + self.turning

"""LatentSizes: the widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), the
multiplications of its two forms, and the choice between them for a step's chunks. Knows numbers
alone; no torch."""

from __future__ import annotations

from dataclasses import dataclass

EXPAND_TOKENS = (
    256  # least prompt tokens in a step for expanding keys and values: kernels/tunables.py
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Widths of latent attention. rank: of the vector that all heads read. turning: of the shared
    key beside it, which rotates. still: of the part of a head's query and key that doesn't rotate.
    value: of a head's value."""

    rank: int
    turning: int
    still: int
    value: int

    @property
    def width(self) -> int:
        """Numbers stored per token."""
        return self.rank + self.turning

    @property
    def head(self) -> int:
        """Numbers of a head's query."""
        return self.still + self.turning

    @property
    def absorbed_pair(self) -> int:
        """Multiplications of a head per pair of a query and a latent that it sees (absorbed
        form)."""
        return self.width + self.rank

    @property
    def expanded_pair(self) -> int:
        """Multiplications of a head per pair of a query and an expanded key and value."""
        return self.head + self.value

    @property
    def expansion(self) -> int:
        """Multiplications that expand a latent into a head's key and value. The absorbed form
        spends the same on each query and its output."""
        return self.rank * (self.still + self.value)

    def expands(self, tokens: int, stored: int, pairs: int) -> bool:
        """Returns True if a step's chunks need fewer multiplications in the expanded form. tokens:
        of the chunks. stored: tokens that they see, their own included. pairs: of a token and one
        that it sees."""
        made = stored * self.expansion + pairs * self.expanded_pair
        return made < tokens * self.expansion + pairs * self.absorbed_pair

"""LatentSizes: the widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). It counts
the multiplications of the two ways to compute it, by which one is chosen for a step's chunks. In
the absorbed form queries are mapped to the latents' space; in the expanded form each head's keys
and values are made from the latents. Knows numbers alone; no torch."""

from __future__ import annotations

from dataclasses import dataclass

EXPAND_TOKENS = (
    256  # least prompt tokens of a step for the expanded form; a default of kernels/tunables.py
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Widths of latent attention. rank: of the latent, which all heads read. turning: of the
    rotated key beside the latent, which all heads share. still: of the part of a head's query and
    key that doesn't rotate. value: of a head's value."""

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
        """Absorbed form: multiplications of a head per pair of a query and a latent that it
        sees."""
        return self.width + self.rank

    @property
    def expanded_pair(self) -> int:
        """Expanded form: multiplications of a head per pair of a query and a key and value that it
        sees."""
        return self.head + self.value

    @property
    def expansion(self) -> int:
        """Multiplications that make a head's key and value from a latent. The absorbed form takes
        as many to map a query and its output."""
        return self.rank * (self.still + self.value)

    def expands(self, tokens: int, stored: int, pairs: int) -> bool:
        """Returns True if a step's chunks need fewer multiplications in the expanded form. tokens,
        stored, pairs: see ChunkSight."""
        made = stored * self.expansion + pairs * self.expanded_pair
        return made < tokens * self.expansion + pairs * self.absorbed_pair

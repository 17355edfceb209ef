"""LatentSizes: the widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), what its
two forms multiply, and which of them a step's prompts take. It knows numbers alone; no torch."""

from __future__ import annotations

from dataclasses import dataclass

EXPAND_TOKENS = (
    256  # of prompts in a step, from which on keys and values may be made: kernels/tunables.py
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """rank: of the vector that all heads read.   turning: of the key beside it, which turns.
    still: of a head's query and key that don't turn.   value: of a head's value."""

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

    @property
    def absorbed_pair(self) -> int:
        """Returns the multiplications of a head for a query and a vector that it sees."""
        return self.width + self.rank

    @property
    def expanded_pair(self) -> int:
        """Returns those for a query and a key and value of the head's own."""
        return self.head + self.value

    @property
    def expansion(self) -> int:
        """Returns the multiplications that make a head's key and value of a vector: as many as a
        query, and what it is answered, are multiplied by where it is absorbed."""
        return self.rank * (self.still + self.value)

    def expands(self, tokens: int, stored: int, pairs: int) -> bool:
        """Whether a step's chunks multiply less where each head's keys and values are made of the
        vectors that they see. tokens: of the chunks.   stored: that they see, each chunk's own
        among them.   pairs: of a token and one that it sees."""
        made = stored * self.expansion + pairs * self.expanded_pair
        return made < tokens * self.expansion + pairs * self.absorbed_pair

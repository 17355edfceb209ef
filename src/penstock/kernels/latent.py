"""LatentSizes: the widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Attention
has two equivalent forms: in the absorbed form queries are mapped to the latents' space; in the
expanded form each head's keys and values are made from the latents. This module counts the
multiplications of both, by which one is chosen for a step's chunks. Knows numbers alone; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

EXPAND_TOKENS = (
    # the expanded form is used only for steps with at least so many prompt tokens; a default of
    # kernels/tunables.py
    256
)
ROOM = 2**28  # bytes of a step's buffer for expanded keys and values
# Shared prefixes are expanded only in steps of at least so many rows. These run without a CUDA
# graph, since the number of latents differs, and keep the device busy longer than the host.
PREFIX_ROWS = 1024
# Cost of a multiplication in attention over a prefix, in multiplications of the product that makes
# keys and values: that runs at some 600 TFLOP/s on an H200, the others at 200 and 450.
_ABSORBED_COST, _EXPANDED_COST = 3.0, 1.4
_LEAST_SAVED = 1.5e10  # least saving for which the expanded form pays: 50 us of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Widths of latent attention. rank: of a token's latent, which all heads read. turning: of a
    token's rotated key, which is stored beside the latent and which all heads share. still: of the
    part of a head's query and key that doesn't rotate. value: of a head's value."""

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
        """Multiplications of one head in the absorbed form, for a query and one latent that it
        sees."""
        return self.width + self.rank

    @property
    def expanded_pair(self) -> int:
        """Multiplications of one head in the expanded form, for a query and one key and value that
        it sees."""
        return self.head + self.value

    @property
    def expansion(self) -> int:
        """Multiplications that make one head's key and value from a latent, in the expanded form.
        The absorbed form takes as many to map one head's query and output."""
        return self.rank * (self.still + self.value)

    def expands(self, tokens: int, stored: int, pairs: int) -> bool:
        """Returns True if a step's chunks need fewer multiplications in the expanded form. tokens,
        stored, pairs: the counts of ChunkSight."""
        made = stored * self.expansion + pairs * self.expanded_pair
        return made < tokens * self.expansion + pairs * self.absorbed_pair

    def expands_prefixes(self, heads: int, stored: int, pairs: int) -> bool:
        """Returns True if a step of many rows saves time by attending to shared prefixes in the
        expanded form. stored, pairs: the counts of PrefixSight."""
        made = stored * self.expansion + _EXPANDED_COST * pairs * self.expanded_pair
        saved = heads * (_ABSORBED_COST * pairs * self.absorbed_pair - made)
        fits = stored * (self.still + self.value) <= ROOM // 4  # one head's, in any dtype
        return fits and saved >= _LEAST_SAVED

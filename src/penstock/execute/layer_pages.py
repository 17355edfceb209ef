"""LayerPages: which layers share the pages of the KV pool, where some see a window only.

    26 layers, each sixth sees everything:   page = 4 layers' K and V of 16 tokens, one place a layer
        table 0        the 4 layers that see everything
        table 1 .. 6   the 22 others, four a table (the last has 2)

A block of 16 tokens takes a page of each table; those of tables 1 and on come back once the window has passed. Every
layer's storage is one of as many as a page has places, so layers of different tables share memory, never a page.

It knows layers' windows and what they store; no blocks, no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.execute.kv_cache import TOKEN_BYTES, token_bytes
from penstock.kernels.state_forms import PagedForm
from penstock.models.decoder import Decoder

MOST_MORE = 1.1  # times the memory of a token whose window is open, that pages may take for places that stay empty


@dataclass(frozen=True, slots=True)
class LayerPages:
    """place: number of the storage of each layer with pages of its own. table: of each block of the model, the table
    that it finds its pages by. window: the widest of those that there are."""

    table: tuple[int, ...]
    place: tuple[int, ...]
    window: int

    @property
    def tables(self) -> int:
        """Tables of layers with windows."""
        return max(self.table)

    @property
    def places(self) -> int:
        return 1 + max(self.place)


def pages_of(model: Decoder, max_model_len: int) -> LayerPages | None:
    """Returns how a model's layers share pages. None, each has storage of its own: no layer has a window (or all have),
    one's is as long as a sequence, layers store different bytes (of several ranks: any in eight bits), a block attends
    twice, or too many places would stay empty."""
    if any(len([k for k in each if k.kind is not None]) > 1 for each in model.keepers):
        return None
    owners = [(owner, owner.kind) for owner in model.owners if owner.kind is not None]
    windows = [kind.window for _, kind in owners]
    some = [window for window in windows if window is not None]
    whole = len(windows) - len(some)
    if not whole or not some or max(some) >= max_model_len or len({f.block_bytes for f in model.paged_forms}) > 1:
        return None
    if model.ranks > 1 and any(form.values != model.dtype for form in model.paged_forms):
        return None  # which keys stay wide is each rank's own finding, and all must decide alike
    if (1 + -(-len(some) // whole)) * whole > MOST_MORE * len(windows):
        return None
    table, place, seen = dict[int, int](), list[int](), {True: 0, False: 0}
    for (owner, _), window in zip(owners, windows, strict=True):
        number = seen[window is None]
        seen[window is None] += 1
        table[id(owner)] = 0 if window is None else 1 + number // whole
        place.append(number % whole)
    of_block = [next((table[id(k.source or k)] for k in each if k.kind is not None), 0) for each in model.keepers]
    return LayerPages(tuple(of_block), tuple(place), max(some))


def open_token_bytes(forms: Sequence[PagedForm], pages: LayerPages | None) -> int:
    """Returns the bytes that a token takes of the cache while it is in every layer's window."""
    if pages is None:
        return token_bytes(forms)
    return (1 + pages.tables) * (token_bytes(forms[:1]) - TOKEN_BYTES) * pages.places + (1 + pages.tables) * TOKEN_BYTES

"""LayerPages: assigns layers to pages of the KV pool. Used for models with sliding-window layers,
where several layers share a page.

    26 layers, every sixth with full attention: page = K and V of 4 layers for 16 tokens, 4 places
        table 0        the 4 full layers
        table 1 .. 6   the 22 others, four per table (the last has 2)

    30 layers, of which the 5 full ones store half the bytes of the others: page = 3 places
        table 0        the 5 full layers, two per place
        table 1 .. 9   the 25 others, three per table (the last has 1)

A block of 16 tokens takes one page of each table; pages of tables 1 and on are freed once the
window has passed. Every place is a storage of its own, so layers of different tables share memory,
but never a page.

Knows layers' windows and the bytes they store; no blocks, no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import BLOCK_SIZE
from penstock.execute.kv_cache import TOKEN_BYTES, PagePlace, token_bytes
from penstock.kernels.layer_kv import KvForm
from penstock.kernels.state_forms import PagedForm
from penstock.models.decoder import Decoder

# a token inside all windows may take at most this many times the memory it needs without empty
# places
MOST_MORE = 1.1


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The assignment of layers to pages. A page is divided into places; each place holds the state
    of one or more layers. place: one per layer that stores state. table: for each block of the
    model, the number of its page table. window: the widest window in tokens."""

    table: tuple[int, ...]
    place: tuple[PagePlace, ...]
    window: int

    @property
    def tables(self) -> int:
        """Number of page tables for layers with sliding windows."""
        return max(self.table)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, summed over its places (see LayerPages)."""
        return sum({place.storage: place.bytes for place in self.place}.values())


def pages_of(
    model: Decoder, max_model_len: int, forms: Sequence[PagedForm] | None = None
) -> LayerPages | None:
    """Returns the assignment of a model's layers to pages. forms: the layers' storage formats, in
    order; None: the model's current ones.

    Chooses the smallest page with few empty places, since a token outside all windows still takes
    one page. Returns None if each layer must have storage of its own: no layer has a window, or all
    have; a window is as long as a sequence; a block attends twice; too many places would stay
    empty; layers cannot share a place (latent vectors of different sizes); or several ranks store
    eight bits."""
    if any(len([k for k in each if k.kind is not None]) > 1 for each in model.keepers):
        return None
    owners = [(owner, owner.kind) for owner in model.owners if owner.kind is not None]
    windows = [kind.window for _, kind in owners]
    some = [window for window in windows if window is not None]
    if not some or len(some) == len(windows) or max(some) >= max_model_len:
        return None
    forms = model.paged_forms if forms is None else forms
    if model.ranks > 1 and any(form.values != model.dtype for form in forms):
        # each rank decides by itself which keys stay unquantized, but all ranks must assign pages
        # alike
        return None
    most = max(form.block_bytes for form in forms)
    if any(most % _unit(form, most) for form in forms):
        return None
    dealt = _smallest(forms, [window is None for window in windows], most)
    if dealt is None:
        return None
    table = {id(owner): number for (owner, _), (number, _) in zip(owners, dealt, strict=True)}
    of_block = [
        next((table[id(k.source or k)] for k in each if k.kind is not None), 0)
        for each in model.keepers
    ]
    return LayerPages(tuple(of_block), tuple(place for _, place in dealt), max(some))


def _smallest(
    forms: Sequence[PagedForm], whole: list[bool], most: int
) -> list[tuple[int, PagePlace]] | None:
    """Chooses the smallest page that leaves few slots unused; a page has a slot for each layer that
    shares it. Returns each layer's page table and slot, or None if no size fits. whole [layers]:
    True for full attention. most: upper limit of a slot's bytes."""
    first = _deal(forms, [n for n, sees in enumerate(whole) if sees], most, len(forms))
    # larger layers first, so that no place is left partly empty beside a smaller one
    others = sorted(
        (n for n, sees in enumerate(whole) if not sees), key=lambda n: -forms[n].block_bytes
    )
    plain = sum(form.block_bytes for form in forms)
    for places in range(1 + max(place.storage for _, place in first.values()), len(forms) + 1):
        behind = {
            n: (1 + table, place)
            for n, (table, place) in _deal(forms, others, most, places).items()
        }
        if (1 + max(table for table, _ in behind.values())) * places * most <= MOST_MORE * plain:
            return [(first | behind)[n] for n in range(len(forms))]
    return None


def _deal(
    forms: Sequence[PagedForm], layers: list[int], most: int, places: int
) -> dict[int, tuple[int, PagePlace]]:
    """Assigns layers in order to tables of `places` places with `most` bytes each."""
    dealt, table, number, end = dict[int, tuple[int, PagePlace]](), 0, 0, 0
    for layer in layers:
        unit = _unit(forms[layer], most)
        begin = -(-end // unit) * unit
        if begin + forms[layer].block_bytes > most:
            begin, number = 0, number + 1
        if number == places:
            number, table = 0, table + 1
        dealt[layer] = table, PagePlace(number, begin, most)
        end = begin + forms[layer].block_bytes
    return dealt


def _unit(form: PagedForm, most: int) -> int:
    """Returns the alignment in bytes of a layer's start within a place: kernels skip other layers'
    bytes by whole heads. Formats without heads must fill a whole place."""
    if isinstance(form, KvForm):
        return form.head_bytes
    return form.block_bytes if form.block_bytes == most else most + 1


def open_token_bytes(forms: Sequence[PagedForm], pages: LayerPages | None) -> int:
    """Returns the bytes of cache that a token takes while inside every layer's window."""
    if pages is None:
        return token_bytes(forms)
    return (1 + pages.tables) * (pages.page_bytes // BLOCK_SIZE + TOKEN_BYTES)

"""LayerPages: which layers share the pages of the KV pool, where some see a window only.

    26 layers, each sixth sees everything:   page = 4 layers' K and V of 16 tokens, one place a
    layer
        table 0        the 4 layers that see everything
        table 1 .. 6   the 22 others, four a table (the last has 2)

    30 layers, of which the 5 that see everything store half the bytes of the others:   page = 3
    places of the others'
        table 0        the 5, two a place
        table 1 .. 9   the 25 others, three a table (the last has 1)

A block of 16 tokens takes a page of each table; those of tables 1 and on come back once the window
has passed. Every place is a storage, so layers of different tables share memory, never a page.

It knows layers' windows and what they store; no blocks, no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import BLOCK_SIZE
from penstock.execute.kv_cache import TOKEN_BYTES, PagePlace, token_bytes
from penstock.kernels.layer_kv import KvForm
from penstock.kernels.state_forms import PagedForm
from penstock.models.decoder import Decoder

# times the memory of a token whose window is open, that pages may take for places that stay empty
MOST_MORE = 1.1


@dataclass(frozen=True, slots=True)
class LayerPages:
    """place: of each layer with pages of its own. table: of each block of the model, the table that
    it finds its pages by. window: the widest of those that there are."""

    table: tuple[int, ...]
    place: tuple[PagePlace, ...]
    window: int

    @property
    def tables(self) -> int:
        """Tables of layers with windows."""
        return max(self.table)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all places."""
        return sum({place.storage: place.bytes for place in self.place}.values())


def pages_of(
    model: Decoder, max_model_len: int, forms: Sequence[PagedForm] | None = None
) -> LayerPages | None:
    """Returns how a model's layers share pages. forms: what layers store, in order, where it isn't
    theirs yet.

    Of the pages whose empty places are few enough the smallest: it is what a token keeps when every
    window has passed. None, each layer has storage of its own: no layer has a window (or all have),
    one's is as long as a sequence, a block attends twice, too many places would stay empty, layers
    can share no place (latent vectors of other sizes), or several ranks have any in eight bits."""
    if any(len([k for k in each if k.kind is not None]) > 1 for each in model.keepers):
        return None
    owners = [(owner, owner.kind) for owner in model.owners if owner.kind is not None]
    windows = [kind.window for _, kind in owners]
    some = [window for window in windows if window is not None]
    if not some or len(some) == len(windows) or max(some) >= max_model_len:
        return None
    forms = model.paged_forms if forms is None else forms
    if model.ranks > 1 and any(form.values != model.dtype for form in forms):
        return None  # which keys stay wide is each rank's own finding, and all must decide alike
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
    """whole: which layers see everything.   most: bytes of a place -> of each layer its table and
    its place, in the smallest page with few empty places."""
    first = _deal(forms, [n for n, sees in enumerate(whole) if sees], most, len(forms))
    # Larger ones first, so that no place is left open beside a smaller one.
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
    """Deals layers out to tables of so many places of `most` bytes, one behind the other."""
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
    """Returns of what a layer's first byte in a place, and a place, are multiples: kernels step
    over other layers' bytes by whole heads. Of a form that they don't step over: of all that it
    stores, and it fills its place."""
    if isinstance(form, KvForm):
        return form.head_bytes
    return form.block_bytes if form.block_bytes == most else most + 1


def open_token_bytes(forms: Sequence[PagedForm], pages: LayerPages | None) -> int:
    """Returns the bytes that a token takes of the cache while it is in every layer's window."""
    if pages is None:
        return token_bytes(forms)
    return (1 + pages.tables) * (pages.page_bytes // BLOCK_SIZE + TOKEN_BYTES)

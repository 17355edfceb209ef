"""min_p, top_k and top_p: draw again until a token stays. The contract is in `sample`.

Takes rows that were drawn once. All filters together keep a beginning of the order of tokens, so
they are one cut: the last token that stays. A row with top_k or min_p finds its cut at once, among
as many tiles as tokens stay. A row with top_p alone sums the tokens above the drawn one, in the few
tiles that hold any, and is sorted only after three misses: one row in a thousand at top_p = 0.9.
The choice of rows depends on data, so on a GPU the host waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import TILE
from penstock.kernels.reference.sampling.tile_draw import Drawable, draw, tile_sums

ATTEMPTS = 8
_SCANS = 3  # attempts checked without a sort
_PIECE = 1 << 22  # logits held in float32 at once, in several copies

Stays = Callable[[Tensor, Tensor], Tensor]  # rows [m] int64, tokens [m] -> [m] bool


@dataclass(slots=True)
class Filters:
    """The filters of n rows."""

    top_p: Tensor  # [n] float32
    top_k: Tensor  # [n] int64; the vocabulary's size if off
    min_p: Tensor  # [n] float32

    def take(self, rows: Tensor) -> Filters:
        return Filters(self.top_p[rows], self.top_k[rows], self.min_p[rows])


def filtered(rows: Drawable, top_p: Tensor, top_k: Tensor, min_p: Tensor, tokens: Tensor) -> None:
    """Draws again for rows whose token of attempt 0 is filtered out. tokens: [n] int64, changed in
    place."""
    vocabulary = rows.logits.shape[1]
    k = torch.where(top_k > 0, top_k.to(torch.int64).clamp(max=vocabulary), vocabulary)
    filters = Filters(top_p, k, min_p)
    may = ~rows.greedy & torch.isfinite(rows.top)
    cuts = (k < vocabulary) | (min_p > 0)
    by_cut = torch.nonzero(may & cuts)[:, 0]
    by_scan = torch.nonzero(may & ~cuts & (top_p < 1))[:, 0]
    step = max(1, _PIECE // (rows.peak.shape[1] * TILE))
    for asking, scans in ((by_cut, 0), (by_scan, _SCANS)):
        for some in asking.split(step) if asking.numel() else ():
            tokens[some] = _redrawn(rows.take(some), filters.take(some), tokens[some], scans)


def _redrawn(rows: Drawable, filters: Filters, tokens: Tensor, scans: int) -> Tensor:
    """Returns tokens [n] that stay. tokens: [n] of attempt 0."""
    left = torch.arange(tokens.shape[0], device=tokens.device)
    if scans:
        left = _attempts(
            rows, tokens, left, range(scans), lambda r, t: _scan(rows.take(r), filters.top_p[r], t)
        )
    if left.numel() == 0:
        return tokens
    last, token = _cut(rows.take(left), filters.take(left))
    value, bound = (
        torch.full_like(rows.top, torch.inf).index_copy_(0, left, last),
        tokens.new_zeros(tokens.shape),
    )
    bound.index_copy_(0, left, token)
    left = _attempts(
        rows,
        tokens,
        left,
        range(scans, ATTEMPTS),
        lambda r, t: _inside(_logit(rows, r, t), t, value[r], bound[r]),
    )
    if left.numel():
        tokens[left] = _draw_inside(rows.take(left), value[left], bound[left])
    return tokens


def _attempts(
    rows: Drawable, tokens: Tensor, left: Tensor, attempts: range, stays: Stays
) -> Tensor:
    """Draws rows `left` repeatedly; returns the rows whose token is still filtered out. Attempt 0
    is in `tokens`, which is changed."""
    for attempt in attempts:
        if attempt:
            tokens[left] = draw(rows.take(left), attempt)
        left = left[~stays(left, tokens[left])]
        if left.numel() == 0:
            break
    return left


def _logit(rows: Drawable, row: Tensor, token: Tensor) -> Tensor:
    return rows.logits[rows.place[row], token].to(torch.float32)


def _inside(logit: Tensor, token: Tensor, value: Tensor, bound: Tensor) -> Tensor:
    """Returns True for tokens at or above the cut, whose logit is `value` and id `bound`."""
    return (logit > value) | ((logit == value) & (token <= bound))


def _scan(rows: Drawable, top_p: Tensor, token: Tensor) -> Tensor:
    """Returns True for tokens [n] that stay, for rows with top_p alone."""
    value = _logit(rows, torch.arange(token.shape[0], device=token.device), token)
    return _mass_above(rows, token, value) < top_p * rows.masses().sum(-1)


def _mass_above(rows: Drawable, token: Tensor, value: Tensor) -> Tensor:
    """Returns the mass of the tokens above each row's token [n], [n] float32. In real text few
    tiles have any."""
    row, tile = torch.nonzero(rows.peak >= value[:, None], as_tuple=True)
    logit = rows.tiles(row, tile)
    ids = tile[:, None] * TILE + torch.arange(TILE, device=tile.device)
    above = (logit > value[row, None]) | ((logit == value[row, None]) & (ids < token[row, None]))
    return _by_row(rows, row, tile, rows.e(logit, row).mul_(above).sum(-1))


def _count_of_floor(rows: Drawable, min_p: Tensor) -> Tensor:
    """Returns how many tokens min_p leaves, [n] int64."""
    every = torch.arange(min_p.shape[0], device=min_p.device)
    row, tile = torch.nonzero(rows.e(rows.peak.clone(), every) >= min_p[:, None], as_tuple=True)
    return _by_row(
        rows, row, tile, (rows.e(rows.tiles(row, tile), row) >= min_p[row, None]).sum(-1)
    )


def _by_row(rows: Drawable, row: Tensor, tile: Tensor, sums: Tensor) -> Tensor:
    """Adds sums of some tiles [q] by row [n]. Sums go over all tiles, so that the order doesn't
    depend on other rows."""
    every = torch.zeros(rows.peak.shape, dtype=sums.dtype, device=sums.device)
    every[row, tile] = sums
    return every.sum(-1)


def _cut(rows: Drawable, filters: Filters) -> tuple[Tensor, Tensor]:
    """Returns the last token of each row that stays: its logit [n] float32 and its id [n] int64."""
    k = filters.top_k.clone()
    floored = torch.nonzero(filters.min_p > 0)[:, 0]
    if floored.numel():
        k[floored] = torch.minimum(
            k[floored], _count_of_floor(rows.take(floored), filters.min_p[floored])
        )
    falling = _largest(rows, int(k.max()))
    every = torch.arange(falling.shape[0], device=falling.device)
    e = rows.e(falling.clone(), every)
    place = torch.arange(falling.shape[1], device=falling.device)
    keep = place < k[:, None]
    # Added sequentially: a row's sums must not depend on the k of other rows.
    mass = (e * keep).to(torch.float64)
    sums = mass.cumsum(-1)
    keep &= (filters.top_p >= 1)[:, None] | (sums - mass < filters.top_p[:, None] * sums[:, -1:])
    count = keep.sum(-1).clamp(min=1)
    value = falling.gather(1, (count - 1)[:, None])[:, 0]
    return value, _nth_equal(rows, value, count - (falling > value[:, None]).sum(-1))


def _largest(rows: Drawable, k: int) -> Tensor:
    """Returns each row's k largest logits, falling: [n, k] float32. They lie in the k tiles with
    the largest peaks."""
    n, vocabulary = rows.place.shape[0], rows.logits.shape[1]
    if k > vocabulary // 4:
        return rows.logits[rows.place].to(torch.float32).sort(dim=-1, descending=True).values
    tile = rows.peak.topk(min(k, rows.peak.shape[1]), dim=-1).indices
    row = torch.arange(n, device=tile.device)[:, None].expand_as(tile)
    return rows.tiles(row.reshape(-1), tile.reshape(-1)).view(n, -1).topk(k, dim=-1).values


def _nth_equal(rows: Drawable, value: Tensor, nth: Tensor) -> Tensor:
    """Returns the id of each row's nth token (from 1) whose logit is `value`: [n] int64."""
    row, tile = torch.nonzero(rows.peak >= value[:, None], as_tuple=True)
    equal = torch.zeros(rows.peak.shape, dtype=torch.int64, device=tile.device)
    equal[row, tile] = (rows.tiles(row, tile) == value[row, None]).sum(-1)
    upto = equal.cumsum(-1)
    where = (upto >= nth[:, None]).to(torch.int8).argmax(-1)
    before = (upto - equal).gather(1, where[:, None])
    every = torch.arange(value.shape[0], device=tile.device)
    lanes = (rows.tiles(every, where) == value[:, None]).cumsum(-1) + before
    return where * TILE + (lanes >= nth[:, None]).to(torch.int8).argmax(-1)


def _draw_inside(rows: Drawable, value: Tensor, bound: Tensor) -> Tensor:
    """Sets filtered tokens to -inf and draws with attempt 8, for the few rows that all attempts
    missed."""
    logits = rows.logits[rows.place].to(torch.float32)
    ids = torch.arange(logits.shape[1], device=logits.device)
    logits.masked_fill_(~_inside(logits, ids, value[:, None], bound[:, None]), -torch.inf)
    peak, top, mass = tile_sums(logits, rows.scale)
    place = torch.arange(logits.shape[0], device=logits.device)
    return draw(
        Drawable(logits, place, peak, top, mass, rows.scale, rows.greedy, rows.key, rows.position),
        ATTEMPTS,
    )

"""The filters min_p, top_k and top_p in plain torch. A row whose sampled token is filtered out is
sampled again until a token passes. The contract is in `sample`.

Tokens are ordered by their logits. The filters together keep the first tokens of this order, so the
last kept token (the cut) decides about all tokens. For a row with top_k or min_p the cut is
computed at once, from at most as many tiles of 128 tokens as there are kept tokens. For a row with
top_p alone, the probabilities of the tokens above the sampled one are summed, in the few tiles that
have any. It is sorted only after three attempts, which at top_p = 0.9 happens to one row in a
thousand.

On a GPU the host waits for the device, since which rows are sampled again depends on data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import TILE
from penstock.kernels.reference.sampling.tile_draw import Drawable, draw, tile_sums

ATTEMPTS = 8
_SCANS = 3  # attempts that are checked without sorting
_PIECE = 1 << 22  # logits that are processed at once, in float32 and several copies

# function (rows [m] int64, tokens [m]) -> [m] bool: True if the token passes the filters
Stays = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Filters:
    """The filters of n rows, in the order of the rows."""

    top_p: Tensor  # [n] float32
    top_k: Tensor  # [n] int64; the vocabulary's size if off
    min_p: Tensor  # [n] float32

    def take(self, rows: Tensor) -> Filters:
        return Filters(self.top_p[rows], self.top_k[rows], self.min_p[rows])


def filtered(rows: Drawable, top_p: Tensor, top_k: Tensor, min_p: Tensor, tokens: Tensor) -> None:
    """Samples again for rows whose token is filtered out. tokens: [n] int64, sampled in attempt 0;
    changed in place. top_p, top_k, min_p: [n]."""
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
    """Returns tokens [n] that pass the filters. tokens: [n], sampled in attempt 0. scans: attempts
    that are checked without sorting."""
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
    """Samples rows `left` [m] again, attempt by attempt, until their tokens pass; returns the rows
    whose token is still filtered out. tokens: [n], changed in place. stays: tells whether tokens
    pass."""
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
    """Returns True for tokens that come before the cut or are the cut. logit, token: of the tokens.
    value, bound: logit and id of the cut."""
    return (logit > value) | ((logit == value) & (token <= bound))


def _scan(rows: Drawable, top_p: Tensor, token: Tensor) -> Tensor:
    """Returns True for tokens [n] that pass top_p, for rows with top_p as their only filter."""
    value = _logit(rows, torch.arange(token.shape[0], device=token.device), token)
    return _mass_above(rows, token, value) < top_p * rows.masses().sum(-1)


def _mass_above(rows: Drawable, token: Tensor, value: Tensor) -> Tensor:
    """Returns the mass (sum of e, see `sample`) of the tokens that come before each row's token
    [n], [n] float32. value: the tokens' logits. For real text, few tiles have such tokens."""
    row, tile = torch.nonzero(rows.peak >= value[:, None], as_tuple=True)
    logit = rows.tiles(row, tile)
    ids = tile[:, None] * TILE + torch.arange(TILE, device=tile.device)
    above = (logit > value[row, None]) | ((logit == value[row, None]) & (ids < token[row, None]))
    return _by_row(rows, row, tile, rows.e(logit, row).mul_(above).sum(-1))


def _count_of_floor(rows: Drawable, min_p: Tensor) -> Tensor:
    """Returns how many tokens of each row pass min_p, [n] int64."""
    every = torch.arange(min_p.shape[0], device=min_p.device)
    row, tile = torch.nonzero(rows.e(rows.peak.clone(), every) >= min_p[:, None], as_tuple=True)
    return _by_row(
        rows, row, tile, (rows.e(rows.tiles(row, tile), row) >= min_p[row, None]).sum(-1)
    )


def _by_row(rows: Drawable, row: Tensor, tile: Tensor, sums: Tensor) -> Tensor:
    """Adds the sums of some tiles, [q], for each row, [n]. row, tile: [q], row and tile of each
    sum. A row's sum goes over all its tiles, with zeros for the others, so that the order of
    summing doesn't depend on other rows."""
    every = torch.zeros(rows.peak.shape, dtype=sums.dtype, device=sums.device)
    every[row, tile] = sums
    return every.sum(-1)


def _cut(rows: Drawable, filters: Filters) -> tuple[Tensor, Tensor]:
    """Returns the cut of each row, its last kept token: logit [n] float32 and id [n] int64."""
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
    """Returns each row's k largest logits in falling order, [n, k] float32. They are in the k tiles
    with the largest peaks (largest logit of a tile)."""
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
    """Samples with attempt 8, for the few rows for which no earlier attempt passed: all filtered
    tokens are set to -inf first. value, bound: logit and id of the cut."""
    logits = rows.logits[rows.place].to(torch.float32)
    ids = torch.arange(logits.shape[1], device=logits.device)
    logits.masked_fill_(~_inside(logits, ids, value[:, None], bound[:, None]), -torch.inf)
    peak, top, mass = tile_sums(logits, rows.scale)
    place = torch.arange(logits.shape[0], device=logits.device)
    return draw(
        Drawable(logits, place, peak, top, mass, rows.scale, rows.greedy, rows.key, rows.position),
        ATTEMPTS,
    )

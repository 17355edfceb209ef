"""sample: one token a row from its logits. This file is the contract: every column draws the same token from the same
logits (but for near-ties, where another order of adding moves a last bit).
 It knows rows of logits (penalties, bias and barred ids are in them already) and `SamplerInputs`; no rows of the
engine, no end ids. A row's token depends on that row alone.

Let l be a row's logits in float32, cut into tiles of 128 (the last one filled up with -inf), top = max l, T the row's
temperature, z = (l - top) * (1 / max(T, 1e-6)), e = exp(z).

    bad      l holds a NaN or +inf, or nothing above -inf: the token is BAD_LOGITS
    greedy   T = 0, or top_k = 1: the lowest id among those with l = top
    draw     tile: the largest of log(sum of e over the tile) + gumbel(stream TILES, the tile's index); then in that
             tile the largest of z + gumbel(stream LANES, 0..127). The lower index wins a tie. Noise: see `noise`.
             Exact: the first is a tile with its share of the mass, the second a token with its share of the tile.
 Filters of a row that asks, in the order min_p, top_k, top_p, each over what the one before left. Tokens are ordered
by l, the lower id first among equals; "above x" is before x in that order.

    min_p    x stays if e(x) >= min_p
    top_k    x stays if fewer than top_k tokens are above it
    top_p    x stays if the mass of the tokens above it is below top_p times the mass of all that min_p and top_k left
 Each keeps a beginning of the order, so all of them together do. A token is drawn without filters, with attempt 0, 1,
... 7 in the noise's counter, until one stays; then, with attempt 8, from the row with all that doesn't stay set to
-inf. Drawing again until one stays is the filtered distribution, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import SamplerInputs
from penstock.kernels.reference.noise import LANES, TILES, gumbel, keys, row_keys

TILE = 128
ATTEMPTS = 8
BAD_LOGITS = -2
MIN_TEMPERATURE = 1e-6

# Logits worked on at once. The float32 copy of a bf16 head is made in such pieces, so that it stays in the cache.
_PIECE = 1 << 20
# The same for rows that ask for filters, which need several arrays of that size at once.
_FILTER_PIECE = 1 << 22


@dataclass(slots=True)
class _Rows:
    """n rows of logits and what one pass over them gave."""

    logits: Tensor  # [n, vocabulary], any float type
    peak: Tensor  # [n, tiles] float32: the largest logit of each tile
    top: Tensor  # [n] float32
    mass: Tensor | None  # [n, tiles] float32: sum of e; None when every row is greedy
    scale: Tensor  # [n] float32: 1 / T
    greedy: Tensor  # [n] bool
    key: Tensor  # [2, n] int32
    position: Tensor  # [n] int32

    def take(self, rows: Tensor) -> _Rows:
        """Some rows, their logits in float32. rows [m] int64."""
        assert self.mass is not None
        return _Rows(
            self.logits[rows].to(torch.float32), self.peak[rows], self.top[rows], self.mass[rows],
            self.scale[rows], self.greedy[rows], self.key[:, rows], self.position[rows],
        )  # fmt: skip


def sample(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """logits [n, vocabulary] of any float type -> tokens [n] int32, BAD_LOGITS where a row's logits are not finite."""
    rows = _read(logits, inputs)
    tokens = _draw(rows, 0)
    if inputs.any_filter and inputs.any_random:
        _filter(rows, inputs, tokens)
    return torch.where(torch.isfinite(rows.top), tokens, BAD_LOGITS).to(torch.int32)


def _read(logits: Tensor, inputs: SamplerInputs) -> _Rows:
    greedy = (inputs.temperature <= 0) | (inputs.top_k == 1)
    scale = inputs.temperature.clamp(min=MIN_TEMPERATURE).reciprocal()
    peak, top, mass = tile_sums(logits, scale, masses=inputs.any_random)
    key = row_keys(inputs.seed, inputs.sample)
    return _Rows(logits, peak, top, mass, scale, greedy, key, inputs.position)


def tile_sums(logits: Tensor, scale: Tensor, masses: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """One pass: peak [n, tiles], top [n], and sums of exp((l - top) * scale) [n, tiles] if asked, all float32.

    The adding goes by tile and then over tiles, so that a row's sums don't depend on how many rows there are.
    """
    n, vocabulary = logits.shape
    tiles = -(-vocabulary // TILE)
    peak = torch.empty((n, tiles), dtype=torch.float32, device=logits.device)
    mass = torch.empty_like(peak) if masses else None
    step = max(1, min(n, _PIECE // (tiles * TILE)))
    buffer = torch.empty((step, tiles * TILE), dtype=torch.float32, device=logits.device)
    for first in range(0, n, step):
        piece = buffer[: min(step, n - first)]
        last = first + piece.shape[0]
        piece[:, :vocabulary] = logits[first:last]
        piece[:, vocabulary:] = -torch.inf
        tiled = piece.view(-1, tiles, TILE)
        torch.amax(tiled, -1, out=peak[first:last])
        if mass is not None:
            piece.sub_(peak[first:last].amax(-1, keepdim=True)).mul_(scale[first:last, None]).exp_()
            torch.sum(tiled, -1, out=mass[first:last])
    return peak, peak.amax(-1) if n else peak.new_empty(0), mass


def _draw(rows: _Rows, attempt: int) -> Tensor:
    """-> [n] int64. Rows that are bad get any token."""
    score = rows.peak
    if rows.mass is not None:
        noise = gumbel(keys(rows.key, rows.position, attempt, TILES), rows.peak.shape[1])
        score = torch.where(rows.greedy[:, None], rows.peak, noise.add_(rows.mass.log()))
    tile = score.argmax(-1)
    score = tile_logits(rows.logits, torch.arange(tile.shape[0], device=tile.device), tile)
    if rows.mass is not None:
        noise = gumbel(keys(rows.key, rows.position, attempt, LANES), TILE)
        z = (score - rows.top[:, None]).mul_(rows.scale[:, None])
        score = torch.where(rows.greedy[:, None], score, noise.add_(z))
    return tile * TILE + score.argmax(-1)


def tile_logits(logits: Tensor, row: Tensor, tile: Tensor) -> Tensor:
    """The logits of tile `tile[i]` of row `row[i]`: both [q] int64 -> [q, 128] float32, -inf past the vocabulary."""
    n, vocabulary = logits.shape
    if vocabulary % TILE == 0 and logits.is_contiguous():
        tiles = vocabulary // TILE
        return logits.view(n * tiles, TILE).index_select(0, row * tiles + tile).to(torch.float32)
    column = tile[:, None] * TILE + torch.arange(TILE, device=tile.device)
    values = logits[row[:, None], column.clamp(max=vocabulary - 1)].to(torch.float32)
    return values.masked_fill_(column >= vocabulary, -torch.inf)


def _filter(rows: _Rows, inputs: SamplerInputs, tokens: Tensor) -> None:
    """Draws again for rows whose token doesn't stay. tokens [n] int64 are changed in place.

    Which rows those are is data: on a GPU this column waits for it.
    """
    asks = (inputs.top_p < 1) | (inputs.top_k > 0) | (inputs.min_p > 0)
    asking = torch.nonzero(asks & ~rows.greedy & torch.isfinite(rows.top))[:, 0]
    tiles = rows.peak.shape[1]
    for some in asking.split(max(1, _FILTER_PIECE // (tiles * TILE))):
        tokens[some] = _filtered(
            rows.take(some), inputs.top_p[some], inputs.top_k[some], inputs.min_p[some], tokens[some]
        )


def _filtered(rows: _Rows, top_p: Tensor, top_k: Tensor, min_p: Tensor, tokens: Tensor) -> Tensor:
    """tokens [n] int64 of attempt 0 -> [n] int64 that stay."""
    allowed = _allowed_mass(rows, top_k, min_p)
    left = torch.arange(tokens.shape[0], device=tokens.device)
    for attempt in range(ATTEMPTS):
        some = rows if attempt == 0 else rows.take(left)
        drawn = tokens if attempt == 0 else _draw(some, attempt)
        stays = _stays(some, drawn, allowed[left], top_p[left], top_k[left], min_p[left])
        tokens = tokens.index_copy(0, left, drawn)
        left = left[~stays]
        if left.numel() == 0:
            return tokens
    return tokens.index_copy(0, left, _draw_kept(rows.take(left), top_p[left], top_k[left], min_p[left]))


def _stays(rows: _Rows, drawn: Tensor, allowed: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Whether each row's drawn token [n] passes its filters -> [n] bool."""
    value = rows.logits.gather(1, drawn[:, None])[:, 0]
    share = ((value - rows.top) * rows.scale).exp()
    count, mass = _above(rows, drawn, value)
    inside = (top_k <= 0) | (count < top_k)
    return inside & (share >= min_p) & ((top_p >= 1) | (mass < top_p * allowed))


def _above(rows: _Rows, drawn: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens are above each row's drawn one, and their mass: [n] int64, [n] float32.

    Only tiles whose peak reaches the drawn token's logit are looked at; in real text those are few.
    """
    row, tile = torch.nonzero(rows.peak >= value[:, None], as_tuple=True)
    logit = tile_logits(rows.logits, row, tile)
    token = tile[:, None] * TILE + torch.arange(TILE, device=tile.device)
    above = (logit > value[row, None]) | ((logit == value[row, None]) & (token < drawn[row, None]))
    e = logit.sub_(rows.top[row, None]).mul_(rows.scale[row, None]).exp_().mul_(above)
    count = torch.zeros(rows.peak.shape, dtype=torch.int64, device=drawn.device)
    mass = torch.zeros_like(rows.peak)
    count[row, tile] = above.sum(-1)
    mass[row, tile] = e.sum(-1)
    return count.sum(-1), mass.sum(-1)


def _allowed_mass(rows: _Rows, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Mass that min_p and top_k leave -> [n] float32."""
    assert rows.mass is not None
    mass = rows.mass.sum(-1)
    vocabulary = rows.logits.shape[1]
    k_rows = torch.nonzero((top_k > 0) & (top_k < vocabulary))[:, 0]
    p_rows = torch.nonzero((min_p > 0) & ~((top_k > 0) & (top_k < vocabulary)))[:, 0]
    if p_rows.numel():
        mass[p_rows] = _mass_above_floor(rows.take(p_rows), min_p[p_rows])
    if k_rows.numel():
        mass[k_rows] = _mass_of_largest(rows.take(k_rows), top_k[k_rows], min_p[k_rows])
    return mass


def _mass_above_floor(rows: _Rows, min_p: Tensor) -> Tensor:
    tallest = ((rows.peak - rows.top[:, None]) * rows.scale[:, None]).exp_()
    row, tile = torch.nonzero(tallest >= min_p[:, None], as_tuple=True)
    e = tile_logits(rows.logits, row, tile).sub_(rows.top[row, None]).mul_(rows.scale[row, None]).exp_()
    mass = torch.zeros_like(rows.peak)
    mass[row, tile] = e.mul_(e >= min_p[row, None]).sum(-1)
    return mass.sum(-1)


def _mass_of_largest(rows: _Rows, top_k: Tensor, min_p: Tensor) -> Tensor:
    """The k largest logits lie in the k tiles with the largest peaks; of equals any will do, their mass is equal."""
    n, vocabulary = rows.logits.shape
    k = min(int(top_k.max()), vocabulary)
    tile = rows.peak.topk(min(k, rows.peak.shape[1]), dim=-1).indices
    row = torch.arange(n, device=tile.device)[:, None].expand_as(tile)
    largest = tile_logits(rows.logits, row.reshape(-1), tile.reshape(-1)).view(n, -1).topk(k, dim=-1).values
    e = largest.sub_(rows.top[:, None]).mul_(rows.scale[:, None]).exp_()
    # Added one after the other: a row's sum must not depend on the k of its neighbours.
    sums = e.mul_(e >= min_p[:, None]).to(torch.float64).cumsum(-1)
    return sums.gather(1, (top_k.to(torch.int64).clamp(max=k) - 1)[:, None])[:, 0].to(torch.float32)


def _draw_kept(rows: _Rows, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Sorts whole rows, sets what doesn't stay to -inf, draws with attempt 8. For the few that all attempts missed."""
    falling, order = rows.logits.sort(dim=-1, descending=True, stable=True)
    e = falling.sub_(rows.top[:, None]).mul_(rows.scale[:, None]).exp_()
    place = torch.arange(e.shape[1], device=e.device)
    keep = (e >= min_p[:, None]) & ((top_k <= 0)[:, None] | (place < top_k[:, None]))
    mass = (e * keep).to(torch.float64)
    sums = mass.cumsum(-1)
    keep &= (top_p >= 1)[:, None] | (sums - mass < top_p[:, None] * sums[:, -1:])
    keep = torch.zeros_like(keep).scatter_(1, order, keep)
    logits = rows.logits.masked_fill(~keep, -torch.inf)
    peak, top, mass_kept = tile_sums(logits, rows.scale)
    return _draw(_Rows(logits, peak, top, mass_kept, rows.scale, rows.greedy, rows.key, rows.position), ATTEMPTS)

"""Samples a token without filters. First it samples a tile of 128 logits, then a logit of the tile.
The contract is in `sample`.

Knows rows of logits and their random numbers; no filters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import TILE, VocabularyPart
from penstock.kernels.reference.sampling.noise import LANES, TILES, gumbel, keys

BAD_LOGITS = -2
MIN_TEMPERATURE = 1e-6

# Logits that are processed at once, so that the float32 copy of bf16 logits stays in the cache.
_PIECE = 1 << 20


@dataclass(slots=True)
class Drawable:
    """n rows to sample from, with the results of a pass over their logits. T: temperature; e =
    exp((logit - top) / T)."""

    logits: Tensor  # [any, vocabulary], any float type
    place: Tensor  # [n] int64: index of each row in `logits`
    peak: Tensor  # [n, tiles] float32: the largest logit of each tile
    top: Tensor  # [n] float32: the largest logit of each row
    mass: Tensor | None  # [n, tiles] float32: sum of e over each tile; None: every row is greedy
    scale: Tensor  # [n] float32: 1 / T
    greedy: Tensor  # [n] bool
    key: Tensor  # [2, n] int32, from noise.row_keys
    position: Tensor  # [n] int32
    part: VocabularyPart | None = None  # this rank's range of the vocabulary; None: all

    def take(self, rows: Tensor) -> Drawable:
        """Returns the rows with indices `rows` [m] int64, without copying their logits."""
        return Drawable(
            self.logits,
            self.place[rows],
            self.peak[rows],
            self.top[rows],
            self.masses()[rows],
            self.scale[rows],
            self.greedy[rows],
            self.key[:, rows],
            self.position[rows],
            self.part,
        )

    def masses(self) -> Tensor:
        assert self.mass is not None, "every row is greedy"
        return self.mass

    def tiles(self, row: Tensor, tile: Tensor) -> Tensor:
        """Returns the logits of tile tile[i] of row row[i], [q, 128] float32; -inf past the end of
        the vocabulary. row, tile: [q] int64."""
        return tile_logits(self.logits, self.place[row], tile)

    def e(self, logit: Tensor, row: Tensor) -> Tensor:
        """Replaces logits [q, any], where line i is of row row[i], with e = exp((logit - top) / T),
        in place; returns them."""
        return logit.sub_(self.top[row, None]).mul_(self.scale[row, None]).exp_()


def tile_sums(
    logits: Tensor,
    scale: Tensor,
    masses: bool = True,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the largest logit of each tile [n, tiles] and of each row [n], and with `masses` the
    sum over each tile [n, tiles] of exp((logit - top) * scale), where top is the row's largest
    logit. All are float32, from one pass over the logits. scale: 1 / temperature, [n].

    Sums are made by tile and then over tiles, so that they don't depend on the number of rows.
    agree: if the logits are a rank's part of a vocabulary, a function from its largest logits [n]
    to those of the whole; sums then take a second pass."""
    n, vocabulary = logits.shape
    tiles = -(-vocabulary // TILE)
    peak = torch.empty((n, tiles), dtype=torch.float32, device=logits.device)
    top = torch.empty(n, dtype=torch.float32, device=logits.device)
    mass = torch.empty_like(peak) if masses else None
    step = max(1, min(n, _PIECE // (tiles * TILE)))
    buffer = torch.empty((step, tiles * TILE), dtype=torch.float32, device=logits.device)

    def one_pass(peaks: bool, masses: bool) -> None:
        for first in range(0, n, step):
            piece = buffer[: min(step, n - first)]
            some = slice(first, first + piece.shape[0])
            piece[:, :vocabulary] = logits[some]
            piece[:, vocabulary:] = -torch.inf
            tiled = piece.view(-1, tiles, TILE)
            if peaks:
                torch.amax(tiled, -1, out=peak[some])
                torch.amax(peak[some], -1, out=top[some])
            if masses:
                piece.sub_(top[some, None]).mul_(scale[some, None]).exp_()
                torch.sum(tiled, -1, out=mass[some])

    one_pass(True, masses and agree is None)
    if agree is not None:
        top = agree(top)
        if masses:
            one_pass(False, True)
    return peak, top, mass


def draw(rows: Drawable, attempt: int) -> Tensor:
    """Samples tokens [n] int64; they are arbitrary for rows with logits that are not finite.
    attempt: enters the random numbers."""
    score, token = draw_here(rows, attempt)
    return token if rows.part is None else rows.part.best(score, token)


def draw_here(rows: Drawable, attempt: int) -> tuple[Tensor, Tensor]:
    """Samples from this rank's part of the vocabulary. Returns the score of the sampled tile [n]
    float32 and the token [n] int64. The rank with the largest score has the token of the whole
    vocabulary."""
    first = 0 if rows.part is None else rows.part.first
    score = rows.peak
    if rows.mass is not None:
        noise = gumbel(
            keys(rows.key, rows.position, attempt, TILES), rows.peak.shape[1], first // TILE
        )
        score = torch.where(rows.greedy[:, None], rows.peak, noise.add_(rows.mass.log()))
    best, tile = score.max(-1)
    score = tile_logits(rows.logits, rows.place, tile)
    if rows.mass is not None:
        noise = gumbel(keys(rows.key, rows.position, attempt, LANES), TILE)
        z = (score - rows.top[:, None]).mul_(rows.scale[:, None])
        score = torch.where(rows.greedy[:, None], score, noise.add_(z))
    return best, first + tile * TILE + score.argmax(-1)


def tile_logits(logits: Tensor, row: Tensor, tile: Tensor) -> Tensor:
    """Returns the logits of tile tile[i] of line row[i], [q, 128] float32; -inf past the end of the
    vocabulary. row, tile: [q] int64."""
    n, vocabulary = logits.shape
    if vocabulary % TILE == 0 and logits.is_contiguous():
        tiles = vocabulary // TILE
        return logits.view(n * tiles, TILE).index_select(0, row * tiles + tile).to(torch.float32)
    column = tile[:, None] * TILE + torch.arange(TILE, device=tile.device)
    values = logits[row[:, None], column.clamp(max=vocabulary - 1)].to(torch.float32)
    return values.masked_fill_(column >= vocabulary, -torch.inf)

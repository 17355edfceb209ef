"""sample: samples one token a row from its logits. This file is the contract for all
implementations: from the same logits they sample the same token (except near-ties, where another
order of summing changes a last bit).

Knows rows of logits, to which penalties, bias and barred ids were applied, and `SamplerInputs`; no
rows of the engine, no end ids. A row's token depends on that row alone.

Let l be a row's logits in float32, cut into tiles of 128 (the last one padded with -inf), top = max
l, T the row's temperature, z = (l - top) * (1 / max(T, 1e-6)), e = exp(z).

  bad      l holds a NaN or +inf, or nothing above -inf: the token is BAD_LOGITS
  greedy   T = 0, or top_k = 1: the lowest id among those with l = top
  draw     first a tile: the largest of log(sum of e over the tile) + gumbel(stream TILES, the
           tile's index); then in that tile the largest of z + gumbel(stream LANES, 0..127). The
           lower index wins a tie. Noise: see `noise`. This is exact: a tile is drawn by its share
           of the mass, a token by its share of the tile.

Filters apply in the order min_p, top_k, top_p, each to the tokens that passed the one before. A
token "stays" if it passes. Tokens are ordered by l, the lower id first among equals; "above x"
means before x in that order.

  min_p    x stays if e(x) >= min_p
  top_k    x stays if fewer than top_k tokens are above it
  top_p    x stays if the mass of the tokens above it is below top_p times the mass left by min_p
           and top_k

Each filter keeps the first tokens of the order, so all of them together do. A token is drawn
without filters, with attempt 0, 1, ... 7 in the noise's counter, until one stays; then, with
attempt 8, from the row with all filtered tokens set to -inf. Drawing again until one stays gives
exactly the filtered distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import SamplerInputs, VocabularyPart
from penstock.kernels.reference.sampling.filters import filtered
from penstock.kernels.reference.sampling.noise import row_keys
from penstock.kernels.reference.sampling.tile_draw import (
    BAD_LOGITS,
    MIN_TEMPERATURE,
    Drawable,
    draw,
    tile_sums,
)
from penstock.kernels.row_state import RowState


def sample(logits: Tensor, inputs: SamplerInputs, part: VocabularyPart | None = None) -> Tensor:
    """Returns tokens [n] int32, BAD_LOGITS if a row's logits are not finite. logits: [n,
    vocabulary] of any float type. part: this rank's range if ranks divide the vocabulary. Filters
    are then not applied here; `rank_filters` does it."""
    rows = read_rows(logits, inputs, part)
    tokens = draw(rows, 0)
    if inputs.any_filter and inputs.any_random:
        filtered(rows, inputs.top_p, inputs.top_k, inputs.min_p, tokens)
    return torch.where(torch.isfinite(rows.top), tokens, BAD_LOGITS).to(torch.int32)


def read_rows(
    logits: Tensor, inputs: SamplerInputs, part: VocabularyPart | None = None
) -> Drawable:
    """Returns the data from which tokens are sampled. Reads the logits once, or twice if they are a
    part of a vocabulary."""
    greedy = (inputs.temperature <= 0) | (inputs.top_k == 1)
    scale = inputs.temperature.clamp(min=MIN_TEMPERATURE).reciprocal()
    peak, top, mass = tile_sums(
        logits, scale, inputs.any_random, None if part is None else part.most
    )
    place = torch.arange(logits.shape[0], device=logits.device)
    return Drawable(
        logits,
        place,
        peak,
        top,
        mass,
        scale,
        greedy,
        row_keys(inputs.seed, inputs.sample),
        inputs.position,
        part,
    )


@dataclass(slots=True)
class SampleScratch:
    """Buffers that `penalties.adjust` fills and `sample_rows` reads. adjusted: float32 logits [n,
    vocabulary], allocated when a row needs them."""

    adjusted: Tensor | None = None
    inners: Tensor | None = None  # used by the Triton column

    @classmethod
    def allocate(cls, n: int, vocabulary: int, device: torch.device) -> SampleScratch:
        return cls()


def sample_rows(
    logits: Tensor,
    row_ids: Tensor,
    position: Tensor,
    rows: RowState,
    scratch: SampleScratch,
    tokens: Tensor,
    *,
    filters: bool,
    adjusts: bool,
    part: VocabularyPart | None = None,
) -> Tensor:
    """Returns tokens [n] int32, BAD_LOGITS if a row's logits are not finite. logits: [n,
    vocabulary] of rows row_ids [n] int32 at position [n].

    The token's position is position + 1. adjusts: True samples from the output of
    `penalties.adjust`. filters: True applies min_p, top_k and top_p. Both may be False only if the
    host knows that no row needs them. part: see `sample`."""
    random = bool((rows.temperature[row_ids.to(torch.int64)] > 0).any())
    inputs = inputs_of(row_ids, position, rows, any_filter=filters, any_random=random)
    drawn = scratch.adjusted if adjusts and scratch.adjusted is not None else logits
    return tokens.copy_(sample(drawn, inputs, part))


def inputs_of(
    row_ids: Tensor, position: Tensor, rows: RowState, *, any_filter: bool, any_random: bool
) -> SamplerInputs:
    """Returns the sampling parameters of rows row_ids [n] at position [n], for the next token."""
    row = row_ids.to(torch.int64)
    return SamplerInputs(
        temperature=rows.temperature[row],
        top_p=rows.top_p[row],
        top_k=rows.top_k[row],
        min_p=rows.min_p[row],
        seed=rows.seed[row],
        sample=rows.sample[row],
        position=position.to(torch.int32) + 1,
        any_filter=any_filter,
        any_random=any_random,
    )

"""sample: samples one token per row from its logits. The token is that of
reference/sampling/sample.py, except for near-ties. The host takes no part in it.

There are three launches, whatever rows need: `tile_sums` reads the logits once, `draw` samples a
token of each row, and `filters` samples again for rows with min_p, top_k or top_p (other rows'
programs return at once).

  sample        the contract of Ops: n rows whose parameters are given in the same order
  sample_rows   for the runner: parameters are in the per-row arrays; rows that are done are skipped

Before it, `penalties.adjust` applies penalties; after it, `logprobs` computes log-probabilities.
Knows rows of logits and per-row arrays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import TILE, SamplerInputs, VocabularyPart
from penstock.kernels.reference.sampling.tile_draw import BAD_LOGITS, MIN_TEMPERATURE
from penstock.kernels.row_state import RowState
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import has_pdl
from penstock.kernels.triton.sampling.advance import NO_TOKEN
from penstock.kernels.triton.sampling.draw import draw_kernel
from penstock.kernels.triton.sampling.filters import filter_kernel
from penstock.kernels.triton.sampling.tile_sums import LOG2E, tile_sums_kernel
from penstock.row_table import WANTS_ADJUST

ATTEMPTS = 8
# rows are divided among programs of `tile_sums` until there are about so many programs
PROGRAMS = 132 * 64
TILES = 16  # tiles that an iteration of `tile_sums` reads
SOME = 32  # tiles that an iteration of the filters reads
SUM_WARPS, DRAW_WARPS, FILTER_WARPS = 4, 4, 8


@dataclass(slots=True)
class SampleScratch:
    """Scratch memory for sampling n rows. Each call overwrites it, so calls on the same stream may
    share it. A tile is 128 tokens of the vocabulary; tiles: their number."""

    peaks: Tensor  # [n, tiles] float32: largest logit of each tile
    masses: Tensor  # [n, tiles] float32: sum of exponentials of each tile, relative to its peak
    lists: Tensor  # [n, tiles] int32: ids of the tiles that the filters read
    inners: Tensor  # [n, tiles] float32: mass of each tile's tokens that the filters keep
    adjusted: Tensor | None = (
        None  # [n, vocabulary] float32: written by `penalties.adjust` for rows that need it
    )

    @classmethod
    def allocate(
        cls, n: int, vocabulary: int, device: torch.device, adjusts: bool = True
    ) -> SampleScratch:
        """Allocates scratch memory. n: the most rows of a call. It takes about 16 KB a row. With
        `adjusts` it has room for adjusted logits too, 4 bytes for each logit."""
        shape = (n, -(-vocabulary // TILE))
        peaks, masses, inners = (
            torch.empty(shape, dtype=torch.float32, device=device) for _ in range(3)
        )
        lists = torch.empty(shape, dtype=torch.int32, device=device)
        adjusted = (
            torch.empty((n, vocabulary), dtype=torch.float32, device=device) if adjusts else None
        )
        return cls(peaks, masses, lists, inners, adjusted)


def sample(logits: Tensor, inputs: SamplerInputs) -> Tensor:
    """Returns tokens [n] int32, BAD_LOGITS if a row's logits are not finite. logits: [n,
    vocabulary] of any float type."""
    n, vocabulary = logits.shape
    tokens = torch.empty(n, dtype=torch.int32, device=logits.device)
    if n:
        scratch = SampleScratch.allocate(n, vocabulary, logits.device, adjusts=False)
        _launch(
            logits,
            None,
            inputs,
            inputs.position,
            0,
            None,
            None,
            scratch,
            tokens,
            inputs.any_filter,
            False,
        )
    return tokens


def sample_rows(
    logits: Tensor,
    row_ids: Tensor,
    position: Tensor,
    rows: RowState,
    scratch: SampleScratch,
    tokens: Tensor | None = None,
    *,
    filters: bool = True,
    adjusts: bool = False,
    part: VocabularyPart | None = None,
) -> Tensor:
    """Returns tokens [n] int32: BAD_LOGITS if a row's logits are not finite, NO_TOKEN if the row is
    done. logits: [n, vocabulary] of rows row_ids [n], computed from their tokens up to `position`
    [n].

    The sampled token's position is position + 1. adjusts: True samples rows whose rows.wants has a
    bit of WANTS_ADJUST from scratch.adjusted, which `penalties.adjust` has filled. filters: False
    skips the launch of the filters. Both may be False only if the host knows that no row needs
    them. part: this rank's range if ranks divide the vocabulary; filters are then not applied here.
    """
    n, vocabulary = logits.shape
    if tokens is None:
        tokens = torch.empty(n, dtype=torch.int32, device=logits.device)
    assert n <= scratch.peaks.shape[0] and scratch.peaks.shape[1] == -(-vocabulary // TILE)
    assert not adjusts or (scratch.adjusted is not None and logits.stride(0) == vocabulary)
    assert part is None or not filters
    if n:
        _launch(
            logits,
            row_ids,
            rows,
            position,
            1,
            rows.done,
            rows.wants,
            scratch,
            tokens,
            filters,
            adjusts,
            part,
        )
    return tokens


def _launch(
    logits: Tensor,
    row_ids: Tensor | None,
    asked: SamplerInputs | RowState,
    position: Tensor,
    added: int,
    done: Tensor | None,
    wants: Tensor | None,
    scratch: SampleScratch,
    tokens: Tensor,
    filters: bool,
    adjusts: bool,
    part: VocabularyPart | None = None,
) -> None:
    n, vocabulary = logits.shape
    tiles = scratch.peaks.shape[1]
    assert logits.stride(1) == 1
    by_row, adjusted = row_ids is not None, scratch.adjusted if adjusts else logits
    row_ids, done, wants = (tokens if x is None else x for x in (row_ids, done, wants))
    rounds = cdiv(tiles, TILES)
    parts = min(rounds, max(1, PROGRAMS // n))
    each = cdiv(rounds, parts)
    early = has_pdl(logits.device)
    same = {
        "EARLY": early,
        "launch_pdl": bool(early),
        "ADJUSTS": WANTS_ADJUST,
        "BY_ROW": by_row,
        "HAS_ADJUSTED": adjusts,
        "TILE": TILE,
        "MIN_T": MIN_TEMPERATURE,
    }
    tile_sums_kernel[(n, cdiv(rounds, each))](
        logits,
        adjusted,
        row_ids,
        asked.temperature,
        done,
        wants,
        scratch.peaks,
        scratch.masses,
        vocabulary,
        logits.stride(0),
        tiles,
        each,
        LOG2E=LOG2E,
        TILES=TILES,
        num_warps=SUM_WARPS,
        **same,
    )
    same |= {"ADDED": added, "NT": next_power_of_2(tiles)}
    tops = scores = scratch.masses
    if part is not None:
        tops, scores = (
            part.most(_tops(scratch, n)),
            torch.zeros(n, dtype=torch.float32, device=logits.device),
        )
    draw_kernel[(n,)](
        logits,
        adjusted,
        row_ids,
        asked.temperature,
        asked.top_k,
        asked.seed,
        asked.sample,
        position,
        done,
        wants,
        scratch.peaks,
        scratch.masses,
        tokens,
        tops,
        scores,
        part.first // TILE if part is not None else 0,
        vocabulary,
        logits.stride(0),
        tiles,
        BAD=BAD_LOGITS,
        NONE=NO_TOKEN,
        SHARED=part is not None,
        num_warps=DRAW_WARPS,
        **same,
    )
    if part is not None:
        tokens.copy_(part.best(scores, tokens))
    if filters:
        filter_kernel[(n,)](
            logits,
            adjusted,
            row_ids,
            asked.temperature,
            asked.top_p,
            asked.top_k,
            asked.min_p,
            asked.seed,
            asked.sample,
            position,
            done,
            wants,
            scratch.peaks,
            scratch.masses,
            scratch.lists,
            scratch.inners,
            tokens,
            vocabulary,
            logits.stride(0),
            tiles,
            LOG2E=LOG2E,
            ATTEMPTS=ATTEMPTS,
            SHIFT=16 if logits.dtype == torch.bfloat16 else 0,
            SOME=SOME,
            num_warps=FILTER_WARPS,
            **same,
        )


def _tops(scratch: SampleScratch, n: int) -> Tensor:
    """Returns the largest logit of each row, [n]. It is NaN if a logit isn't finite, and undefined
    for rows that are done."""
    peaks, masses = scratch.peaks[:n], scratch.masses[:n]
    return torch.where(masses.isnan().any(1), torch.nan, peaks.amax(1))

"""token_logprobs: log-probabilities of given and most likely tokens. They are natural logarithms,
computed from raw logits; penalties and filters change only the sampler's copy of the logits.

Knows logits and ids."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import TILE, VocabularyPart
from penstock.kernels.reference.sampling.tile_draw import tile_logits, tile_sums
from penstock.kernels.row_state import RowState

_PIECE = 1 << 22


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (chosen [m] float32, rank [m] int32, ids [m, k] int32, top [m, k]): the
    log-probability and rank of each row's token, and ids and log-probabilities of the k most likely
    tokens. logits: [m, vocabulary] of any float type. tokens: [m].

    rank is 1 + the number of tokens with a larger logit. The most likely tokens come first, of
    equally likely ones the lower id; if the vocabulary is smaller than k, ids end in -1 and top in
    -inf. A row with a negative token (none was sampled) gets the values of token 0, which callers
    ignore."""
    step = max(1, _PIECE // logits.shape[1])
    parts = [
        _piece(logits[i : i + step], tokens[i : i + step], k)
        for i in range(0, max(1, logits.shape[0]), step)
    ]
    chosen, rank, ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, rank, ids, top


def logprobs_rows(
    logits: Tensor,
    row_ids: Tensor,
    rows: RowState,
    tokens: Tensor,
    most: int,
    scratch: object,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Writes the results of `token_logprobs` to out (chosen [n], rank [n], ids [n, most], top [n,
    most]) for rows with rows.logprobs >= 0; other rows are unchanged. logits: raw, [n, vocabulary],
    of rows row_ids [n]. tokens: [n]."""
    place = (rows.logprobs[row_ids.to(torch.int64)] >= 0).nonzero()[:, 0]
    if place.shape[0] == logits.shape[0]:
        found = token_logprobs(logits, tokens, most)
    else:
        found = token_logprobs(logits.index_select(0, place), tokens[place], most)
    for column, values in zip(out, found, strict=True):
        column.index_copy_(0, place, values)


def rank_logprobs(
    logits: Tensor, tokens: Tensor, k: int, part: VocabularyPart
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the results of `token_logprobs` if ranks divide the vocabulary, on any device.
    logits: raw, [m, this rank's range]. tokens: [m] of the whole vocabulary.

    The ranks exchange data three times: the largest logit; each rank's part of the softmax's
    denominator, the token's logit and the rank's k most likely tokens; the number of larger logits.
    That is 16 bytes a row, and 8 bytes for each of the k."""
    m = logits.shape[0]
    peak, top, mass = tile_sums(logits, torch.ones(m, device=logits.device), agree=part.most)
    assert mass is not None
    column, mine = part.columns(tokens.to(torch.int64).clamp(min=0), logits.shape[1])
    raw = torch.where(mine, logits.gather(1, column[:, None])[:, 0].to(torch.float32), -torch.inf)
    ids, values = _largest(logits, peak, k)
    ids = torch.where(ids >= 0, ids + part.first, ids)
    told = part.gather(
        torch.cat((mass.sum(-1)[:, None], raw[:, None], values, ids.view(torch.float32)), 1)
    )
    total, raw = top + told[:, :, 0].sum(0).log(), told[:, :, 1].amax(0)
    rank = 1 + part.total((logits > raw[:, None].to(logits.dtype)).sum(-1))
    # concatenated in rank order, so that of equal values the one with the lower id comes first
    values = told[:, :, 2 : 2 + k].transpose(0, 1).reshape(m, -1)
    ids = told[:, :, 2 + k :].contiguous().view(torch.int32).transpose(0, 1).reshape(m, -1)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return (
        raw - total,
        rank.to(torch.int32),
        ids.gather(1, order[:, :k]),
        values[:, :k] - total[:, None],
    )


def _piece(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m = logits.shape[0]
    peak, top, mass = tile_sums(logits, torch.ones(m, device=logits.device))
    assert mass is not None
    total = top + mass.sum(-1).log()
    raw = logits.gather(1, tokens.to(torch.int64).clamp(min=0)[:, None]).to(torch.float32)[:, 0]
    rank = 1 + (logits > raw[:, None].to(logits.dtype)).sum(-1)
    ids, values = _largest(logits, peak, k)
    return raw - total, rank.to(torch.int32), ids, values - total[:, None]


def _largest(logits: Tensor, peak: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns ids [m, k] int32 and values [m, k] float32 of each row's k largest logits, of equal
    ones the lower id first. peak: the largest logit of each row."""
    m, vocabulary = logits.shape
    ids = torch.full((m, k), -1, dtype=torch.int32, device=logits.device)
    values = torch.full((m, k), -torch.inf, device=logits.device)
    found = min(k, vocabulary)
    if found and m:
        tile = _ordered(peak).topk(min(found, peak.shape[1]), dim=-1).indices.sort(-1).values
        row = torch.arange(m, device=tile.device)[:, None].expand_as(tile)
        logit = tile_logits(logits, row.reshape(-1), tile.reshape(-1)).view(m, -1)
        place = _ordered(logit).topk(found, dim=-1).indices
        values[:, :found] = logit.gather(1, place)
        ids[:, :found] = (tile.gather(1, place // TILE) * TILE + place % TILE).to(torch.int32)
    return ids, values


def _ordered(x: Tensor) -> Tensor:
    """Returns int64 keys [m, n] whose falling order is that of the float32 values [m, n]; of equal
    values, the lower column has the larger key."""
    as_int = (x + 0.0).contiguous().view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    rising = torch.where(as_int >= 0, as_int, -(as_int & 0x7FFFFFFF))
    return (rising << 32) - torch.arange(x.shape[1], device=x.device)

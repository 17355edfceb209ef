"""min_p, top_k and top_p if several ranks share a vocabulary: the contract of `sample`, without
gathering logits.

All filters together keep a beginning of the order of tokens. Ranks search its last token together,
eight bits of its logit at a time: each rank counts, or weighs, its tokens under the 256 next values
(2 KB a row and round). Counts and weights are whole numbers, so their sums depend neither on an
order nor on the number of ranks. Then each rank draws nine times, the last time from the kept
tokens alone; the draws are gathered at once, and the first that stays is the token.

Callers pass only the rows with filters, and no control flow depends on data: it may run on a stream
that the host doesn't wait for. Knows rows of logits; no columns."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import SamplerInputs, VocabularyPart
from penstock.kernels.reference.sampling.filters import ATTEMPTS
from penstock.kernels.reference.sampling.sample import read_rows
from penstock.kernels.reference.sampling.tile_draw import Drawable, draw_here, tile_sums

_WEIGHT = 2.0**36  # stands for a mass of 1: sums of 2^17 tokens are exact in float64 too
_DIGITS, _BITS = 256, 8
_PIECE = 1 << 22  # logits held at once, in several forms


def filtered(logits: Tensor, inputs: SamplerInputs, part: VocabularyPart) -> Tensor:
    """Returns tokens [n] int32 for rows with filters; arbitrary if a row's logits are not finite. A
    greedy row gets its greedy token. logits: [n, this rank's range] float32."""
    step = max(1, _PIECE // part.largest_share)
    parts = [
        _piece(logits[first : first + step], _rows(inputs, slice(first, first + step)), part)
        for first in range(0, logits.shape[0], step)
    ]
    return torch.cat(parts).to(torch.int32)


def _rows(inputs: SamplerInputs, some: slice) -> SamplerInputs:
    asked = (
        inputs.temperature,
        inputs.top_p,
        inputs.top_k,
        inputs.min_p,
        inputs.seed,
        inputs.sample,
        inputs.position,
    )
    return SamplerInputs(*(column[some] for column in asked), any_filter=True, any_random=True)


def _piece(logits: Tensor, inputs: SamplerInputs, part: VocabularyPart) -> Tensor:
    rows = read_rows(logits, inputs, part)
    e = rows.e(logits.clone(), torch.arange(logits.shape[0], device=logits.device))
    stays = (e >= inputs.min_p[:, None]) & (logits > -torch.inf)
    key = _keys(logits)
    k = torch.where(inputs.top_k > 0, inputs.top_k, part.size)
    stays &= _beginning(key, stays.to(torch.int64), k.to(torch.float64), None, part)
    weight = (e.to(torch.float64) * _WEIGHT).round_().to(torch.int64) * stays
    nucleus = _beginning(key, weight, None, inputs.top_p.to(torch.float64), part)
    stays &= nucleus | (inputs.top_p >= 1)[:, None]
    return _first_that_stays(rows, stays, part)


def _keys(logits: Tensor) -> Tensor:
    """Returns int64 from 0 to 2^32 - 1 that sort like the float32 values."""
    as_int = (logits + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    return torch.where(as_int >= 0, as_int, -(as_int & 0x7FFFFFFF)) + (1 << 31)


def _beginning(
    key: Tensor, amount: Tensor, most: Tensor | None, share: Tensor | None, part: VocabularyPart
) -> Tensor:
    """Returns a mask [n, this rank's range] of the tokens that have less than `most` [n] of the
    amount above them, or less than `share` [n] of the total. Above means a larger key, or an equal
    key and a lower id. Tokens without any amount are not marked."""
    n = key.shape[0]
    prefix, above = key.new_zeros(n), key.new_zeros(n)
    for shift in range(32 - _BITS, -1, -_BITS):
        under = (key >> (shift + _BITS)) == prefix[:, None]
        sums = key.new_zeros((n, _DIGITS)).scatter_add_(
            1, (key >> shift) & (_DIGITS - 1), amount * under
        )
        sums = part.total(sums)
        if most is None:
            assert share is not None
            most = share * sums.sum(-1).to(torch.float64)
        over = above[:, None] + sums.flip(-1).cumsum(-1).flip(-1) - sums
        last = ((sums > 0) & (over < most[:, None])).to(torch.int8).argmax(-1, keepdim=True)
        prefix, above = (prefix << _BITS) | last[:, 0], over.gather(1, last)[:, 0]
    return (amount > 0) & (
        (key > prefix[:, None]) | _first_equals(key == prefix[:, None], amount, above, most, part)
    )


def _first_equals(
    equal: Tensor, amount: Tensor, above: Tensor, most: Tensor | None, part: VocabularyPart
) -> Tensor:
    """Marks the first tokens among those equal to the last one; equal logits have equal amounts."""
    assert most is not None
    equal = equal & (amount > 0)
    told = part.gather(torch.stack((equal.sum(-1), (amount * equal).amax(-1))))  # [ranks, 2, n]
    before, each = told[: part.rank, 0].sum(0), told[:, 1].amax(0).clamp(min=1)
    number = before[:, None] + equal.to(torch.int64).cumsum(-1) - 1
    return equal & (above[:, None] + number * each[:, None] < most[:, None])


def _first_that_stays(rows: Drawable, stays: Tensor, part: VocabularyPart) -> Tensor:
    """Draws from the whole rows until a token stays, or else from the kept tokens: [n] int64."""
    draws = [draw_here(rows, attempt) for attempt in range(ATTEMPTS)]
    left = rows.logits.masked_fill(~stays, -torch.inf)
    peak, _, mass = tile_sums(left, rows.scale, True, lambda _: rows.top)
    inside = Drawable(
        left,
        rows.place,
        peak,
        rows.top,
        mass,
        rows.scale,
        rows.greedy,
        rows.key,
        rows.position,
        part,
    )
    draws.append(draw_here(inside, ATTEMPTS))
    score = torch.stack([score for score, _ in draws], -1)
    token = torch.stack([token for _, token in draws], -1)
    good = stays.gather(1, token - part.first)
    good[:, -1] = True
    told = part.gather(torch.stack((score.view(torch.int32), (token * 2 + good).to(torch.int32))))
    who = told[:, 0].view(torch.float32).argmax(0, keepdim=True)
    code = told[:, 1].gather(0, who)[0]
    first = torch.where(rows.greedy, 0, (code & 1).to(torch.int8).argmax(-1))
    return (code.gather(1, first[:, None])[:, 0] >> 1).to(torch.int64)

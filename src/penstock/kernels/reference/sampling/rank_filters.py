"""The filters min_p, top_k and top_p over several ranks. The ranks divide a vocabulary, and don't
gather logits. The contract is in `sample`.

The filters together keep the first tokens in the order of logits. Ranks search the last kept token
together, eight bits of its logit at a time: each rank counts its tokens, or sums their
probabilities, for each of the 256 next values (2 KB a row and round). Counts and sums are whole
numbers, so their totals depend neither on an order nor on the number of ranks. Then each rank
samples nine times, the last time from the kept tokens alone. All samples are gathered at once, and
the first one that passes the filters is the token.

Callers pass only the rows with filters. No control flow depends on data, so it may run on a stream
without the host waiting. Knows rows of logits; no per-row arrays."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import SamplerInputs, VocabularyPart
from penstock.kernels.reference.sampling.filters import ATTEMPTS
from penstock.kernels.reference.sampling.sample import read_rows
from penstock.kernels.reference.sampling.tile_draw import Drawable, draw_here, tile_sums

# integer that means a probability mass of 1; sums over 2^17 tokens are exact in float64
_WEIGHT = 2.0**36
_DIGITS, _BITS = 256, 8
_PIECE = 1 << 22  # logits that are processed at once, in several copies


def filtered(logits: Tensor, inputs: SamplerInputs, part: VocabularyPart) -> Tensor:
    """Samples tokens [n] int32 for rows with filters; the token is arbitrary if a row's logits are
    not finite. A greedy row gets its greedy token. logits: [n, this rank's range] float32."""
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
    """Returns integers from 0 to 2^32 - 1, int64, whose order is that of the float32 values."""
    as_int = (logits + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    return torch.where(as_int >= 0, as_int, -(as_int & 0x7FFFFFFF)) + (1 << 31)


def _beginning(
    key: Tensor, amount: Tensor, most: Tensor | None, share: Tensor | None, part: VocabularyPart
) -> Tensor:
    """Returns a mask [n, this rank's range] of the kept tokens: those for which the amounts of all
    tokens above sum to less than `most` [n], or to less than `share` [n] of the total amount. A
    token is above another if its key is larger, or equal with a lower id. amount: 1 for top_k, the
    integer probability for top_p. Tokens with amount 0 are not marked."""
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
    """Returns a mask of the kept tokens among those whose key equals that of the last kept token;
    they are kept in order of their ids. equal: mask of these tokens. above: sum of the amounts
    above them. Equal keys have equal amounts."""
    assert most is not None
    equal = equal & (amount > 0)
    told = part.gather(torch.stack((equal.sum(-1), (amount * equal).amax(-1))))  # [ranks, 2, n]
    before, each = told[: part.rank, 0].sum(0), told[:, 1].amax(0).clamp(min=1)
    number = before[:, None] + equal.to(torch.int64).cumsum(-1) - 1
    return equal & (above[:, None] + number * each[:, None] < most[:, None])


def _first_that_stays(rows: Drawable, stays: Tensor, part: VocabularyPart) -> Tensor:
    """Returns the first token of nine attempts that passes the filters, [n] int64. The last attempt
    samples from the kept tokens alone. stays: mask of kept tokens."""
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

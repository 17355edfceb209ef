"""Log-probabilities of given tokens and of the most likely ones, from raw logits: penalties and
filters change only the sampler's copy of the logits. One launch reads the rows that need them, each
once. The contract is in reference/sampling/logprobs.py. Knows logits and ids."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import TILE
from penstock.kernels.row_state import RowState
from penstock.kernels.triton.grid import next_power_of_2
from penstock.kernels.triton.pdl import has_pdl, release, wait
from penstock.kernels.triton.sampling.tile_sums import row_of

_SOME, _WARPS = 32, 8


@triton.jit(do_not_specialize=["most"])
def _logprobs(
    logits,
    row_ids,
    asked,
    done,
    tokens,
    peaks,
    chosen,
    rank,
    ids,
    top,
    vocabulary,
    stride,
    tiles,
    most,
    BY_ROW: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
    NT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i computes row i. asked: [rows], number of most likely tokens that a row needs; -1:
    the row needs no log-probabilities. BY_ROW: False: there are no row ids, and all rows need
    `most` tokens. peaks: scratch [n, tiles]. chosen, rank, ids, top: outputs, see `token_logprobs`.
    """
    wait(EARLY)
    release(EARLY)
    i = tl.program_id(0)
    k = most
    if BY_ROW:
        row = row_of(row_ids, i, BY_ROW)
        k = tl.minimum(tl.load(asked + row), most)
        if tl.load(done + row) != 0:
            k = -1
    if k >= 0:
        line = logits + i.to(tl.int64) * stride
        x = tl.maximum(tl.load(tokens + i).to(tl.int32), 0)
        value = tl.load(line + x).to(tl.float32)
        high = tl.full((SOME,), float("-inf"), tl.float32)
        mass = tl.zeros((SOME,), tl.float32)
        above = tl.zeros((SOME, TILE), tl.int32)
        for first in range(0, tiles, SOME):
            tile = first + tl.arange(0, SOME)
            token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
            logit = tl.load(line + token, mask=token < vocabulary, other=float("-inf")).to(
                tl.float32
            )
            above += (logit > value).to(tl.int32)
            peak = tl.max(logit, axis=1)
            if most > 0:
                tl.store(peaks + i.to(tl.int64) * tiles + tile, peak, mask=tile < tiles)
            upto = tl.maximum(high, peak)
            base = tl.where(upto == float("-inf"), 0.0, upto)
            mass = mass * tl.exp(high - base) + tl.sum(tl.exp(logit - base[:, None]), axis=1)
            high = upto
        best = tl.max(high, axis=0)
        log_sum = best + tl.log(tl.sum(mass * tl.exp(high - best), axis=0))
        tl.store(chosen + i, value - log_sum)
        tl.store(rank + i, 1 + tl.sum(tl.sum(above, axis=1), axis=0))
        if k > 0:
            _most_likely(
                line,
                peaks + i.to(tl.int64) * tiles,
                ids + i * most,
                top + i * most,
                log_sum,
                k,
                vocabulary,
                tiles,
                TILE,
                NT,
            )


@triton.jit
def _most_likely(
    line, peaks, ids, top, log_sum, k, vocabulary, tiles, TILE: tl.constexpr, NT: tl.constexpr
):
    """Writes ids and log-probabilities of a row's k most likely tokens. Each is found as the first
    largest remaining logit in the tile with the largest remaining peak (largest logit of a tile).
    log_sum: logarithm of the softmax's denominator."""
    tl.debug_barrier()
    tile = tl.arange(0, NT)
    rest = tl.load(peaks + tile, mask=tile < tiles, other=float("-inf"))
    value, ident = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
    for j in range(k):
        won = tl.argmax(rest, axis=0)
        token = won * TILE + tl.arange(0, TILE)
        logit = tl.load(line + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        after = (logit < value) | ((logit == value) & (token > ident))
        left = tl.where(after, logit, float("-inf"))
        ident = won * TILE + tl.argmax(left, axis=0)
        value = tl.max(left, axis=0)
        after = (logit < value) | ((logit == value) & (token > ident))
        rest = tl.where(tile == won, tl.max(tl.where(after, logit, float("-inf")), axis=0), rest)
        tl.store(ids + j, tl.where(j < vocabulary, ident, -1))
        tl.store(top + j, tl.where(j < vocabulary, value - log_sum, float("-inf")))


class HasInners(Protocol):
    """Scratch memory of sampling, such as SampleScratch."""

    inners: Tensor  # [n, tiles] float32: reused here for the tiles' peaks


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the log-probability of each row's token, [m] float32; its rank [m] int32; and ids [m,
    k] int32 and log-probabilities [m, k] of the k most likely tokens. logits: [m, vocabulary].
    tokens: [m]; a negative token counts as token 0. Agrees with reference/sampling/logprobs.py for
    finite logits."""
    m = logits.shape[0]
    out = _results(m, k, logits.device)
    if m:
        peaks = torch.empty(
            (m, -(-logits.shape[1] // TILE)), dtype=torch.float32, device=logits.device
        )
        _launch(logits, None, None, None, tokens, peaks, k, out)
    return out


def logprobs_rows(
    logits: Tensor,
    row_ids: Tensor,
    rows: RowState,
    tokens: Tensor,
    most: int,
    scratch: HasInners,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Writes log-probabilities to out: of each row's token [n], the token's rank [n], and ids and
    log-probabilities of the most likely tokens [n, most]. It does so for rows with rows.logprobs >=
    0 that aren't done; the outputs of other rows are unchanged.

    logits: raw, [n, vocabulary], of rows row_ids [n]. tokens: [n]. A row gets its
    min(rows.logprobs, most) most likely tokens. scratch: the scratch memory of sampling, which is
    not needed any more."""
    if logits.shape[0]:
        _launch(logits, row_ids, rows.logprobs, rows.done, tokens, scratch.inners, most, out)


def _results(m: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen, rank = torch.empty(m, device=device), torch.empty(m, dtype=torch.int32, device=device)
    return (
        chosen,
        rank,
        torch.empty((m, k), dtype=torch.int32, device=device),
        torch.empty((m, k), device=device),
    )


def _launch(
    logits: Tensor,
    row_ids: Tensor | None,
    asked: Tensor | None,
    done: Tensor | None,
    tokens: Tensor,
    peaks: Tensor,
    most: int,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    m, vocabulary = logits.shape
    tiles = -(-vocabulary // TILE)
    assert logits.stride(1) == 1
    early = has_pdl(logits.device)
    _logprobs[(m,)](
        logits,
        tokens if row_ids is None else row_ids,
        tokens if asked is None else asked,
        tokens if done is None else done,
        tokens,
        peaks,
        *out,
        vocabulary,
        logits.stride(0),
        tiles,
        most,
        BY_ROW=row_ids is not None,
        SOME=_SOME,
        TILE=TILE,
        NT=next_power_of_2(tiles),
        EARLY=early,
        num_warps=_WARPS,
        launch_pdl=bool(early),
    )

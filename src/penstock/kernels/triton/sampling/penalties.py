"""adjust: changes logits by biases, penalties, barred ids and grammar masks. One launch writes a
float32 copy of the logits of the rows that need a change.

There is one program per row; it returns at once if the row needs no change. It counts the row's
stored tokens in the memory that will hold the row's adjusted logits, one number per id
(docs/design/penalties.md tells why no counts are kept between steps):

  1. All numbers become zero.
  2. Each of the row's tokens sets bit 0 of its id's number, and adds 2 if it is an output token.
  3. Each biased id gets its final logit, as the bits of a float: such numbers are 2^23 or more,
     counts are less.
  4. Every number becomes a logit. Final logits stay. Of other ids, the count decides the penalty of
     the raw logit. Barred ids, and ids without a bit in the row's mask, get -inf.
  5. A bad word is a list of ids. If all but its last id are the row's latest tokens, the last id
     gets -inf.

Knows logits, per-row arrays and stored tokens. Results equal those of
reference/sampling/penalties.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.inputs import VocabularyPart
from penstock.kernels.row_state import RowState
from penstock.kernels.triton.pdl import has_pdl, release, wait
from penstock.kernels.triton.sampling.sample import SampleScratch
from penstock.kernels.triton.sampling.tile_sums import row_of
from penstock.row_table import (
    BAD_WORD_IDS,
    WANTS_BIAS,
    WANTS_MASK,
    WANTS_MIN_TOKENS,
    WANTS_PENALTY,
    WANTS_WORDS,
)
from penstock.row_table import WANTS_ADJUST as ADJUSTS

_BLOCK, _WARPS = 8192, 16
_SOME = 512  # tokens, or biases, that a program processes at once
_FEW = 32  # bad words that a program processes at once


@triton.jit
def _penalized(logit, count, repetition, presence, frequency):
    """Returns the logit with penalties applied. count: bit 0: the id occurs in the row; count >> 1:
    its number of output tokens."""
    by = tl.where(logit > 0, tl.div_rn(logit, repetition + logit * 0), logit * repetition)
    value = tl.where((count & 1) != 0, by, logit)
    output = (count >> 1).to(tl.float32)
    return value - (frequency * output + tl.where(output > 0, presence, 0.0))


@triton.jit(do_not_specialize=["table_width"])
def _adjust(
    logits,
    adjusted,
    counts,
    row_ids,
    position,
    done,
    wants,
    prompt_length,
    min_length,
    repetition,
    presence,
    frequency,
    block_table,
    table_width,
    slot_token,
    bias_start,
    bias_count,
    bias_ids,
    bias_values,
    is_end,
    stop_ids,
    word_count,
    mask_slot,
    masks,
    mask_words,
    before,
    vocabulary,
    stride,
    ADJUSTS: tl.constexpr,
    PENALTY: tl.constexpr,
    BIAS: tl.constexpr,
    BARS: tl.constexpr,
    MASK: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_IDS: tl.constexpr,
    FEW: tl.constexpr,
    SLOTS: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `adjust`, with one program per row. counts: `adjusted`, viewed as int32. PENALTY,
    BIAS, BARS, MASK, WORDS: bits of `wants`. before: first id of this rank's part of the
    vocabulary."""
    wait(EARLY)
    release(EARLY)
    i = tl.program_id(0)
    row = row_of(row_ids, i, True)
    asks = tl.load(wants + row)
    if ((asks & ADJUSTS) != 0) & (tl.load(done + row) == 0):
        line = logits + i.to(tl.int64) * stride
        values = adjusted + i.to(tl.int64) * vocabulary
        numbers = counts + i.to(tl.int64) * vocabulary
        stored = tl.load(position + i).to(tl.int32)
        repeat, flat, rate = (
            tl.load(repetition + row),
            tl.load(presence + row),
            tl.load(frequency + row),
        )
        for first in range(0, vocabulary, BLOCK):
            ident = first + tl.arange(0, BLOCK)
            tl.store(numbers + ident, tl.zeros((BLOCK,), tl.int32), mask=ident < vocabulary)
        tl.debug_barrier()
        if (asks & PENALTY) != 0:
            prompt = tl.load(prompt_length + row)
            for first in range(0, stored + 1, SOME):
                place = first + tl.arange(0, SOME)
                there = place <= stored
                block = tl.load(
                    block_table + row * table_width + place // SLOTS, mask=there, other=0
                )
                token = (
                    tl.load(
                        slot_token + block.to(tl.int64) * SLOTS + place % SLOTS, mask=there, other=0
                    )
                    - before
                )
                there = there & (token >= 0) & (token < vocabulary)
                tl.atomic_or(
                    numbers + token, tl.full((SOME,), 1, tl.int32), mask=there, sem="relaxed"
                )
                tl.atomic_add(
                    numbers + token,
                    tl.full((SOME,), 2, tl.int32),
                    mask=there & (place >= prompt),
                    sem="relaxed",
                )
            tl.debug_barrier()
        if (asks & BIAS) != 0:
            start, many = tl.load(bias_start + row), tl.load(bias_count + row)
            for first in range(0, many, SOME):
                place = first + tl.arange(0, SOME)
                ident = tl.load(bias_ids + start + place, mask=place < many, other=-1) - before
                there = (place < many) & (ident >= 0) & (ident < vocabulary)
                logit = tl.load(line + ident, mask=there, other=0.0).to(tl.float32)
                logit += tl.load(bias_values + start + place, mask=there, other=0.0)
                count = tl.load(numbers + ident, mask=there, other=0)
                value = _penalized(logit, count, repeat, flat, rate)
                value = tl.where(
                    tl.abs(value) < 1.1754943508222875e-38, 1.1754943508222875e-38, value
                )
                tl.store(values + ident, value, mask=there)
            tl.debug_barrier()
        barred = ((asks & BARS) != 0) & (stored + 1 < tl.load(min_length + row))
        slot = tl.load(mask_slot + row)
        masked = ((asks & MASK) != 0) & (slot >= 0)
        for first in range(0, vocabulary, BLOCK):
            ident = first + tl.arange(0, BLOCK)
            there = ident < vocabulary
            count = tl.load(numbers + ident, mask=there, other=0)
            logit = tl.load(line + ident, mask=there, other=0.0).to(tl.float32)
            final = (count & 0x7FFFFFFF) >= 0x800000
            value = tl.where(
                final,
                count.to(tl.float32, bitcast=True),
                _penalized(logit, count, repeat, flat, rate),
            )
            if barred:
                bars = tl.load(is_end + before + ident, mask=there, other=0) != 0
                for j in tl.static_range(STOPS):
                    bars = bars | (before + ident == tl.load(stop_ids + row * STOPS + j))
                value = tl.where(bars, float("-inf"), value)
            if masked:
                word = tl.load(
                    masks + slot.to(tl.int64) * mask_words + (before + ident) // 32,
                    mask=there,
                    other=0,
                )
                value = tl.where(((word >> (ident % 32)) & 1) != 0, value, float("-inf"))
            tl.store(values + ident, value, mask=there)
        if (asks & WORDS) != 0:
            tl.debug_barrier()
            start, many = (
                tl.load(bias_start + row) + tl.load(bias_count + row),
                tl.load(word_count + row),
            )
            output = tl.load(prompt_length + row)
            for first in range(0, many, FEW):
                word = first + tl.arange(0, FEW)
                fits = word < many
                for j in tl.static_range(WORD_IDS - 1):
                    place = stored - (WORD_IDS - 2) + j
                    at = tl.maximum(place, 0)
                    block = tl.load(block_table + row * table_width + at // SLOTS).to(tl.int64)
                    token = tl.where(
                        place >= output, tl.load(slot_token + block * SLOTS + at % SLOTS), -2
                    )
                    asked = tl.load(
                        bias_ids + start + word * WORD_IDS + j, mask=word < many, other=-1
                    )
                    fits = fits & ((asked < 0) | (asked == token))
                last = tl.load(
                    bias_ids + start + word * WORD_IDS + WORD_IDS - 1, mask=word < many, other=0
                )
                last -= before
                fits = fits & (last >= 0) & (last < vocabulary)
                tl.store(values + last, tl.full((FEW,), float("-inf"), tl.float32), mask=fits)


def adjust(
    logits: Tensor,
    row_ids: Tensor,
    position: Tensor,
    rows: RowState,
    slot_token: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    masks: Tensor,
    scratch: SampleScratch,
    part: VocabularyPart | None = None,
) -> None:
    """Writes the changed logits of row row_ids[i] to scratch.adjusted[i], for rows whose rows.wants
    has a bit of WANTS_ADJUST. Penalties count the row's tokens up to position [n].

    logits: [n, vocabulary], read only. slot_token: [blocks, 16] int32, ids of the stored tokens.
    bias_ids: [pool] int32, bias_values: [pool] float32: biases of all rows; rows.bias_start and
    bias_count give a row's range. After a row's biases come the ids of its bad words, BAD_WORD_IDS
    each, padded in front with -1. masks: [slots, ceil(vocabulary / 32)] int32, bit masks of allowed
    ids; rows.mask_slot gives a row's slot, -1: none. part: this rank's range if ranks divide the
    vocabulary; ids and masks are those of the whole vocabulary."""
    (n, vocabulary), adjusted = logits.shape, scratch.adjusted
    assert adjusted is not None and adjusted.shape[0] >= n and adjusted.shape[1] == vocabulary
    if n:
        early = has_pdl(logits.device)
        _adjust[(n,)](
            logits,
            adjusted,
            adjusted.view(torch.int32),
            row_ids,
            position,
            rows.done,
            rows.wants,
            rows.prompt_length,
            rows.min_length,
            rows.repetition,
            rows.presence,
            rows.frequency,
            rows.block_table,
            rows.block_table.stride(0),
            slot_token,
            rows.bias_start,
            rows.bias_count,
            bias_ids,
            bias_values,
            rows.is_end,
            rows.stop_ids,
            rows.word_count,
            rows.mask_slot,
            masks,
            masks.shape[1],
            0 if part is None else part.first,
            vocabulary,
            logits.stride(0),
            ADJUSTS=ADJUSTS,
            PENALTY=WANTS_PENALTY,
            BIAS=WANTS_BIAS,
            BARS=WANTS_MIN_TOKENS,
            MASK=WANTS_MASK,
            WORDS=WANTS_WORDS,
            WORD_IDS=BAD_WORD_IDS,
            FEW=_FEW,
            SLOTS=BLOCK_SIZE,
            STOPS=rows.stop_ids.shape[1],
            BLOCK=_BLOCK,
            SOME=_SOME,
            EARLY=early,
            num_warps=_WARPS,
            launch_pdl=bool(early),
        )

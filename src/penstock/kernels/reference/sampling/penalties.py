"""Changes of logits before sampling, in plain torch. They are logit_bias, penalties, barred ids,
bad words and token masks (of structured output).

Knows logits, ids and stored tokens; not why a row needs a change. Each operation changes float32
logits [n, vocabulary] in place, only in the given rows. Token counts are not kept between steps: a
row's tokens are stored in blocks as its KV is, and are counted in every step
(docs/design/penalties.md tells why)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.inputs import VocabularyPart
from penstock.kernels.reference.sampling.sample import SampleScratch
from penstock.kernels.row_state import RowState
from penstock.row_table import (
    BAD_WORD_IDS,
    WANTS_BIAS,
    WANTS_MASK,
    WANTS_MIN_TOKENS,
    WANTS_PENALTY,
    WANTS_WORDS,
)

_PIECE = 1 << 22  # most counts in memory at once


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
    """Writes scratch.adjusted: a float32 copy of raw logits [n, vocabulary] of rows row_ids [n]
    int32, with each row's bias, penalties, barred ids, bad words and mask applied in this order.
    Penalties count the row's tokens up to position [n].

    slot_token: [blocks, 16] int32, ids of the stored tokens. bias_ids: [pool] int32, bias_values:
    [pool] float32; rows.bias_start and bias_count give a row's range. After its biases come the ids
    of its bad words, BAD_WORD_IDS each, padded in front with -1. masks: [slots, ceil(vocabulary /
    32)] int32; rows.mask_slot gives a row's slot, -1: none. part: this rank's range if ranks share
    a vocabulary; ids and masks are of the whole."""
    first = 0 if part is None else part.first
    row = row_ids.to(torch.int64)
    wants = torch.where(rows.done[row] != 0, 0, rows.wants[row])
    adjusted = scratch.adjusted = logits.to(torch.float32, copy=True)
    if (place := (wants & WANTS_BIAS).nonzero()[:, 0]).shape[0]:
        _bias(adjusted, place, row[place], rows, bias_ids - first, bias_values)
    if (place := (wants & WANTS_PENALTY).nonzero()[:, 0]).shape[0]:
        mine = row[place]
        length = position[place].to(torch.int32) + 1
        width = -(-int(length.max()) // BLOCK_SIZE)
        apply_penalties(
            adjusted,
            place,
            slot_token,
            rows.block_table[:, :width].index_select(0, mine),
            length,
            rows.prompt_length[mine],
            rows.repetition[mine],
            rows.presence[mine],
            rows.frequency[mine],
            part,
        )
    if (place := (wants & WANTS_MIN_TOKENS).nonzero()[:, 0]).shape[0]:
        mine = row[place]
        ends = rows.end_ids.expand(mine.shape[0], -1)
        ids = torch.cat((ends, rows.stop_ids[mine].to(torch.int64)), dim=1)
        bar_ids(adjusted, place, ids - first, position[place] + 1 < rows.min_length[mine])
    if (place := (wants & WANTS_WORDS).nonzero()[:, 0]).shape[0]:
        _bar_words(adjusted, place, row[place], position[place], rows, slot_token, bias_ids, first)
    slot = torch.where((wants & WANTS_MASK) != 0, rows.mask_slot[row], -1)
    if (place := (slot >= 0).nonzero()[:, 0]).shape[0]:
        apply_masks(adjusted, place, masks[:, first // 32 :], slot[place].to(torch.int64))


def _bias(
    logits: Tensor,
    place: Tensor,
    row: Tensor,
    rows: RowState,
    bias_ids: Tensor,
    bias_values: Tensor,
) -> None:
    """Adds the biases of rows `row` [m] to the logits, where row[i] is line place[i]."""
    count = rows.bias_count[row].to(torch.int64)
    before = torch.cumsum(count, 0) - count
    where = torch.repeat_interleave(rows.bias_start[row] - before, count) + torch.arange(
        int(count.sum()), device=row.device
    )
    lines, ids, values = (
        torch.repeat_interleave(place, count),
        bias_ids[where].to(torch.int64),
        bias_values[where],
    )
    mine = (ids >= 0) & (ids < logits.shape[1])
    apply_bias(logits, lines[mine], ids[mine], values[mine])


def _bar_words(
    logits: Tensor,
    place: Tensor,
    row: Tensor,
    position: Tensor,
    rows: RowState,
    slot_token: Tensor,
    pool: Tensor,
    first: int,
) -> None:
    """Sets the last id of each bad word of rows `row` [m] to -inf if it would complete the word.
    The logits of row[i] are line place[i]."""
    count = rows.word_count[row].to(torch.int64)
    which = torch.repeat_interleave(torch.arange(row.shape[0], device=row.device), count)
    nth = torch.arange(which.shape[0], device=row.device) - (torch.cumsum(count, 0) - count)[which]
    start = (rows.bias_start[row] + rows.bias_count[row])[which] + nth * BAD_WORD_IDS
    words = pool[start[:, None] + torch.arange(BAD_WORD_IDS, device=row.device)]
    back = position.to(torch.int64)[:, None] - torch.arange(
        BAD_WORD_IDS - 2, -1, -1, device=row.device
    )
    at = back.clamp(min=0)
    latest = slot_token[
        rows.block_table[row[:, None], at // BLOCK_SIZE].to(torch.int64), at % BLOCK_SIZE
    ]
    latest = torch.where(back >= rows.prompt_length[row, None], latest, -2)
    bar_words(logits, place[which], words, latest[which], first)


def bar_words(logits: Tensor, rows: Tensor, words: Tensor, latest: Tensor, first: int = 0) -> None:
    """Sets the last id of words[i] to -inf in line rows[i] if its other ids equal the row's newest
    output tokens, latest[i].

    rows: [m] int64. words: [m, W] int32, padded in front with -1. latest: [m, W - 1], the newest
    token last, -2 where there is no output. first: token id of column 0."""
    before = words[:, :-1]
    bar_ids(
        logits,
        rows,
        words[:, -1:].to(torch.int64) - first,
        ((before < 0) | (before == latest)).all(1),
    )


def apply_masks(logits: Tensor, rows: Tensor, masks: Tensor, slots: Tensor) -> None:
    """Sets token t to -inf in row rows[i] unless bit t % 32 of word t // 32 of masks[slots[i]] is
    set.

    rows, slots: [m] int64. masks: [slots, W] int32."""
    vocabulary = logits.shape[1]
    byte, bit = torch.arange(256, device=logits.device), torch.arange(8, device=logits.device)
    # looking up bytes takes 0.6 of the time of shifting words
    barred = (byte[:, None] >> bit) & 1 == 0
    step = max(1, _PIECE // vocabulary)
    for first in range(0, rows.shape[0], step):
        some = slice(first, first + step)
        masked = masks.index_select(0, slots[some]).view(torch.uint8)
        bars = barred.index_select(0, masked.view(-1).to(torch.int32)).view(masked.shape[0], -1)[
            :, :vocabulary
        ]
        logits[rows[some]] = logits[rows[some]].masked_fill_(bars, -torch.inf)


def apply_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Adds values[i] to logits[rows[i], ids[i]]. rows, ids: [m] int64. values: [m] float32. Pairs
    (row, id) are distinct."""
    logits[rows, ids] = logits[rows, ids] + values


def bar_ids(logits: Tensor, rows: Tensor, ids: Tensor, active: Tensor) -> None:
    """Sets ids[i] of row rows[i] to -inf if active[i]. rows: [m] int64. ids: [m, j] int64. active:
    [m] bool.
    An id outside the vocabulary (-1, or a stop id that no token has) is skipped."""
    inside = (ids >= 0) & (ids < logits.shape[1])
    ids = torch.where(inside, ids, 0)
    nothing = torch.zeros((), device=logits.device)
    change = torch.where(active[:, None] & inside, -torch.inf, nothing)
    # Added, not written: a skipped id becomes an addition of 0 to token 0, which must not undo the
    # -inf of that token.
    logits.index_put_((rows[:, None].expand_as(ids), ids), change, accumulate=True)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    slot_token: Tensor,
    block_table: Tensor,
    length: Tensor,
    prompt_length: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    part: VocabularyPart | None = None,
) -> None:
    """Applies repetition over all of a row's tokens (CTRL, arXiv:1909.05858), then presence and
    frequency over its output.

    rows: [m] int64, rows of the logits. slot_token: [blocks, 16] int32. block_table: [m, width]
    int32, with at least the blocks of `length` tokens. length: [m] int32, tokens of the row
    including the newest, at least 1. prompt_length: [m] int32, tokens before the output. repetition
    (1: off), presence, frequency (0: off): [m] float32. part: this rank's range of the vocabulary.
    """
    step = max(1, _PIECE // max(logits.shape[1], block_table.shape[1] * slot_token.shape[1]))
    for start in range(0, rows.shape[0], step):
        some = slice(start, start + step)
        ids, output = _tokens_of(slot_token, block_table[some], length[some], prompt_length[some])
        if part is not None:
            ids, mine = part.columns(ids, logits.shape[1])
            output = output & mine
        count = _count(ids, output, logits.shape[1])
        # flat indices, since take and put_ are several times faster than indexing by row and id
        flat = ids + rows[some, None] * logits.shape[1]
        value = logits.take(flat)
        by = repetition[some, None]
        value = torch.where(value > 0, value / by, value * by)
        value -= frequency[some, None] * count + presence[some, None] * (count > 0)
        if part is not None:
            flat, value = flat[mine], value[mine]
        # an id that occurs several times is written several times, with the same value
        logits.put_(flat, value)


def _tokens_of(
    slot_token: Tensor, table: Tensor, length: Tensor, prompt_length: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the ids of each row's tokens, [m, L] int64, padded with the row's first token, and a
    mask of output tokens [m, L] bool. L: the largest length."""
    tokens = slot_token.index_select(0, table.reshape(-1)).view(table.shape[0], -1)
    place = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    there = place < length[:, None]
    ids = torch.where(there, tokens, tokens[:, :1]).to(torch.int64)
    return ids, there & (place >= prompt_length[:, None])


def _count(ids: Tensor, output: Tensor, vocabulary: int) -> Tensor:
    """Returns for each of a row's ids [m, L] how often it is in the row's output, [m, L] float32.
    output: mask of output tokens [m, L]."""
    counts = torch.zeros((ids.shape[0], vocabulary), dtype=torch.float32, device=ids.device)
    return counts.scatter_add_(1, ids, output.to(torch.float32)).gather(1, ids)

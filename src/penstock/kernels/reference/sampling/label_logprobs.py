"""label_logprobs: log-probabilities of the token ids that requests name. They replace those of the
most likely tokens, and are computed from raw logits.

This takes a few torch calls, on any device, in steps with such requests. Knows logits, ids and
per-row arrays."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import VocabularyPart
from penstock.kernels.row_state import RowState
from penstock.row_table import BAD_WORD_IDS, WANTS_LABELS


def label_logprobs(
    logits: Tensor,
    row_ids: Tensor,
    rows: RowState,
    pool: Tensor,
    tokens: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    part: VocabularyPart | None = None,
) -> None:
    """Writes log-probabilities of the named ids. logits: raw, [n, vocabulary], of rows row_ids [n].
    tokens: [n], sampled. out: (chosen [n], log-probability of the sampled tokens, which is read;
    ids and top [n, most], which are written for rows with named ids, in their order).

    pool: [ids] int32; a row's named ids follow its biases and bad words there, and rows.logprobs is
    their number. part: this rank's range of the vocabulary if ranks divide it."""
    chosen, ids, top = out
    row = row_ids.to(torch.int64)
    place = torch.arange(ids.shape[1], device=logits.device)
    first = rows.bias_start[row] + rows.bias_count[row] + BAD_WORD_IDS * rows.word_count[row]
    asks = ((rows.wants[row] & WANTS_LABELS) != 0)[:, None] & (place < rows.logprobs[row][:, None])
    at = torch.where(asks, first[:, None] + place, 0).to(torch.int64)
    labels = torch.where(asks, pool[at], 0)
    wanted = torch.cat((labels, tokens.clamp(min=0)[:, None]), 1).to(torch.int64)
    if part is None:
        raw = logits.gather(1, wanted).to(torch.float32)
    else:
        column, mine = part.columns(wanted, logits.shape[1])
        raw = part.most(torch.where(mine, logits.gather(1, column).to(torch.float32), -torch.inf))
    # logarithm of the softmax's denominator, computed from the sampled token's logit and
    # log-probability
    log_sum = raw[:, -1:] - chosen[:, None]
    ids.copy_(torch.where(asks, labels, ids))
    top.copy_(torch.where(asks, raw[:, :-1] - log_sum, top))

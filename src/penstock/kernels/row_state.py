"""RowState: per-row arrays on the device, one entry for each row of the batch. A row is the place
of one sequence in the batch. penstock/row_table.py declares the arrays (called columns). The host
sends new rows as packed int32 words.

Knows columns, block tables and end ids; no sequences, no model. Columns are views of one buffer of
32-bit words, so that two small tables suffice to scatter a new row's words:

  word w of a new row goes to word base[w] + row * stride[w]

A row has `length` tokens whose K and V are stored, the newest token `last_token` (at position
`length`, K and V not stored yet) and a block table. Once it is `done`, it doesn't change until
another sequence gets its row number."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.row_table import FIELDS, FIRST_WORD, JOIN_WORDS, MAX_DRAFTS

SCRATCH_BLOCK = 0  # equals schedule.step's
FROM_DEVICE = -1  # equals schedule.step's
_TORCH = {"i4": torch.int32, "f4": torch.float32, "i8": torch.int64}


class RowState:
    """Arrays of `max_rows` rows, and of one more row at the end that pads batches. Each field of
    penstock/row_table.py is an attribute: a tensor [rows], or [rows, width], of its dtype."""

    block_table: Tensor  # [rows, blocks] int32
    # [rows, drafts] int32: draft tokens made on the device, for positions length + 1 and on
    drafts: Tensor
    # [slots, width] int32: tokens of ended samples; of slot i the first text_filled[i] count
    texts: Tensor
    text_filled: Tensor  # [slots] int32
    end_ids: Tensor  # [ends] int64
    is_end: Tensor  # [vocabulary] bool

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        end_ids: tuple[int, ...],
        vocabulary: int,
        device: torch.device,
        drafts: int = MAX_DRAFTS,
        texts: tuple[int, int] = (0, 0),
    ) -> None:
        self.device, self.max_model_len = device, max_model_len
        rows = max_rows + 1
        # each column begins at a multiple of 16 bytes
        starts = np.cumsum([0, *(-(-field.words * rows // 4) * 4 for field in FIELDS)]).tolist()
        self.words = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        self._columns: dict[str, Tensor] = {}
        base, stride = (
            torch.zeros(JOIN_WORDS, dtype=torch.int64),
            torch.zeros(JOIN_WORDS, dtype=torch.int64),
        )
        for field, start in zip(FIELDS, starts, strict=False):
            column = self.words[start : start + field.words * rows].view(_TORCH[field.kind])
            column = column.view(rows, field.width) if field.width > 1 else column
            self._columns[field.name] = column.fill_(field.dead)
            first = FIRST_WORD[field.name]
            base[first : first + field.words] = start + torch.arange(field.words)
            stride[first : first + field.words] = field.words
        self.word_base, self.word_stride = base.to(device), stride.to(device)
        blocks = -(-max_model_len // BLOCK_SIZE)
        self.block_table = torch.full(
            (rows, blocks), SCRATCH_BLOCK, dtype=torch.int32, device=device
        )
        self.drafts = torch.zeros(rows, drafts, dtype=torch.int32, device=device)
        self.texts = torch.zeros(texts, dtype=torch.int32, device=device)
        self.text_filled = torch.zeros(texts[0], dtype=torch.int32, device=device)
        self.end_ids = torch.tensor(sorted(set(end_ids)), dtype=torch.int64, device=device)
        self.is_end = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.is_end[self.end_ids] = True

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["_columns"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"rows have no column {name!r}") from None


def pack_joins(joins: Any, bias_start: NDArray[np.integer], out: NDArray[np.int32]) -> None:
    """Packs k new rows (schedule.step.Joins) for `RowOps.join`. out: int32 [k or more, JOIN_WORDS +
    width]; each line gets one row, and lines after the k-th are marked empty.

    bias_start: [k], start of each row's biases in the device's array of all rows' biases. The last
    `width` words of a line are the row's block table, filled up with the scratch block; width is at
    least that of joins.blocks."""
    k, brought = joins.blocks.shape
    out[k:, 0] = -1
    out[:k, :JOIN_WORDS] = joins.records.view(np.int32).reshape(k, JOIN_WORDS)
    out[:k, FIRST_WORD["bias_start"]] = bias_start
    out[:k, JOIN_WORDS : JOIN_WORDS + brought] = joins.blocks
    out[:k, JOIN_WORDS + brought :] = SCRATCH_BLOCK

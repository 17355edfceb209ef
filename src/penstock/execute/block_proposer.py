"""BlockProposer: drafts all at once, by a layer that runs once for them (BlockLayer).

The layer's K and V of position p are made from the hidden state at p alone, and lie at p's KV slot;
`follow` stores them, and attends to nothing. In `draft` the row's newest token and a mask for each
draft go through the layer together. Their K and V lie at the slots behind the row's length, where
the next `follow` overwrites them, and each sees all tokens up to the last of them. Where a row has
no block for the last masks yet, the others don't see them: drafts are the worse for it.

Knows a model, rows and a step on the device; no plans, no host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.execute.layer_proposer import LayerProposer
from penstock.execute.packing import StagedChunks
from penstock.execute.padding import sizes_up_to
from penstock.kernels.inputs import StepInputs


class BlockProposer(LayerProposer):
    """A Proposer. most: drafts of a row."""

    all_at_once = True  # fewer masks would give other drafts

    def warm(self, sizes: Sequence[int]) -> None:
        super().warm(sizes)
        # its tokens are no padded number, so each number of rows may have kernels of its own
        for count in sizes_up_to(min(self._dead, sizes[-1])):
            self._draft(count, self._most)

    def _follow(self, size: int, hidden: Tensor, chunks: StagedChunks | None) -> None:
        columns = self._launches.columns
        tokens = size + (0 if chunks is None else chunks.ids.shape[0])
        inputs = StepInputs(columns.positions[:tokens], columns.slots[:tokens], 0, None, None)
        hidden = self._model.drafting_from(hidden[:tokens])
        self._model.store_for_drafts(hidden, inputs, self._kv.layers)
        if size:
            self._heads(size)

    def _draft(self, count: int, most: int) -> None:
        rows, ids, length = self._rows, self._ids[:count], most + 1
        where = ids.to(torch.int64)
        first = rows.length.index_select(0, ids).to(torch.int64)
        place = first[:, None] + torch.arange(length, device=ids.device)
        each, position = ids.repeat_interleave(length), place.flatten()
        slots = self._slots(where.repeat_interleave(length), position)
        stored = (slots // BLOCK_SIZE != self._kv.dump_block).view(count, length).sum(1)
        last = (first + stored - 1).clamp(min=0).repeat_interleave(length)
        inputs = StepInputs(
            position.clamp(max=rows.max_model_len - 1),
            slots,
            count * length,
            self._decode(each, last, rows.length),
            None,
        )
        newest = rows.last_token.index_select(0, ids).to(torch.int64)
        hidden = self._model.predict_blocks(newest, length, inputs, self._kv.layers)
        # a mask's token comes after the query before it
        asking = ids.repeat_interleave(most), place[:, :most].flatten(), hidden[:, 1:].flatten(0, 1)
        found, room = list[Tensor](), self._ids.shape[0]
        for start in range(0, count * most, room):
            part = [one[start : start + room] for one in asking]
            # the layer's scores may be no numbers: a draft is a token all the same
            found.append(self._launches.sampler.guess(*part).clamp(min=0))
        rows.drafts[:, :most].index_copy_(0, where, torch.cat(found).view(count, most))

"""ChainProposer: drafts one by one, by a layer that runs once a draft (ChainLayer).

The layer's K and V of position p are made from the hidden state at p and the token at p + 1, and
lie at p's KV slot. In `follow` the layer runs on all tokens of a step, rows' queries with the
tokens drawn after them: a row's last right query gives its first draft. In `draft` it runs on each
row's newest draft, at the next position, for a further one.

Drafts are worse at the end of a cached prefix, whose last K and V are of the token that followed it
first. Knows a model, rows and a step on the device; no plans, no host."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.execute.layer_proposer import LayerProposer
from penstock.execute.packing import StagedChunks
from penstock.kernels.inputs import DecodeInputs, StepInputs


class ChainProposer(LayerProposer):
    """A Proposer. most: drafts of a row."""

    def _allocate(self) -> None:
        model = self._model
        # position of each row's query, as the kernel of a single row reads it
        self._position = torch.zeros_like(self._rows.length)
        # left by `_follow` for `_draft`, like `_ids`: the layer's outputs at each row's last right
        # query
        size = (self._ids.shape[0], model.config.hidden_size)
        self._normed, self._stream = (
            torch.zeros(size, dtype=model.dtype, device=self._ids.device) for _ in range(2)
        )

    def _follow(self, size: int, hidden: Tensor, chunks: StagedChunks | None) -> None:
        columns, tokens = self._launches.columns, size
        after = self._launches.sampler.sampled_ids[:size]
        if chunks is not None:
            assert chunks.next_ids is not None, "the stager brings them where this proposer is"
            after = torch.cat((after, chunks.next_ids))
            tokens = after.shape[0]
        decode = None
        if size:
            decode = self._seen(self._staging.rows[:size], columns.positions[:size])
        inputs = StepInputs(
            columns.positions[:tokens],
            columns.slots[:tokens],
            size,
            decode,
            None if chunks is None else chunks.inputs,
        )
        # a query behind a wrong draft has no token
        normed, stream = self._model.predict(
            after.clamp(min=0).to(torch.int64),
            self._model.drafting_from(hidden[:tokens]),
            inputs,
            self._kv.layers,
        )
        if size:
            at = self._heads(size)
            torch.index_select(normed, 0, at, out=self._normed[:size])
            torch.index_select(stream, 0, at, out=self._stream[:size])

    def _draft(self, count: int, most: int) -> None:
        rows, ids = self._rows, self._ids[:count]
        where = ids.to(torch.int64)
        normed, stream = self._normed[:count], self._stream[:count]
        position = rows.length.index_select(0, ids).to(torch.int64)
        for number in range(most):
            # the layer's scores may be no numbers: a draft is a token all the same
            drafts = self._launches.sampler.guess(ids, position, normed).clamp(min=0)
            rows.drafts[:, number].index_copy_(0, where, drafts)
            if number + 1 == most:
                return
            # past the end nothing is stored, and no draft is used
            last = position.clamp(max=rows.max_model_len - 1)
            inputs = StepInputs(
                last, self._slots(where, position), count, self._seen(ids, last), None
            )
            normed, stream = self._model.predict(
                drafts.to(torch.int64), stream, inputs, self._kv.layers
            )
            position = position + 1

    def _seen(self, ids: Tensor, position: Tensor) -> DecodeInputs:
        self._position.index_copy_(0, ids.to(torch.int64), position.to(torch.int32))
        return self._decode(ids, position, self._position)

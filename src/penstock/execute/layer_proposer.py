"""LayerProposer: drafts by a layer (layers/draft_layer.py) that reads the model's hidden states,
its own or an EAGLE-3 drafter's.

The layer's K and V of position p are made from the hidden state at p and the token at p + 1, and
lie at p's KV slot, so that blocks, forks and the prefix cache carry them like the model's. After a
step's draw:

    follow    the layer runs on all tokens of the step: prompt chunks, and rows' queries with the
              tokens drawn after them. A row's last right query gives its first draft
    chain     it runs on each row's newest draft, at the next position, for a further one

Each is a CUDA graph in steps without prompt chunks. What wrong drafts leave behind the row's length
is overwritten. Where no row may draft soon, `follow` is left out: later drafts are the worse for
it, never the tokens. So they are at the end of a cached prefix, whose last K and V are of the token
that followed it first. A draft is drawn with the noise that the model's own draw at that position
will have. Knows a model, rows and a step on the device; no plans, no host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.execute.kv_cache import KvCache
from penstock.execute.packing import StagedChunks
from penstock.execute.proposer import Drawn
from penstock.execute.staging_buffer import Staging
from penstock.execute.step_launches import StepLaunches
from penstock.kernels.inputs import DecodeInputs, StepInputs
from penstock.kernels.row_state import SCRATCH_BLOCK, RowState
from penstock.models.decoder import Decoder


class LayerProposer:
    """A Proposer. most: drafts of a row."""

    follows = True

    def __init__(
        self,
        model: Decoder,
        rows: RowState,
        kv: KvCache,
        staging: Staging,
        launches: StepLaunches,
        most: int,
    ) -> None:
        self._model, self._rows, self._kv, self._staging = model, rows, kv, staging
        self._launches, self._most, device = launches, most, rows.device
        self._dead, capacity = rows.length.shape[0] - 1, staging.rows.shape[0]
        # position of each row's query, as the kernel of a single row reads it
        self._position = torch.zeros_like(rows.length)
        # results of `_follow` for `_chain`, at fixed addresses for graphs: for each row of the step
        # (the dead row where there is none) the layer's outputs at its last right query
        self._ids = torch.full((capacity,), self._dead, dtype=torch.int32, device=device)
        size = (capacity, model.config.hidden_size)
        self._normed, self._stream = (
            torch.zeros(size, dtype=model.dtype, device=device) for _ in range(2)
        )

    def launch(self, drawn: Drawn) -> None:
        """Launches the layer on the step's tokens, and the drafts of its rows; see Proposer."""
        size, graphs, chunks = drawn.size, self._launches.graphs, drawn.chunks
        follow = partial(self._follow, size, drawn.hidden, chunks)
        graph = None
        if graphs is not None and drawn.hidden is graphs.hidden and chunks is None:
            graph = graphs.drafts("follow", size, 0, follow)
        follow() if graph is None else graph.replay()
        if not drawn.proposes or not drawn.rows:
            return
        count, most = min(self._launches.size_of(drawn.rows), size), min(drawn.proposes, self._most)
        chain = partial(self._chain, count, most)
        graph = None if graphs is None else graphs.drafts("chain", count, most, chain)
        chain() if graph is None else graph.replay()

    def warm(self, sizes: Sequence[int]) -> None:
        """Compiles the layer's kernels for steps of so many queries, all of the dead row."""
        width, device = self._model.config.hidden_size, self._rows.device
        for size in sizes:
            hidden = torch.zeros((size, width), dtype=self._model.dtype, device=device)
            self.launch(Drawn(size, size, hidden, None, self._most))

    def _follow(self, size: int, hidden: Tensor, chunks: StagedChunks | None) -> None:
        """Runs the layer on a step's tokens; `size` of them are queries."""
        columns, tokens = self._launches.columns, size
        after = self._launches.sampler.sampled_ids[:size]
        if chunks is not None:
            assert chunks.next_ids is not None, "the stager brings them where this proposer is"
            after = torch.cat((after, chunks.next_ids))
            tokens = after.shape[0]
        decode = None
        if size:
            decode = self._decode(self._staging.rows[:size], columns.positions[:size])
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

    def _chain(self, count: int, most: int) -> None:
        """Writes `most` drafts of each of the first `count` rows that `_follow` left."""
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
                last, self._slots(where, position), count, self._decode(ids, last), None
            )
            normed, stream = self._model.predict(
                drafts.to(torch.int64), stream, inputs, self._kv.layers
            )
            position = position + 1

    def _heads(self, size: int) -> Tensor:
        """Sets the first `size` of `_ids` to the rows of the step, and returns the index of the
        last right query of each, [size] int64. Rows that have ended, and padding, are the dead
        row."""
        rows, row_ids = self._rows, self._staging.rows[:size]
        ends = rows.length.index_select(0, row_ids) == self._launches.columns.positions[:size] + 1
        ends &= rows.done.index_select(0, row_ids) == 0
        place = torch.where(ends, ends.cumsum(0) - 1, size)
        at = torch.zeros(size + 1, dtype=torch.int64, device=row_ids.device)
        ids = torch.full((size + 1,), self._dead, dtype=torch.int32, device=row_ids.device)
        at.scatter_(0, place, torch.arange(size, device=row_ids.device))
        ids.scatter_(0, place, row_ids)
        self._ids[:size].copy_(ids[:size])
        return at[:size]

    def _slots(self, where: Tensor, position: Tensor) -> Tensor:
        """Returns the KV slot of each row's position, [n] int64; the dump's where it has no block.
        where: rows, [n] int64."""
        table = self._rows.block_table
        number = (position // BLOCK_SIZE).clamp(max=table.shape[1] - 1)
        block = table[where, number].to(torch.int64)
        there = (block != SCRATCH_BLOCK) & (position < self._rows.max_model_len)
        block = torch.where(there, block, self._kv.dump_block)
        return block * BLOCK_SIZE + position % BLOCK_SIZE

    def _decode(self, ids: Tensor, position: Tensor) -> DecodeInputs:
        self._position.index_copy_(0, ids.to(torch.int64), position.to(torch.int32))
        return DecodeInputs(
            rows=ids,
            position=position,
            table=self._rows.block_table,
            length=self._position,
            skip=self._launches.no_skip[: ids.shape[0]],
            max_own=self._rows.max_model_len,
            groups=None,
        )

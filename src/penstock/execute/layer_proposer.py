"""LayerProposer: drafts by the model's own layer for multi-token prediction (layers/mtp_layer.py).

The layer's K and V of position p are made from the hidden state at p and the token at p + 1, and
lie at p's KV slot, so that blocks, forks and the prefix cache carry them like the model's. After a
step's draw:

    follow    the layer runs on all tokens of the step: prompt chunks, and rows' queries with the
              tokens drawn after them. A row's last right query gives its first draft
    chain     it runs on each row's newest draft, at the next position, for a further one

What wrong drafts leave behind the row's length is overwritten. Steps in which nothing is drafted
skip rows, whose later drafts are the worse for it, never the tokens. A draft is drawn with the
noise that the model's own draw at that position will have. Knows a model, rows and a step on the
device; no plans, no host.
"""

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

    reads_chunks = True

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
        self._launches, self._most = launches, most
        self._dead = rows.length.shape[0] - 1
        # position of each row's query, as the kernel of a single row reads it
        self._position = torch.zeros_like(rows.length)

    def launch(self, drawn: Drawn) -> None:
        """Launches the layer on the step's tokens, and the drafts of its rows; see Proposer."""
        size, graphs = drawn.size, self._launches.graphs
        count = min(self._launches.size_of(drawn.rows), size) if drawn.proposes else 0
        launch = partial(self._launch, size, count, drawn.hidden, drawn.chunks)
        graph = None
        if graphs is not None and drawn.hidden is graphs.hidden and drawn.chunks is None:
            graph = graphs.drafts(size, count, launch)
        launch() if graph is None else graph.replay()

    def warm(self, sizes: Sequence[int]) -> None:
        """Compiles the layer's kernels for steps of so many queries, all of the dead row."""
        config = self._model.config
        self._staging.rows.fill_(self._dead)
        for size in sizes:
            hidden = torch.zeros(
                (size, config.hidden_size), dtype=self._model.dtype, device=self._rows.device
            )
            self.launch(Drawn(size, size, hidden, None, True))

    def _launch(self, size: int, count: int, hidden: Tensor, chunks: StagedChunks | None) -> None:
        """Runs the layer on a step's tokens, and drafts for the rows of its queries. size: number of
        queries. count: the most rows of them, padded; 0: nothing is drafted."""
        outputs = self._follow(size, hidden, chunks)
        if count:
            self._chain(size, count, outputs)

    def _follow(
        self, size: int, hidden: Tensor, chunks: StagedChunks | None
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer on a step's tokens. Returns Decoder.predict's results for the `size`
        queries [size, d]."""
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
        return normed[:size], stream[:size]

    def _chain(self, size: int, count: int, hidden: tuple[Tensor, Tensor]) -> None:
        """Writes the drafts of the rows of `size` queries. count: as in `_launch`. hidden: of the
        queries, from `_follow`."""
        rows, model = self._rows, self._model
        ids, at = self._heads(size, count)
        normed, stream = (each.index_select(0, at) for each in hidden)
        position = rows.length.index_select(0, ids).to(torch.int64)
        for number in range(self._most):
            drafts = self._launches.sampler.guess(ids, position, normed)
            rows.drafts[:, number].index_copy_(0, ids.to(torch.int64), drafts)
            if number + 1 == self._most:
                return
            inputs = StepInputs(
                position, self._slots(ids, position), count, self._decode(ids, position), None
            )
            normed, stream = model.predict(
                drafts.clamp(min=0).to(torch.int64), stream, inputs, self._kv.layers
            )
            position = position + 1

    def _heads(self, size: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns rows [count] int32 and the index of the last right query of each, [count] int64.
        Rows that have ended, and padding, are the dead row."""
        rows, row_ids = self._rows, self._staging.rows[:size]
        ends = rows.length.index_select(0, row_ids) == self._launches.columns.positions[:size] + 1
        ends &= rows.done.index_select(0, row_ids) == 0
        place = torch.where(ends, ends.cumsum(0) - 1, count)
        numbers = torch.arange(size, device=row_ids.device)
        at = torch.zeros(count + 1, dtype=torch.int64, device=row_ids.device)
        ids = torch.full((count + 1,), self._dead, dtype=torch.int32, device=row_ids.device)
        at.scatter_(0, place, numbers)
        ids.scatter_(0, place, row_ids)
        return ids[:count], at[:count]

    def _slots(self, ids: Tensor, position: Tensor) -> Tensor:
        """Returns the KV slot of each row's position, [n] int64; the dump's where it has no block."""
        table = self._rows.block_table
        number = (position // BLOCK_SIZE).clamp(max=table.shape[1] - 1)
        block = table[ids.to(torch.int64), number].to(torch.int64)
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

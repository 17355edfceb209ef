"""LayerProposer: drafts by a layer (layers/draft_layer.py) that reads the model's hidden states,
its own or a drafter's. `chain_proposer.py` and `block_proposer.py` are its two kinds.

The layer's K and V lie at the KV slots of the model's tokens, so that blocks, forks and the prefix
cache carry them like the model's. After a step's draw:

    follow    K and V of all tokens of the step: prompt chunks, and rows' queries
    draft     each row's drafts

Each is a CUDA graph in steps without prompt chunks. What wrong drafts leave behind the row's length
is overwritten. Where no row may draft soon, `follow` is left out: later drafts are the worse for
it, never the tokens. A draft is drawn with the noise that the model's own draw at that position
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
from penstock.kernels.inputs import DecodeInputs
from penstock.kernels.row_state import SCRATCH_BLOCK, RowState
from penstock.models.decoder import Decoder


class LayerProposer:
    """A Proposer. most: drafts of a row."""

    follows = True
    all_at_once = False  # True: `_draft` always makes all of a row's drafts

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
        self._no_skip = torch.zeros(capacity * (1 + most), dtype=torch.int32, device=device)
        # left by `_follow` for `_draft`, at a fixed address for graphs: the step's rows; the dead
        # row where there is none
        self._ids = torch.full((capacity,), self._dead, dtype=torch.int32, device=device)
        self._allocate()

    def _allocate(self) -> None:
        """Makes further buffers of its kind."""

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
        count, most = min(self._launches.size_of(drawn.rows), size), self._most
        if not self.all_at_once:
            most = min(drawn.proposes, most)
        draft = partial(self._draft, count, most)
        graph = None if graphs is None else graphs.drafts("draft", count, most, draft)
        draft() if graph is None else graph.replay()

    def warm(self, sizes: Sequence[int]) -> None:
        """Compiles the layer's kernels for steps of so many queries, all of the dead row."""
        width, device = self._model.config.hidden_size, self._rows.device
        for size in sizes:
            hidden = torch.zeros((size, width), dtype=self._model.dtype, device=device)
            self.launch(Drawn(size, size, hidden, None, self._most))

    def _follow(self, size: int, hidden: Tensor, chunks: StagedChunks | None) -> None:
        """Runs what keeps K and V on a step's tokens; `size` of them are queries."""
        raise NotImplementedError

    def _draft(self, count: int, most: int) -> None:
        """Writes `most` drafts of each of the first `count` rows that `_follow` left."""
        raise NotImplementedError

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

    def _decode(self, ids: Tensor, position: Tensor, length: Tensor) -> DecodeInputs:
        """Returns the inputs of queries that see their row's tokens up to `position` [n]. ids:
        their rows, [n] int32. length: see DecodeInputs."""
        return DecodeInputs(
            rows=ids,
            position=position,
            table=self._rows.block_table,
            length=length,
            skip=self._no_skip[: ids.shape[0]],
            max_own=self._rows.max_model_len,
            groups=None,
        )

"""WindowTables: where layers with windows find a row's blocks: the device's block tables, once for each table of pages.

    page     [tables, blocks]  a block's page; the scratch block's is itself, the dump's too. Until a plan
             says otherwise the first blocks have pages of their own: plans without a scheduler use those
    of_rows  [tables, rows, width]  every row's block table in pages; entries that a window has passed are stale

Joins and new blocks change them, so a step of rows alone gathers nothing but its slots. It knows pages, blocks and
rows; no windows: kernels never read what lies before one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.execute.layer_pages import LayerPages
from penstock.execute.staging import Staging
from penstock.kernels.inputs import StepInputs
from penstock.kernels.row_state import SCRATCH_BLOCK, RowState
from penstock.schedule.step import Chunks, Int32, StepPlan

_BLOCK_BITS = BLOCK_SIZE.bit_length() - 1
ALIGNED = 4  # kernels are compiled for addresses that are multiples of 16 bytes


class WindowTables:
    """Tables of `layer_pages`, over the block tables of `rows` and a cache of `blocks` pages, the last one the dump."""

    def __init__(self, layer_pages: LayerPages, rows: RowState, blocks: int) -> None:
        tables, device = layer_pages.tables, rows.device
        self._table_of_layer, self._rows = layer_pages.table, rows
        self.page = torch.full((tables, blocks), blocks - 1, dtype=torch.int32, device=device)
        each = (blocks - 1) // (1 + tables)
        own = torch.arange(each, (1 + tables) * each, dtype=torch.int32, device=device)
        self.page[:, :each] = own.view(tables, each)
        self.page[:, SCRATCH_BLOCK] = SCRATCH_BLOCK
        count, width = rows.block_table.shape
        shape = (tables, -(-count // ALIGNED) * ALIGNED, width)
        self.of_rows = torch.full(shape, SCRATCH_BLOCK, dtype=torch.int32, device=device)[:, :count]

    def changes(self, plan: StepPlan, staging: Staging, clear: Callable[[Tensor], None]) -> list[Callable[[], object]]:
        """Stages blocks' pages -> the launches that take them in and clear them, before all others of the step. Blocks
        that chunks of this step fill need no clearing (1.2 ms of a step of 16,384 prompt tokens)."""
        if plan.window_pages is None or not plan.window_pages.size:
            return []
        fresh = plan.window_pages.astype(np.int64)
        some = fresh if plan.chunks is None else fresh[~np.isin(fresh[:, 0], _filled(plan.chunks))]
        return [partial(self._take, staging.add(fresh)), partial(clear, staging.add(some.reshape(-1)))]

    def joined(self, plan: StepPlan, staging: Staging) -> list[Callable[[], object]]:
        """Stages rows that join and grow -> the launches that follow them, behind those of the block tables."""
        changes = list[Callable[[], object]]()
        if plan.joins is not None and plan.joins.rows.size:
            changes.append(partial(self._join, staging.add(plan.joins.rows.astype(np.int64))))
        if plan.new_blocks.size:
            changes.append(partial(self._grow, staging.add(plan.new_blocks.astype(np.int64))))
        return changes

    def by_layer(self, step: StepInputs, slots: Tensor) -> list[StepInputs]:
        """Returns the step as each layer sees it. slots [tokens or more]: the step's, in a column of them that goes on
        to a multiple of ALIGNED."""
        pages = self.page.index_select(1, slots >> _BLOCK_BITS).to(torch.int64)
        by_table = pages.mul_(BLOCK_SIZE).add_(slots & (BLOCK_SIZE - 1))
        chunks = None
        if step.prefill is not None:
            shape = step.prefill.block_table.shape
            chunks = self.page.index_select(1, step.prefill.block_table.flatten()).view(-1, *shape)
        views = [step]
        for table in range(self.page.shape[0]):
            view = replace(step, slots=by_table[table, : step.slots.shape[0]], plans={}, alone=None)
            if step.decode is not None:
                alone = step.alone or step.decode
                view.decode = replace(alone, table=self.of_rows[table])
            if step.prefill is not None and chunks is not None:
                view.prefill = replace(step.prefill, block_table=chunks[table])
            views.append(view)
        return [views[table] for table in self._table_of_layer]

    def _take(self, lines: Tensor) -> None:
        self.page[:, lines[:, 0]] = lines[:, 1:].T.to(torch.int32)

    def _join(self, rows: Tensor) -> None:
        tables = self._rows.block_table.index_select(0, rows)
        self.of_rows[:, rows] = self.page.index_select(1, tables.flatten()).view(-1, *tables.shape)

    def _grow(self, lines: Tensor) -> None:
        self.of_rows[:, lines[:, 0], lines[:, 1]] = self.page[:, lines[:, 2]]


def _filled(chunks: Chunks) -> Int32:
    """Returns the blocks of which chunks write every token."""
    end = chunks.context + np.diff(chunks.start)
    place = np.arange(chunks.blocks.shape[1])
    first, last = -(-chunks.context // BLOCK_SIZE), end // BLOCK_SIZE
    filled: Int32 = chunks.blocks[(place >= first[:, None]) & (place < last[:, None])]
    return filled

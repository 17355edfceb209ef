"""WindowTables: where layers with windows find a row's blocks: the device's block tables, once for
each table of pages.

    page     [tables, blocks]  a block's page; the scratch block's is itself, the dump's too. Until
    a plan
             says otherwise the first blocks have pages of their own: plans without a scheduler use
             those
    of_rows  [tables, rows, width]  every row's block table in pages; entries that a window has
    passed are stale

Joins and new blocks change them, so a step of rows alone gathers nothing but its slots. It knows
pages, blocks and rows; no windows: kernels never read what lies before one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(slots=True)
class StagedPages:
    """What a plan says of pages, on the device. None: nothing of the kind."""

    fresh: Tensor | None = None  # [p, 1 + tables] int64: blocks and their pages
    # [m] int64: fresh blocks and pages, all of which are cleared but those that chunks of this step
    # fill (1.2 ms of a step of 16,384 prompt tokens)
    cleared: Tensor | None = None
    joined: Tensor | None = None  # [k] int64: rows
    grown: Tensor | None = None  # [m, 3] int64: row, index in its table, block


class WindowTables:
    """Tables of `layer_pages`, over the block tables of `rows` and a cache of `blocks` pages, the
    last one the dump."""

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

    def stage(self, plan: StepPlan, staging: Staging) -> StagedPages:
        """Stages what the plan says of pages, and of rows whose tables it changes."""
        staged = StagedPages()
        if plan.window_pages is not None and plan.window_pages.size:
            fresh = plan.window_pages.astype(np.int64)
            some = (
                fresh if plan.chunks is None else fresh[~np.isin(fresh[:, 0], _filled(plan.chunks))]
            )
            staged.fresh, staged.cleared = staging.add(fresh), staging.add(some.reshape(-1))
        if plan.joins is not None and plan.joins.rows.size:
            staged.joined = staging.add(plan.joins.rows.astype(np.int64))
        if plan.new_blocks.size:
            staged.grown = staging.add(plan.new_blocks.astype(np.int64))
        return staged

    def take(self, staged: StagedPages) -> None:
        """Takes in the pages of blocks, before any other change of the step."""
        if (fresh := staged.fresh) is not None:
            self.page[:, fresh[:, 0]] = fresh[:, 1:].T.to(torch.int32)

    def follow(self, staged: StagedPages) -> None:
        """Follows rows that have joined and grown in the block tables."""
        if (rows := staged.joined) is not None:
            tables = self._rows.block_table.index_select(0, rows)
            self.of_rows[:, rows] = self.page.index_select(1, tables.flatten()).view(
                -1, *tables.shape
            )
        if (lines := staged.grown) is not None:
            self.of_rows[:, lines[:, 0], lines[:, 1]] = self.page[:, lines[:, 2]]

    def by_layer(self, step: StepInputs, slots: Tensor) -> list[StepInputs]:
        """Returns the step as each layer sees it. slots [tokens or more]: the step's, in a column
        of them that goes on to a multiple of ALIGNED."""
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


def _filled(chunks: Chunks) -> Int32:
    """Returns the blocks of which chunks write every token."""
    end = chunks.context + np.diff(chunks.start)
    place = np.arange(chunks.blocks.shape[1])
    first, last = -(-chunks.context // BLOCK_SIZE), end // BLOCK_SIZE
    filled: Int32 = chunks.blocks[(place >= first[:, None]) & (place < last[:, None])]
    return filled

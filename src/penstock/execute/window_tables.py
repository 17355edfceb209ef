"""WindowTables: device block tables for sliding-window layers. There is one per page table
(layer_pages.py).

    page     [tables, blocks]  a block's page; the scratch block's is itself, and so is the dump's.
             Until a plan sets others, the first blocks have pages of their own, for plans made
             without a scheduler
    of_rows  [tables, rows, width]  every row's block table in pages; entries that a window has
             passed are stale

Joins and new blocks update them, so a step of rows alone gathers nothing but its slots. Knows
pages, blocks and rows; no windows: kernels never read before a window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.execute.layer_pages import LayerPages
from penstock.execute.staging_buffer import Staging
from penstock.kernels.inputs import StepInputs
from penstock.kernels.row_state import SCRATCH_BLOCK, RowState
from penstock.schedule.step import Chunks, Int32, StepPlan

_BLOCK_BITS = BLOCK_SIZE.bit_length() - 1
# columns are padded to a multiple of this many entries, because kernels need addresses that are
# multiples of 16 bytes
ALIGNED = 4


@dataclass(slots=True)
class StagedPages:
    """A plan's changes of pages, on the device. None: the plan has none."""

    # each line: a new block and its pages, int64 [new blocks, 1 + tables]
    fresh: Tensor | None = None
    # new blocks and pages to clear, int64 [blocks]. Blocks that this step's chunks fill are left
    # out, which saves 1.2 ms in a step of 16,384 prompt tokens
    cleared: Tensor | None = None
    joined: Tensor | None = None  # int64 [rows]: numbers of the rows that join
    # blocks added to block tables, int64 [n, 3]: row, index in its table, block
    grown: Tensor | None = None


class WindowTables:
    """Page tables made from the block tables of `rows`. layer_pages: the assignment of layers to
    pages. blocks: pages of the cache; the last is the dump, which padding writes to."""

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
        """Stages the plan's new pages, and the rows whose tables it changes."""
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
        """Stores the pages of new blocks, before any other change of the step."""
        if (fresh := staged.fresh) is not None:
            self.page[:, fresh[:, 0]] = fresh[:, 1:].T.to(torch.int32)

    def follow(self, staged: StagedPages) -> None:
        """Updates the tables of rows that joined or grew."""
        if (rows := staged.joined) is not None:
            tables = self._rows.block_table.index_select(0, rows)
            self.of_rows[:, rows] = self.page.index_select(1, tables.flatten()).view(
                -1, *tables.shape
            )
        if (lines := staged.grown) is not None:
            self.of_rows[:, lines[:, 0], lines[:, 1]] = self.page[:, lines[:, 2]]

    def by_layer(self, step: StepInputs, slots: Tensor) -> list[StepInputs]:
        """Returns the step's inputs for each layer. slots [tokens or more]: the step's slots, in a
        column padded to a multiple of ALIGNED."""
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
    """Returns the blocks that the step's prompt chunks fill completely."""
    end = chunks.context + np.diff(chunks.start)
    place = np.arange(chunks.blocks.shape[1])
    first, last = -(-chunks.context // BLOCK_SIZE), end // BLOCK_SIZE
    filled: Int32 = chunks.blocks[(place >= first[:, None]) & (place < last[:, None])]
    return filled

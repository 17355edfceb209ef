"""DeviceStep: launches the kernels of one step. The kernels read the rows' data on the device, so
that a step can be captured as a CUDA graph, or launched before earlier steps have been read.

    host      stage: pack the plan, one copy to the device       `staged_plan`
    device    apply the plan's changes, in schedule.step's order  here
              launch the step's kind: forward, draw               `step_kinds`, `step_launches`

With compiled kernels, a step's number of rows is padded to the next larger of a few sizes. Padding
is the dead row: a row that has always ended. In plain torch steps are not padded, and nothing is
captured. Nothing here waits for the device. Knows plans, rows, KV, the model and its draw; no
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.execute.device_sampler import DeviceSampler
from penstock.execute.executor import Outcome
from penstock.execute.graphs import Graphs
from penstock.execute.kv_cache import KvCache
from penstock.execute.padding import CHUNK_GRAPHS, EXACT, PADDED, BesideSizes
from penstock.execute.prompt_scorer import PromptScorer
from penstock.execute.sampling_mirror import SamplingMirror
from penstock.execute.staged_plan import PlanStager, StagedJoins, StagedPlan
from penstock.execute.staging_buffer import MappedMasks, Staging
from penstock.execute.step_kinds import NO_TOKENS, Beside, Decode, Late, StepDraw
from penstock.execute.step_launches import StepLaunches
from penstock.execute.window_tables import WindowTables
from penstock.kernels.ops import RowOps
from penstock.kernels.row_state import RowState
from penstock.models.decoder import Decoder
from penstock.schedule.step import LateMasks, StepPlan


class DeviceStep:
    """Applies a plan's changes and launches its step, in schedule.step's order."""

    def __init__(
        self,
        model: Decoder,
        ops: RowOps,
        rows: RowState,
        asked: SamplingMirror,
        kv: KvCache,
        scorer: PromptScorer,
        slice_rows: int,
        max_tokens: int,
        mask_slots: int,
        masks: MappedMasks,
        windows: WindowTables | None = None,
        max_queries: int = 0,
    ) -> None:
        """max_queries: most rows and drafts of a step; 0: as many as rows."""
        self.model, self.ops, self.rows, self.asked, self.kv, self.scorer = (
            model,
            ops,
            rows,
            asked,
            kv,
            scorer,
        )
        # block tables of sliding-window layers; None: the model has none that need them
        self._windows = windows
        self.max_rows = rows.length.shape[0] - 1
        self._sizes = sizes = PADDED if ops.compiled else EXACT
        queries, device = max(max_queries, self.max_rows), rows.device
        capacity = max(sizes.rows(queries), sizes.beside(queries, 1).rows)
        groups = sizes.groups(capacity, capacity)
        self.staging = Staging(capacity, groups, device)
        self.sampler = DeviceSampler(
            model, ops, rows, kv.slot_token, slice_rows, capacity, mask_slots
        )
        self.launches = StepLaunches(
            model,
            ops,
            rows,
            kv,
            self.staging,
            self.sampler,
            sizes,
            windows,
            capacity,
            groups,
            max_tokens,
        )
        self._block_copier = ops.block_copier(kv.by_block)
        self._slot_copier = ops.block_copier(kv.by_slot) if kv.by_slot else None
        self._stager = PlanStager(
            self.staging,
            sizes,
            asked,
            kv,
            windows,
            self.max_rows,
            ops.compiled,
            model.reads_tags,
            follows=model.drafter is not None,
        )
        model.hand_out_for_drafts(self.launches.columns.tokens.shape[0])
        self.draw = draw = StepDraw(self.launches, asked, scorer, model.vocabulary, ops.compiled)
        self._decode, self._beside = Decode(self.launches, draw), Beside(self.launches, draw)
        self._late = Late(
            self._decode, self._beside, draw, self.launches, self.staging, masks, self.max_rows
        )

    @property
    def graphs(self) -> Graphs | None:
        return self.launches.graphs

    def capture(
        self, sizes: Sequence[int], grouping: bool, asking: bool, room: int | None
    ) -> dict[str, Any]:
        """Compiles and captures decode steps of `sizes` rows as CUDA graphs; returns a summary for
        describe().

        room: bytes that graphs may take; None: capture all sizes, because other ranks do. grouping:
        also capture steps with prefix groups. asking: also capture draws with all sampling options;
        without it only sizes a factor of two apart are captured now, the others on first use.

        No row may be live yet, since this runs steps of dead rows.
        """
        launches, rows, width = (
            self.launches,
            self.staging.rows.shape[0],
            self.model.config.hidden_size,
        )
        hidden = torch.zeros(rows, width, dtype=self.model.dtype, device=self.rows.device)
        self.staging.rows.fill_(self.max_rows)
        launches.graphs = captured = Graphs(hidden)
        first = (
            sizes
            if asking
            else [size for size in sizes if size & (size - 1) == 0 or size == max(sizes)]
        )
        captured.capture(
            first, grouping, asking, launches.forward_rows, launches.draw_for_graph, room
        )
        if not asking:
            captured.capture_later(sizes)
        # steps with chunks have no graphs if a proposer reads the hidden states of chunks
        for tokens in () if self.draw.follows else CHUNK_GRAPHS:
            captured.capture_beside(1, tokens, False, launches.forward_few(1, tokens, False))
        return {
            "sizes": sorted(captured.by_size),
            "seconds": round(captured.seconds, 2),
            "bytes": captured.bytes,
        }

    def step(self, plan: StepPlan) -> Outcome:
        """Launches a step; returns its results on the device. For a late step (its draw waits for
        token masks) only the forward is launched."""
        staged = self._stager.stage(plan, self._sizes_of(plan))
        self._change(staged)
        if not staged.queries and staged.chunks is None:
            return Outcome(NO_TOKENS)
        if plan.draws_late:
            return self._late.launch(staged)
        return (self._decode if staged.chunks is None else self._beside).launch(staged)

    def end(self, late: LateMasks) -> Outcome:
        """Launches the draw of the last launched step, which was late; returns its results on the
        device."""
        return self._late.draw(late)

    def _sizes_of(self, plan: StepPlan) -> BesideSizes:
        """Returns the padded sizes of a step; they are equal on all ranks, whatever graphs each has
        captured."""
        rows, chunks = plan.query_rows.size, plan.chunks
        if chunks is not None and chunks.tokens.size:
            return self._sizes.beside(rows, chunks.tokens.size)
        size = self.launches.size_of(rows)
        return BesideSizes(size, size, True)

    def _change(self, staged: StagedPlan) -> None:
        """Launches the plan's changes to the device's state, which come before the forward."""
        if staged.pages is not None and self._windows is not None:
            self._windows.take(staged.pages)
            if staged.pages.cleared is not None:
                self.kv.clear(staged.pages.cleared)
        if staged.cleared is not None:
            self.kv.clear(staged.cleared)
        if staged.moved_blocks is not None:
            self._block_copier.copy(*staged.moved_blocks)
        if staged.moved_slots is not None and self._slot_copier is not None:
            self._slot_copier.copy(*staged.moved_slots)
        if staged.joins is not None:
            self._join(staged.joins)
        if staged.new_blocks is not None:
            self.ops.grow(staged.new_blocks, self.rows)
        if staged.pages is not None and self._windows is not None:
            self._windows.follow(staged.pages)
        if staged.masks is not None:
            self.sampler.masks.index_copy_(0, *staged.masks)
        if staged.texts is not None:
            places, tokens, slots, filled = staged.texts
            self.rows.texts.view(-1).index_copy_(0, places, tokens)
            self.rows.text_filled.index_copy_(0, slots, filled)
        if staged.group_blocks is not None:
            self.launches.take_group_blocks(staged.group_blocks)
        if staged.chunks is not None:
            self.launches.columns.take(staged.sizes.rows, staged.chunks)
            self.kv.store_tokens(staged.chunks.slots, staged.chunks.ids)
        if staged.takes_drafts:
            self.launches.take_drafts(staged.sizes.rows)

    def _join(self, joins: StagedJoins) -> None:
        if (biases := joins.biases) is not None:
            self.sampler.take_biases(biases.first, biases.ids, biases.values)
            if biases.start is not None:
                self.rows.bias_start.copy_(biases.start)
        self.ops.join(joins.lines, self.rows)

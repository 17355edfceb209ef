"""DeviceStep: a step as launches that read the rows on the device, so that it can be captured, or issued a step ahead.

    host, a step      pack -> one copy to the device -> copies, joins, new blocks (launched where there are any)
    device, a step    prepare: row numbers -> tokens, positions, slots        | captured in a graph for every size up to
                      forward; head and draw in slices; advance               | GRAPH_ROWS; the same launches above it

Where kernels are compiled, a step of S rows runs as the next larger of a few sizes; what is padded is the dead row, and
always done. In plain torch the same launches run at their own sizes, and nothing is captured. Steps with chunks run
without a graph (but for one row with a short chunk, a lone request's first step), and so does the draw of a step in
which a row asks for the most likely tokens. Nothing here waits for the device.
It knows plans, rows, KV, the model and its draw; no sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.execute import packing
from penstock.execute.device_sampler import EVERY, MOST, PLAIN, DeviceSampler
from penstock.execute.executor import Outcome
from penstock.execute.graphs import Graphs
from penstock.execute.kv_cache import KvCache
from penstock.execute.padding import BESIDE_CHUNKS, BESIDE_TOKENS, CHUNK_GRAPHS, EXACT, PADDED, BesideSizes
from penstock.execute.prompt_scorer import Logprobs, PromptScorer
from penstock.execute.rank_sampler import NOBODY, Asking
from penstock.execute.sampling_mirror import SamplingMirror
from penstock.execute.staging import MappedMasks, Staging, to_device
from penstock.execute.window_tables import ALIGNED, WindowTables
from penstock.kernels.inputs import DecodeInputs, GroupInputs, PrefillInputs, Queries, StepInputs
from penstock.kernels.ops import RowOps
from penstock.kernels.row_state import RowState
from penstock.models.decoder import Decoder
from penstock.row_table import WANTS_FILTER, WANTS_LABELS, WANTS_LOGPROBS
from penstock.schedule.step import Chunks, Int32, Joins, LateMasks, StepPlan

_NO_TOKENS = torch.empty(0, dtype=torch.int32)
_Forwarded = tuple[StepPlan, int, Tensor]  # plan, what its rows run as, hidden states


@dataclass(slots=True)
class StepTensors:
    """A step's tokens, rows first: what `prepare` and the chunks write and the layers read."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64

    @classmethod
    def of(cls, tokens: int, device: torch.device) -> StepTensors:
        return cls(*(torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(3)))


class DeviceStep:
    """What a step changes, and the order in which it does. The order is schedule.step's."""

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
    ) -> None:
        self.windows = windows  # None: all layers keep K and V in the same blocks
        self.model, self.ops, self.rows, self.asked, self.kv, self.scorer = model, ops, rows, asked, kv, scorer
        self._masks = masks
        self.max_rows = rows.length.shape[0] - 1
        self.sizes = PADDED if ops.compiled else EXACT
        capacity, device = max(self.sizes.rows(self.max_rows), self.sizes.beside(self.max_rows, 1).rows), rows.device
        most_groups = self.sizes.groups(capacity, capacity)
        self.staging = Staging(capacity, most_groups, device)
        self.columns = StepTensors.of(capacity + max_tokens + BESIDE_TOKENS[-1] + ALIGNED, device)
        self.draw = DeviceSampler(model, ops, rows, kv.slot_token, slice_rows, capacity, mask_slots)
        width = rows.block_table.shape[1]
        # For graphs, one address; in plain torch a step's lie where they were staged.
        self.group_blocks = torch.zeros(most_groups if ops.compiled else 0, width, dtype=torch.int32, device=device)
        self._no_skip = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._sent_groups: Int32 = np.zeros((0, 0), np.int32)
        # Where graphs of rows and chunks find the chunks: as packing.pack_chunks gives them, at one address.
        self._few_chunks = PrefillInputs(
            start=torch.zeros(BESIDE_CHUNKS + 1, dtype=torch.int32, device=device),
            context=torch.zeros(BESIDE_CHUNKS, dtype=torch.int32, device=device),
            block_table=torch.zeros((BESIDE_CHUNKS, -(-width // 16) * 16), dtype=torch.int32, device=device),
        )
        self._copier = ops.block_copier(kv.by_block)
        self.graphs: Graphs | None = None
        self._drafting = False  # whether the step has drafts
        self._forwarded: _Forwarded | None = None  # the step whose draw is still to be launched

    def capture(self, sizes: Sequence[int], grouping: bool, asking: bool, room: int | None) -> dict[str, Any]:
        """Compiles and captures decode steps of `sizes` rows -> what that was, for describe().

        room: bytes that graphs may take; None: other ranks capture the same sizes, so all of them. grouping, asking:
        steps with prefix groups, and draws with all that rows may ask. Without `asking` as little as there may be:
        sizes a factor of two apart; the others are captured when they are met.

        No rows may live yet: it runs dead ones.
        """
        rows, width = self.staging.rows.shape[0], self.model.config.hidden_size
        hidden = torch.zeros(rows, width, dtype=self.model.dtype, device=self.rows.device)
        self.staging.rows.fill_(self.max_rows)
        self.graphs = captured = Graphs(hidden)
        first = sizes if asking else [size for size in sizes if size & (size - 1) == 0 or size == max(sizes)]
        captured.capture(first, grouping, asking, self.launch_forward, self._draw_for_graph, room)
        if not asking:
            captured.capture_later(sizes)
        for tokens in CHUNK_GRAPHS:
            captured.capture_beside(1, tokens, False, self._launch_of_few(1, tokens, False))
        return {"sizes": sorted(captured.by_size), "seconds": round(captured.seconds, 2), "bytes": captured.bytes}

    def step(self, plan: StepPlan) -> Outcome:
        """Launches a step and gives what it leaves on the device; of one that draws late the forward, and nothing."""
        rows, sizes = plan.query_rows.size, self._sizes_of(plan)
        size = sizes.rows
        self._drafting = plan.drafts is not None
        packing.without_groups_past(plan, self.sizes.groups(size, plan.group_length.size))
        self.staging.begin()
        packing.pack_rows(self.staging, plan, size, self.max_rows)
        packing.pack_groups(self.staging, plan, self.sizes.groups(size, plan.group_length.size))
        changes = self._changes(plan)
        chunks = None
        if plan.chunks is not None and plan.chunks.tokens.size:
            chunks, store = self._chunks(plan.chunks, sizes)
            changes.append(store)
        self.staging.send()
        for launch in changes:
            launch()
        if not rows and chunks is None:
            return Outcome(_NO_TOKENS)
        grouped, graphs = bool(plan.group_length.size), self.graphs
        if chunks is not None:
            hidden = self._forward_beside(plan, sizes, grouped, chunks)
        elif graphs is None:
            hidden = self.launch_forward(size, grouped, groups=plan.group_length.size)
        elif not grouped and not plan.wants and (whole := graphs.whole(size)) is not None:
            whole.replay()
            return Outcome(self.draw.sampled_ids[:rows])
        elif (graph := graphs.forward(size, grouped, self.launch_forward)) is not None:
            graph.replay()
            hidden = graphs.hidden
        else:
            hidden = self.launch_forward(size, grouped)
        self._forwarded = plan, size, hidden
        return Outcome(_NO_TOKENS) if plan.draws_late else self.end()

    def end(self, late: LateMasks | None = None) -> Outcome:
        """Launches the draw of the step whose forward was launched last, and gives what that step leaves."""
        assert self._forwarded is not None, "no forward waits for its draw"
        (plan, size, hidden), self._forwarded = self._forwarded, None
        outcome, rows = Outcome(_NO_TOKENS), plan.query_rows.size
        if late is not None:
            self._take_late(plan, late)
        if rows:
            draws, forces = min(self._draw_size(rows), size), late is not None and late.forced.size > 0
            outcome.logprobs = self._drawn(plan, draws, hidden, forces)
            outcome.tokens = self.draw.sampled_ids[:rows]
        if plan.chunks is not None and plan.chunks.scored:
            outcome.prompt_logprobs = self.scorer.score(hidden[size:], plan.chunks)
        return outcome

    def _take_late(self, plan: StepPlan, late: LateMasks) -> None:
        """Masks to their slots. For the draw the dead row stands in the place of one that sits it out."""
        device = self.rows.device
        if late.slots.size:
            slots = to_device(late.slots.astype(np.int64), device)
            self.draw.masks.index_copy_(0, slots, self._masks.take(late.words, late.places))
        if late.forced.size:
            self.draw.force(late.forced, late.tokens)
        if late.sit_out.size:
            sits = np.zeros(self.max_rows + 1, np.bool_)
            sits[late.sit_out] = True
            out = np.flatnonzero(sits.take(plan.query_rows))
            self.staging.rows.index_fill_(0, to_device(out, device), self.max_rows)
            self.staging.forget()

    # --- before the forward -------------------------------------------------------------------------------------------

    def _sizes_of(self, plan: StepPlan) -> BesideSizes:
        """What the step runs as; of several ranks the same on all, whatever each of them has captured."""
        rows, chunks = plan.query_rows.size, plan.chunks
        if chunks is not None and chunks.tokens.size:
            return self.sizes.beside(rows, chunks.tokens.size)
        size = self._draw_size(rows)
        return BesideSizes(size, size, True)

    def _draw_size(self, rows: int) -> int:
        """What the draws of so many rows run as, and forwards without chunks."""
        size = None if self.graphs is None else self.graphs.size_for(rows)
        return size or self.sizes.rows(rows)

    def _changes(self, plan: StepPlan) -> list[Callable[[], object]]:
        """Stages what the plan changes before the forward -> the launches that take it in, in order, for after send."""
        add, changes = self.staging.add, list[Callable[[], object]]()
        if self.windows is not None:
            changes += self.windows.changes(plan, self.staging, self.kv.clear)
        if plan.clears:
            changes.append(partial(self.kv.clear, add(self.kv.handed_out(plan))))
        if plan.copies.size:
            changes.append(partial(self._copier.copy, add(plan.copies[:, 0]), add(plan.copies[:, 1])))
        if plan.joins is not None and plan.joins.rows.size:
            changes += self._joins(plan.joins)
        if plan.masks is not None:
            slots, words = add(plan.masks.slots.astype(np.int64)), add(plan.masks.words)
            changes.append(partial(self.draw.masks.index_copy_, 0, slots, words))
        if plan.new_blocks.size:
            changes.append(partial(self.ops.grow, add(packing.new_block_lines(plan.new_blocks)), self.rows))
        if self.windows is not None:
            changes += self.windows.joined(plan, self.staging)
        if plan.group_length.size and not self.ops.compiled:
            self.group_blocks = add(plan.group_blocks)  # nothing is captured: they are read where they lie
        elif plan.group_length.size and not np.array_equal(plan.group_blocks, self._sent_groups):
            self._sent_groups = plan.group_blocks
            groups, width = plan.group_blocks.shape
            changes.append(partial(self.group_blocks[:groups, :width].copy_, add(plan.group_blocks)))
        return changes

    def _joins(self, joins: Joins) -> list[Callable[[], object]]:
        add, asked, changes = self.staging.add, self.asked, list[Callable[[], object]]()
        new = asked.join(joins)
        if new.stop > new.start:
            ids, values = add(asked.bias_ids[new]), add(asked.bias_values[new])
            changes.append(partial(self.draw.take_biases, new.start, ids, values))
            if asked.moved:
                changes.append(partial(self.rows.bias_start.copy_, add(asked.bias_first.astype(np.int32))))
        lines = add(packing.join_lines(joins, asked.bias_first[joins.rows]))
        return [*changes, partial(self.ops.join, lines, self.rows)]

    def _chunks(self, chunks: Chunks, sizes: BesideSizes) -> tuple[PrefillInputs, Callable[[], None]]:
        """Stages chunks -> what attention is told, and the launch that puts their tokens behind the rows' in the
        columns."""
        size, tokens = sizes.rows, sizes.tokens - sizes.rows
        capacity, dump = self.sizes.chunks(chunks.context.size), self.kv.dump_block * BLOCK_SIZE
        ids, positions, slots, inputs = packing.pack_chunks(self.staging, chunks, tokens, capacity, dump)

        def store() -> None:
            columns, last = self.columns, size + tokens
            columns.tokens[size:last].copy_(ids)
            columns.positions[size:last].copy_(positions)
            columns.slots[size:last].copy_(slots)
            self.kv.store_tokens(slots, ids)

        return inputs, store

    # --- forward and draw ---------------------------------------------------------------------------------------------

    def _forward_beside(self, plan: StepPlan, sizes: BesideSizes, grouped: bool, chunks: PrefillInputs) -> Tensor:
        """The forward of a step with chunks: a graph, where it is of few kinds and none of its prompts is scored."""
        few, told, graph = self._few_chunks, plan.chunks, None
        assert told is not None
        scored = told.scored
        fits = sizes.few and chunks.context.shape == few.context.shape and not scored
        if self.graphs is not None and fits:
            launch = self._launch_of_few(sizes.rows, sizes.tokens, grouped)
            graph = self.graphs.with_chunks(sizes.rows, sizes.tokens, grouped, launch)
        if self.graphs is None or graph is None:
            return self.launch_forward(sizes.rows, grouped, chunks, sizes.tokens, plan.group_length.size, scored)
        count, width = chunks.block_table.shape
        few.start.copy_(chunks.start)
        few.context.copy_(chunks.context)
        few.block_table[:count, :width].copy_(chunks.block_table)
        graph.replay()
        return self.graphs.hidden

    def _launch_of_few(self, size: int, tokens: int, grouped: bool) -> Callable[[], Tensor]:
        """Returns the launch of `size` rows and the chunks at their one address, `tokens` in all."""
        return partial(self.launch_forward, size, grouped, self._few_chunks, tokens)

    def launch_forward(
        self, size: int, grouped: bool, chunks: PrefillInputs | None = None, tokens: int = 0, groups: int = 0,
        scored: bool = False,
    ) -> Tensor:  # fmt: skip
        """prepare and forward of `size` rows, and of the chunks whose tokens lie behind them in the columns -> normed
        hidden states of the rows, with `scored` (or where there are none) of the chunks too. tokens: with the
        chunks'. groups: how many there are, where sizes aren't padded."""
        groups = self.sizes.groups(size, groups) if grouped else 0
        columns = self.columns
        tokens = size if chunks is None else tokens
        if size:
            self.ops.prepare(
                self.staging.rows[:size], self.queries(size), self.rows, self.kv.slot_token, self.kv.dump_block,
                columns.tokens, columns.positions, columns.slots,
            )  # fmt: skip
        decode = self._decode(size, groups) if size else None
        inputs = StepInputs(columns.positions[:tokens], columns.slots[:tokens], size, decode, chunks)
        if decode is not None and groups:
            inputs.alone = replace(decode, groups=None, skip=self._no_skip[:size])
        if self.windows is not None:
            inputs.by_layer = self.windows.by_layer(inputs, columns.slots[: -(-tokens // ALIGNED) * ALIGNED])
        of_rows = chunks is not None and size > 0 and not scored
        return self.model.forward(columns.tokens[:tokens], inputs, self.kv.layers, of_rows=of_rows)

    def queries(self, size: int) -> Queries | None:
        """Returns what the step's queries are of their rows; None where each is its row's only one, as far as kernels
        needn't be the same for both."""
        if not self.ops.compiled and not self._drafting:
            return None
        return Queries(self.staging.offset[:size], self.staging.draft[:size])

    def launch_draw(
        self, size: int, hidden: Tensor, wants: int, most: int = 0, asking: Asking = NOBODY, forces: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Draws for the step's queries, and takes what was drawn into the rows: as `DeviceSampler.launch`."""
        ids, queries, position = self.staging.rows[:size], self.queries(size), self.columns.positions[:size]
        return self.draw.launch(ids, queries, position, hidden, wants, most, asking, forces)

    def _draw_for_graph(self, size: int, hidden: Tensor, every: bool, forces: bool) -> None:
        self.launch_draw(size, hidden, EVERY if every else PLAIN, forces=forces)

    def _drawn(self, plan: StepPlan, size: int, hidden: Tensor, forces: bool) -> Logprobs | None:
        """Draws a token for each row into `sampled_ids`, and takes it into the rows. forces: some queries' are
        known."""
        where, k = np.zeros(0, np.int64), np.zeros(0, np.int32)
        if plan.wants & WANTS_LOGPROBS:
            where = np.flatnonzero(self.asked.wants[plan.query_rows] & WANTS_LOGPROBS)
            k = self.asked.logprobs[plan.query_rows[where]]
        most = (MOST if self.ops.compiled else int(k.max())) if k.any() else 0
        every, rows = bool(plan.wants), plan.query_rows.size
        asking = NOBODY
        if self.model.vocabulary is not None and plan.wants & (WANTS_FILTER | WANTS_LOGPROBS):
            filters = np.flatnonzero(self.asked.wants[plan.query_rows] & WANTS_FILTER)
            asking = Asking(filters=filters, logprobs=where)
        ids = top = self.draw.nothing
        graph, fits = None, not most and asking is NOBODY and not (every and self.draw.pool_moved)
        if self.graphs is not None and hidden is self.graphs.hidden and fits:
            graph = self.graphs.draw(size, every, forces, self._draw_for_graph)
        if graph is not None:
            graph.replay()
        else:
            wants = (EVERY if every else PLAIN) | plan.wants & WANTS_LABELS if self.ops.compiled else plan.wants
            ids, top = self.launch_draw(size, hidden, wants, most, asking, forces)
        if not where.size:
            return None
        return Logprobs(where, k, self.draw.chosen[:rows], self.draw.rank[:rows], ids[:rows], top[:rows], where)

    def _decode(self, size: int, count: int) -> DecodeInputs:
        """Rows of a step with `count` places for prefix groups."""
        staging, rows, groups = self.staging, self.rows, None
        if count:
            start, length = staging.group_start[: count + 1], staging.group_length[:count]
            groups = GroupInputs(start, self.group_blocks[:count], length)
        return DecodeInputs(
            rows=staging.rows[:size],
            position=self.columns.positions[:size],
            table=rows.block_table,
            length=rows.length,
            skip=staging.skip[:size],
            max_own=rows.max_model_len,
            groups=groups,
        )

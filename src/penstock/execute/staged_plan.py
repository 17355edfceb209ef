"""StagedPlan: a step's plan as device tensors. PlanStager packs a plan and sends it by one copy.

Content that the device has already is not sent again: prefix groups' blocks that are those of the
step before, and unchanged arrays of the staging buffer's fixed part. Launches only the copy;
device_step.py uses the tensors in the order of StagedPlan's fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.execute import packing
from penstock.execute.kv_cache import KvCache
from penstock.execute.packing import StagedChunks
from penstock.execute.padding import BesideSizes, StepSizes
from penstock.execute.sampling_mirror import SamplingMirror
from penstock.execute.staging_buffer import Staging
from penstock.execute.window_tables import StagedPages, WindowTables
from penstock.schedule.step import Int32, Joins, StepPlan


@dataclass(slots=True)
class StagedBiases:
    """m new logit_bias values for the device's pool of them."""

    first: int  # index in the pool of the first new value
    ids: Tensor  # [m] int32: token ids
    values: Tensor  # [m] float32: values added to logits
    start: Tensor | None  # [rows] int32: start of every row's biases; None: unchanged


@dataclass(slots=True)
class StagedJoins:
    """The k rows that join in this step, staged on the device."""

    lines: Tensor  # [k, words] int32: the rows' fields, as packing.join_lines makes them
    biases: StagedBiases | None


@dataclass(slots=True)
class StagedPlan:
    """A plan and its tensors, in the order of use. A field that is None: the plan has nothing of
    this kind."""

    plan: StepPlan
    sizes: BesideSizes  # padded numbers of queries and of all tokens
    queries: int  # number of queries of the plan's rows, without padding
    groups: int  # padded number of prefix groups; 0: no groups
    pages: StagedPages | None = None
    cleared: Tensor | None = None  # int64 [blocks]: numbers of the blocks to clear
    takes_drafts: bool = False  # True if some queries' drafts were made by the device
    # KV blocks to copy: sources and targets, int32 [copies] each
    moved_blocks: tuple[Tensor, Tensor] | None = None
    # slots of recurrent state to copy: sources and targets, int32 [copies] each
    moved_slots: tuple[Tensor, Tensor] | None = None
    joins: StagedJoins | None = None
    new_blocks: Tensor | None = (
        # blocks added to block tables, int32 [n, 3]: row, index in its table, block; padded with
        # row -1
        None
    )
    masks: tuple[Tensor, Tensor] | None = (
        None  # token masks: slots int64 [masks], words int32 [masks, ceil(vocabulary / 32)]
    )
    # texts of ended samples: places int64 [t], tokens int32 [t], slots int64 [m], numbers of
    # their tokens, int32 [m]
    texts: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    group_blocks: Tensor | None = None  # blocks of each prefix group, int32 [groups, width]
    chunks: StagedChunks | None = None


class PlanStager:
    """Packs plans into the buffer `staging`. sizes: functions that pad numbers. asked: the
    SamplingMirror, which stores joining rows and places their biases.

    keeps_groups: True if prefix groups' blocks, once sent, stay at the address from which later
    steps read them. reads_tags: True if the model reads tags. follows: True if a
    proposer reads the token after each token of a chunk.
    """

    def __init__(
        self,
        staging: Staging,
        sizes: StepSizes,
        asked: SamplingMirror,
        kv: KvCache,
        windows: WindowTables | None,
        max_rows: int,
        keeps_groups: bool,
        reads_tags: bool,
        follows: bool = False,
    ) -> None:
        self._staging, self._sizes, self._asked, self._kv, self._windows = (
            staging,
            sizes,
            asked,
            kv,
            windows,
        )
        self._dead_row, self._keeps_groups, self._reads_tags = max_rows, keeps_groups, reads_tags
        self._follows = follows
        self._sent_groups: Int32 = np.zeros((0, 0), np.int32)
        self._start = self._length = self._skips = np.zeros(
            0, np.int32
        )  # of the last plan's groups

    def stage(self, plan: StepPlan, sizes: BesideSizes) -> StagedPlan:
        """Sends a plan to the device; returns its tensors, valid until the next plan is staged.

        sizes: padded numbers of queries and of all tokens. Prefix groups beyond the step's capacity
        are dropped from the plan.
        """
        staging, add, size = self._staging, self._staging.add, sizes.rows
        places = self._sizes.groups(size, plan.group_length.size)
        packing.without_groups_past(plan, places)
        staging.begin()
        packing.pack_rows(staging, plan, self._skip(plan), size, self._dead_row)
        packing.pack_groups(staging, plan, places)
        staged = StagedPlan(
            plan, sizes, plan.query_rows.size, places if plan.group_length.size else 0
        )
        if self._windows is not None:
            staged.pages = self._windows.stage(plan, staging)
        if plan.clears:
            staged.cleared = add(self._kv.handed_out(plan))
        if (blocks := plan.moves.blocks).size:
            staged.moved_blocks = add(blocks[:, 0]), add(blocks[:, 1])
        if (slots := plan.moves.slots).size:
            staged.moved_slots = add(slots[:, 0]), add(slots[:, 1])
        if plan.joins is not None and plan.joins.rows.size:
            staged.joins = self._joins(plan.joins)
        if plan.new_blocks.size:
            staged.new_blocks = add(packing.new_block_lines(plan.new_blocks))
        if plan.masks is not None:
            staged.masks = add(plan.masks.slots.astype(np.int64)), add(plan.masks.words)
        if (texts := plan.texts) is not None:
            staged.texts = add(texts.places), add(texts.tokens), add(texts.slots), add(texts.filled)
        if plan.group_length.size and not self._there(plan.group_blocks):
            staged.group_blocks = add(plan.group_blocks)
        if plan.chunks is not None and plan.chunks.tokens.size:
            capacity = self._sizes.chunks(plan.chunks.context.size)
            dump_state = None if self._kv.folded is None else self._dead_row
            staged.chunks = packing.pack_chunks(
                staging,
                plan.chunks,
                sizes,
                capacity,
                self._kv.dump_block,
                self._reads_tags,
                dump_state,
                self._follows,
            )
        staging.send()
        if plan.drafts is not None and plan.drafts.from_device:
            staged.takes_drafts = True
            staging.forget()  # forget, since the device overwrites the staged drafts
        return staged

    def _joins(self, joins: Joins) -> StagedJoins:
        add, asked, biases = self._staging.add, self._asked, None
        new = asked.join(joins)
        if new.stop > new.start:
            ids, values = add(asked.bias_ids[new]), add(asked.bias_values[new])
            start = add(asked.bias_first.astype(np.int32)) if asked.moved else None
            biases = StagedBiases(new.start, ids, values, start)
        return StagedJoins(add(packing.join_lines(joins, asked.bias_first[joins.rows])), biases)

    def _there(self, group_blocks: Int32) -> bool:
        """Returns True if the device has these group blocks already. If not, remembers them, since
        the plan then sends them."""
        sent, self._sent_groups = self._sent_groups, group_blocks
        return self._keeps_groups and (group_blocks is sent or np.array_equal(group_blocks, sent))

    def _skip(self, plan: StepPlan) -> Int32:
        """Returns plan.group_skip, made anew only if the groups are not the last plan's."""
        if plan.group_start is not self._start or plan.group_length is not self._length:
            self._start, self._length = plan.group_start, plan.group_length
            self._skips = plan.group_skip
        return self._skips

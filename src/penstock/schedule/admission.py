"""Admission: brings waiting fork groups into the batch. A fork group is a prompt with the samples
that start from it. It waits, is prefilled in chunks, and then each of its samples gets a row as
rows come free. A row is one running sample's place in the batch.

    waiting --start--> prefilling --last chunk planned--> ready --last sample joined--> (rows only)

First come, first served, and fair between tenants (wait_queue.py): a group that doesn't fit holds
up the groups behind it. The forecast says what fits; nothing is reserved. Groups of background
requests stand behind all others in each of these queues. They leave some rows and blocks free for
new requests, and lose rows when other groups cannot get any (`preempt_background`). Knows groups,
rows, blocks and the prefix tree; not how tokens are read back, nor how steps are ordered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.schedule.blocks import BlockPool
from penstock.schedule.forecast import Forecast, LengthModel
from penstock.schedule.mask_slots import MaskSlots
from penstock.schedule.prefix_tree import PrefixTree, words_of
from penstock.schedule.prompt_states import PromptStates
from penstock.schedule.request_state import PREFILLING, READY, WAITING, ForkGroup
from penstock.schedule.rows import BACKGROUND, IGNORES_EOS, RUNNING, STOP_IDS, Rows
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.state_slots import StateSlots
from penstock.schedule.step import Int32
from penstock.schedule.wait_queue import FairQueue
from penstock.schedule.windowed_pool import WindowedPool

_SPARE = 100  # 1 / _SPARE of all blocks is kept free when the forecast decides what fits
_AHEAD = 16  # samples that may be prefilled before rows are free for them: 1 / _AHEAD of all rows
_KEPT = 8  # background groups leave 1 / _KEPT of the rows and of the blocks free
# steps after an arrival in which background prefill is limited to 1 / _KEPT of a step's
# tokens, so that steps stay short
_COMPANY = 512
_REPAID = 4  # times that a preempted sample's steps save what its tokens cost to compute again


@dataclass(slots=True)
class Piece:
    """Samples of one fork group that get rows in this step."""

    group: ForkGroup
    rows: Int32
    samples: Int32


@dataclass(slots=True)
class Chunk:
    """Tokens start : stop of a group's prompt, to prefill in this step."""

    group: ForkGroup
    start: int
    stop: int
    # copy of the block numbers of tokens 0 : stop, since a sample may take over the group's last
    # block in this same step
    blocks: Int32


@dataclass(slots=True)
class Admitted:
    """Rows and prompt chunks that admission adds to a step."""

    pieces: list[Piece] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[Int32] = field(default_factory=list)
    tokens: int = 0  # tokens of the step: of rows and of prompt chunks together
    growing: int = 0  # further blocks that the joined rows need in this same step


class Admission:
    """Queues of fork groups whose samples wait for rows."""

    def __init__(
        self,
        limits: SchedulerConfig,
        rows: Rows,
        pool: BlockPool,
        tree: PrefixTree,
        lengths: LengthModel,
        mask_slots: MaskSlots,
        slots: StateSlots,
    ) -> None:
        self.limits, self.rows, self.pool, self.tree, self.lengths = (
            limits,
            rows,
            pool,
            tree,
            lengths,
        )
        self.states = PromptStates(slots, tree.enabled)
        self.mask_slots = mask_slots
        self.waiting = FairQueue()
        self.behind = FairQueue()  # waiting fork groups of background requests
        self.prefilling: list[ForkGroup] = []
        self.ready: list[ForkGroup] = []
        self.knows_background = False  # True once any background group has come
        self._came = False  # a group of a foreground request has come since the last `admit`
        self._alone_from = 0  # first step in which background prefill may fill the whole step
        # ready groups that the last `admit` gave no rows or blocks
        self._starving: list[ForkGroup] = []
        # True if a group of a foreground request got no rows or blocks, or could not begin
        self.starved = False
        self.order = 0
        self.prefilled_tokens = 0
        self.cached_tokens = 0
        self.queried_tokens = 0

    @property
    def pending(self) -> int:
        """Number of samples that wait for a row."""
        return sum(g.pending for line in self._lines for g in line)

    @property
    def _lines(self) -> tuple[FairQueue | list[ForkGroup], ...]:
        return self.waiting, self.behind, self.prefilling, self.ready

    def push(self, group: ForkGroup) -> None:
        """Puts a group at the end of its tenant's queue; a group that has waited before goes to the
        front."""
        (self.behind if group.live.background else self.waiting).push(group)
        self.knows_background |= group.live.background
        self._came = self._came or not group.live.background

    def remove(self, group: ForkGroup) -> None:
        """Removes a cancelled group from whichever queue holds it."""
        for line in self._lines:
            if group in line:
                line.remove(group)
        self.states.give_back(group)

    def admit(self, number: int, active: int) -> Admitted:
        """Gives rows to samples of prefilled groups, plans prompt chunks, then gives rows to
        samples whose prompts these chunks complete; all within the step's tokens and free blocks.
        number: the step's. active: rows that run already."""
        out = Admitted()
        self.starved = False
        if not (self.ready or self.prefilling or self.waiting or self.behind):
            return out
        if self._came:
            self._came, self._alone_from = False, number + _COMPANY
        budget = self.limits.max_batched_tokens - active
        forecast = self._forecast()
        self.states.keep()
        self._join(number, out, budget, forecast)
        self._prefill(number, out, budget, forecast)
        self._join(number, out, budget, forecast)
        if out.tokens < budget:
            self._starving = [
                g for g in self.ready if g.ready_from <= number and not g.live.background
            ]
            self.starved = bool(self._starving or self.waiting)
        return out

    def count_starved(self, most: int) -> int:
        """Counts the samples that got no rows or blocks. Stops at `most`, because the queue may be
        long."""
        count = 0
        for group in chain(self._starving, self.waiting):
            count += group.pending
            if count >= most:
                return most
        return count

    def requeue(self, group: ForkGroup) -> Int32:
        """Sends a group without rows back to the waiting queue; returns its blocks, to
        be released."""
        self.remove(group)
        blocks, group.blocks = group.blocks, group.blocks[:0]
        group.state, group.stored, group.ready_from = WAITING, 0, 0
        self.push(group)
        return blocks

    def expected_tokens_left(self) -> float:
        """Returns the output tokens that rows and waiting samples are still expected to draw."""
        waiting = sum(g.pending * self._expected(g) for line in self._lines for g in line)
        _, remaining = self._running()
        return waiting + float(remaining.sum())

    def prompt_tokens_left(self) -> int:
        """Returns the prompt tokens of waiting groups that no step has planned; includes tokens
        that may yet be found in the cache."""
        return sum(g.target - g.stored for line in self._lines for g in line)

    def _capacity(self, group: ForkGroup) -> int:
        """Returns the number of KV pages that may be in use when the forecast admits this group's
        samples."""
        return (
            self.limits.num_blocks - 1 - self.limits.num_blocks // _SPARE - self._kept_blocks(group)
        )

    def _kept_blocks(self, group: ForkGroup) -> int:
        return self.limits.num_blocks // _KEPT if group.live.background else 0

    def _free_rows(self, group: ForkGroup) -> int:
        """Returns the number of rows that this group's samples may get now."""
        return max(
            0, self.rows.free_count - (self.rows.count // _KEPT if group.live.background else 0)
        )

    def _forecast(self) -> Forecast:
        own, remaining = self._running()
        if not isinstance(self.pool, WindowedPool):
            return Forecast.of(own, remaining, self.pool.held - int(own.sum()))
        pages, ramp = self.pool.pages_of(np.flatnonzero(self.rows.state == RUNNING), self.rows)
        return Forecast.of(
            pages, remaining, self.pool.held - int(pages.sum()), ramp, self.pool.per_block - 1
        )

    def _running(self) -> tuple[Int32, Int32]:
        """Returns two arrays by running row: the number of blocks it owns alone, and the tokens it
        is still expected to draw."""
        rows = self.rows
        live = rows.state == RUNNING
        # compute for all rows of the table: selecting the running rows first costs more
        left = rows.limit - rows.planned_length
        remaining = self.lengths.remaining(rows.planned_length + 1 - rows.prompt, left)
        ignores = rows.traits & IGNORES_EOS
        if ignores.any():
            remaining = np.where(ignores, left, remaining)
        return (rows.blocks - rows.shared)[live], remaining[live]

    def _expected(self, group: ForkGroup) -> int:
        """Returns the tokens that a sample of this group is still expected to draw."""
        made = group.tokens.size - group.live.prompt_length
        scale = self.lengths.scale(group.finished, group.finished_tokens)
        left = group.live.limit - group.tokens.size
        if group.live.traits & IGNORES_EOS or left == 1:
            # the sample runs to its limit, as it ignores end-of-sequence or has one token left
            return left
        return self.lengths.remaining_of_one(made, left, scale)

    def _join(self, number: int, out: Admitted, budget: int, forecast: Forecast) -> None:
        while self.ready and self.rows.free_count and self.ready[0].ready_from <= number:
            group = self.ready[0]
            own = int(group.has_partial and group.samples.size > 1)
            need = own + group.grows
            expected = self._expected(group)
            rows = min(self._free_rows(group), self.mask_slots.room(group.live))
            most = min(group.pending, rows, budget - out.tokens)
            if need:
                most = min(most, (self.pool.available - out.growing) // need)
            pages, ramp = (own + 1) * self.pool.per_block, self._ramp(group)
            capacity, steps = self._capacity(group), self._steps_ahead(group, most, expected)
            count = min(most, forecast.room(capacity, pages, steps, ramp))
            if count <= 0 and most > 0 and self.rows.free_count == self.rows.count:
                count = 1  # nothing runs: one row may always join, whatever the forecast says
            if count <= 0:
                return
            forecast.add(count, pages, expected, ramp=ramp)
            self._take(group, count, out)
            if group.pending:
                return
            self.ready.pop(0)

    def _take(self, group: ForkGroup, count: int, out: Admitted) -> None:
        rows = self.rows.take(count)
        samples = group.samples[group.next : group.next + count]
        group.next += count
        group.rows += count
        group.running += count
        full = group.full
        self.rows.table[rows, :full] = group.blocks[:full]
        if group.has_partial and group.samples.size > 1:
            own = self.pool.take(count)
            self.rows.table[rows, full] = own
            source = np.full(count, group.blocks[full], np.int32)
            out.copies += self.pool.copies(source, own)
        elif group.has_partial:  # the only sample takes over its prompt's last, partial block
            self.rows.table[rows, full] = group.blocks[full]
            group.blocks = group.blocks[:full]
        self.states.fork(group, rows)
        self._write_columns(group, rows, samples)
        out.pieces.append(Piece(group, rows, samples))
        out.tokens += count
        out.growing += count * group.grows

    def _write_columns(self, group: ForkGroup, rows: Int32, samples: Int32) -> None:
        columns, live = self.rows, group.live
        # intp: numpy writes with its own index type in a fifth of the time
        at = rows.astype(np.intp)
        columns.state[at] = RUNNING
        columns.group[at] = group.slot
        columns.sample[at] = samples
        columns.planned_length[at] = group.target
        columns.read_length[at] = group.target
        columns.prompt[at] = live.prompt_length
        columns.limit[at] = live.limit
        columns.sent[at] = group.sent
        columns.guesses[0, at], columns.guesses[1, at] = group.guesses
        columns.shared[at] = group.full
        columns.blocks[at] = group.full + int(group.has_partial)
        columns.passed[at] = group.passed
        columns.bound[at] = min(self.pool.past(group.target), group.full)
        columns.order[at] = (
            self.order + np.arange(rows.size) + (BACKGROUND if live.background else 0)
        )
        columns.traits[at] = live.traits
        columns.watch[at] = live.watch
        columns.wants[at] = live.record["wants"][0]
        columns.top[at] = live.record["logprobs"][0]
        columns.single[at] = live.row_of.size == 1
        columns.request[at] = live.request_id
        if live.traits & STOP_IDS:
            columns.stop_ids[at] = live.record["stop_ids"][0]
        live.row_of[samples] = rows
        self.mask_slots.join(live, rows, samples)
        self.order += rows.size

    def _prefill(self, number: int, out: Admitted, budget: int, forecast: Forecast) -> None:
        behind = budget if number >= self._alone_from else self.limits.max_batched_tokens // _KEPT
        while out.tokens < budget:
            group = self._next(number, forecast, out.growing)
            if group is None or (group.live.background and behind <= 0):
                return
            count = min(self.states.border(group) - group.stored, budget - out.tokens)
            if group.live.background:
                count = min(count, behind)
                behind -= count
            if count:
                stop = group.stored + count
                out.chunks.append(
                    Chunk(group, group.stored, stop, group.blocks[: -(-stop // BLOCK_SIZE)])
                )
                out.tokens += count
                self._advance(group, count, number)
            if group.stored == group.target:
                self.prefilling.remove(group)
                group.state = READY
                copied = group.has_partial and group.samples.size > 1 and count > 0
                group.ready_from = number + 1 if copied or self.states else number
                self._line_up(group)

    def _next(self, number: int, forecast: Forecast, growing: int) -> ForkGroup | None:
        """Returns the group to prefill next; a background group lets others begin before it."""
        begun = next((group for group in self.prefilling if group.ready_from <= number), None)
        if begun is not None and not (begun.live.background and self.waiting):
            return begun
        line = self.waiting or self.behind
        if not line or not self._may_start(line.head, forecast, growing):
            return begun
        group = line.head
        line.pop(group.target + group.pending * self._expected(group))
        self._start(group, forecast)
        place = len(self.prefilling) if begun is None else self.prefilling.index(begun)
        self.prefilling.insert(place, group)
        return group

    def _line_up(self, group: ForkGroup) -> None:
        """Moves a group whose whole prompt is planned into the ready queue, behind earlier groups
        and before background ones."""
        place = len(self.ready)
        while not group.live.background and place and self.ready[place - 1].live.background:
            place -= 1
        self.ready.insert(place, group)

    def _may_start(self, group: ForkGroup, forecast: Forecast, growing: int) -> bool:
        """Returns True if the first group of a queue may take its blocks now: its samples will soon
        get rows, and fit by the forecast."""
        need = -(-group.target // BLOCK_SIZE)
        free = self._free_rows(group)
        ahead = sum(g.pending for g in self.ready if group.live.background or not g.live.background)
        if self.states.full:
            return False
        if self.rows.free_count == self.rows.count and not ahead:
            return need + 2 <= self.pool.available - growing
        if (
            need + 2
            > self.pool.available - growing - self._kept_blocks(group) // self.pool.per_block
        ):
            return False
        if ahead > free + self.rows.count // _AHEAD or (ahead and not free):
            return False
        per_block = self.pool.per_block
        capacity = self._capacity(group) - need * per_block
        steps = self._steps_ahead(group, ahead + len(self.prefilling) + 1, self._expected(group))
        return forecast.room(capacity, 2 * per_block, steps, self._ramp(group)) > 0

    def _steps_ahead(self, group: ForkGroup, more: int, expected: int) -> int:
        """Returns the coming steps in which `more` new samples of this group must fit: those that
        they are `expected` to take, unless steps mostly read weights. Then even a row that will be
        preempted saves time: a token of R rows saves a step's weights / R, and costs a prompt's
        token to compute again; `ridge_rows` of those take as long as the weights."""
        rows, ridge = self.rows.count - self.rows.free_count + more, self.limits.ridge_rows
        if rows >= ridge:
            return expected
        return min(expected, max(BLOCK_SIZE, _REPAID * group.target * rows // (ridge - rows)))

    def _start(self, group: ForkGroup, forecast: Forecast) -> None:
        """Finds cached blocks of the prompt, takes blocks for the rest, and writes its tokens to
        the host's slots."""
        group.state = PREFILLING
        padded = np.zeros(-(-group.target // BLOCK_SIZE) * BLOCK_SIZE, np.int32)
        padded[: group.target] = group.tokens[: group.target]
        tokens = padded.reshape(-1, BLOCK_SIZE)
        if self.tree.enabled and not group.words:
            group.words = words_of(tokens[: group.full])
        may_share, root = self._may_share(group), self.tree.root(group.live.salt, group.live.tag)
        known, group.place = self.tree.match(may_share, root)
        self.pool.share_beginning(known)
        fresh = self.pool.take(len(tokens) - known.size)
        self.tree.slot_token[fresh] = tokens[known.size :]
        group.blocks = np.concatenate((known, fresh))
        group.stored = known.size * BLOCK_SIZE
        self.states.begin(group, self.tree.depth(may_share, root) if self.states else 0)
        self.queried_tokens += group.target
        self.cached_tokens += group.stored
        if not group.resumed:
            group.live.cached_tokens = group.stored
        group.passed = 0
        per_block, ramp = self.pool.per_block, self._ramp(group)
        forecast.add(1, 2 * per_block, self._expected(group), fresh.size * per_block, ramp)

    def _ramp(self, group: ForkGroup) -> int:
        """Returns the number of blocks after which a sample's sliding windows are full; later each
        new block frees an old one's window pages."""
        held = group.tokens.size // BLOCK_SIZE if group.samples.size == 1 else 1
        return max(0, self.pool.near + 2 - held) if self.pool.near else 0

    def _may_share(self, group: ForkGroup) -> list[bytes]:
        """Returns the prefix tree's keys (tokens as bytes) of the group's blocks that may be
        shared.

        Cached prompt tokens have no logits, so a prompt with prompt_logprobs shares none. Tokens
        whose scores are still to be sent lie in unshared blocks: a shared slot would also hold
        other rows' scores."""
        if group.live.prompt_logprobs >= 0 and not group.resumed:
            return []
        return group.words if group.scored is None else group.words[: group.sent // BLOCK_SIZE]

    def _advance(self, group: ForkGroup, count: int, number: int) -> None:
        """Plans the prefill of `count` more prompt tokens. Later prompts can share the filled
        blocks from now on, since steps run in order."""
        first = group.stored // BLOCK_SIZE
        if isinstance(self.pool, WindowedPool):  # window pages that this same step reads must stay
            group.passed = self.pool.pass_prompt(group.blocks, group.passed, group.stored)
        group.stored += count
        group.last_flight = number
        self.prefilled_tokens += count
        last = group.stored // BLOCK_SIZE
        if group.words and last > first:
            group.place = self.tree.insert(
                group.words[first:last], group.blocks[first:last].tolist(), group.place
            )
        self.states.advanced(group, number)

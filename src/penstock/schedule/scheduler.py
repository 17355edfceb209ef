"""Scheduler: decides what runs next. submit and cancel take requests; plan() makes a step; commit()
takes in its results.

    submit -> [queue] -> plan: grow rows, admit samples, prefill chunks, order by prefix group
    -> StepPlan
    StepTokens -> commit: tokens to samples, ends, blocks freed, preempted rows back to the queue
    -> Deltas

Steps are planned before earlier ones are read. The rule that keeps this correct: a row number and
its blocks are reused only once every step in flight that names them has been read
(deferred_free.py). Knows no torch, no text and no channel.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.errors import UsageError
from penstock.request import REST, Request
from penstock.schedule.admission import Admission, Admitted
from penstock.schedule.batch_order import BatchOrder
from penstock.schedule.check_request import check_new
from penstock.schedule.constraint import ConstraintFactory
from penstock.schedule.deferred_free import DeferredFree
from penstock.schedule.deltas import Deltas
from penstock.schedule.drafting import Drafting
from penstock.schedule.finish import Finisher
from penstock.schedule.forecast import LengthModel
from penstock.schedule.mask_makers import MaskMakers
from penstock.schedule.mask_slots import MaskSlots
from penstock.schedule.output_processor import OutputProcessor
from penstock.schedule.plan_arrays import chunks_of, joins_of
from penstock.schedule.preemption import Preempter
from penstock.schedule.prefix_tree import PrefixTree
from penstock.schedule.prompt_outputs import PromptOutputs
from penstock.schedule.request_state import Groups, RequestState
from penstock.schedule.rows import DRAINED, PREEMPTED, RUNNING, Rows
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.state_slots import StateSlots
from penstock.schedule.step import (
    Bool,
    Int32,
    Joins,
    LateMasks,
    Moves,
    StepPlan,
    StepTokens,
)
from penstock.schedule.stop_token_masks import StopTokenMasks
from penstock.schedule.windowed_pool import WindowedPool, pool_of


class Scheduler:
    """Plans the steps of one engine, and takes in their results."""

    def __init__(
        self,
        limits: SchedulerConfig,
        outputs: type[OutputProcessor] = OutputProcessor,
        makers: MaskMakers | None = None,
    ) -> None:
        self.limits = limits
        width = -(-limits.max_model_len // BLOCK_SIZE)
        if limits.num_blocks - 1 < width + 2:
            raise UsageError(
                f"the KV cache holds {(limits.num_blocks - 1) * BLOCK_SIZE} tokens, too few for one"
                f" sequence of max_model_len {limits.max_model_len}: lower max_model_len or raise"
                " kv_cache_tokens"
            )
        self.rows = Rows(limits.max_rows, width)
        self.pool = pool_of(limits)
        # np.full allocates memory pages now, not in the middle of a step
        self.slot_token = np.full((limits.num_blocks, BLOCK_SIZE), 0, np.int32)
        self.slots = StateSlots(limits.snapshots)
        self.tree = PrefixTree(
            self.pool,
            self.slot_token,
            limits.prefix_caching,
            self.slots if limits.snapshots else None,
        )
        self.groups = Groups()
        self.lengths = LengthModel(limits.max_model_len)
        self.mask_slots = MaskSlots(limits.mask_slots, self.rows, limits.vocab_size, makers)
        queries = limits.max_queries or limits.max_rows
        self.drafting = Drafting(self.rows, self.mask_slots, queries, bool(self.slots))
        self.admission = Admission(
            limits, self.rows, self.pool, self.tree, self.lengths, self.mask_slots, self.slots
        )
        self.watch = StopTokenMasks(limits.vocab_size)
        self.outputs = outputs(limits, self.rows, self.groups, self.slot_token, self.watch)
        sharing = limits.sharing if limits.prefix_groups else None
        self.batch_order = BatchOrder(self.rows, self.groups, self.pool, sharing)
        self.live: dict[int, RequestState] = {}
        self.deferred = DeferredFree(self.rows, self.groups, self.batch_order)
        self.finisher = Finisher(
            self.rows,
            self.pool,
            self.tree,
            self.groups,
            self.admission,
            self.lengths,
            self.deferred,
        )
        self.preempter = Preempter(
            self.rows,
            self.pool,
            self.groups,
            self.admission,
            self.batch_order,
            self.outputs,
            self.deferred,
        )
        self.news = PromptOutputs()
        self._seeds = np.random.default_rng(limits.seed)
        self._planned = 0  # number of steps launched
        self._read = -1  # number of the last step read; -1: none
        self._idle_plans = 0
        self._told: deque[Deltas] = deque()
        self._clears = False  # True once logits were not finite: blocks are cleared when given out
        tokens = ("prompt_tokens", "generation_tokens", "wasted_tokens", "drafted_tokens")
        self.counts: dict[str, int] = dict.fromkeys(("requests", *tokens, "late_masks", "steps"), 0)

    # --- requests that come in --------------------------------------------------------------------

    def submit(self, request: Request, constrain: ConstraintFactory | None = None) -> None:
        """Takes a request; raises UsageError or ContextLengthError if it can never run. constrain:
        makes its samples' constraints."""
        tokens = np.frombuffer(request.prompt, np.int32)
        check_new(request, tokens, self.limits, self.live)
        watch = self.watch.hold(request.watch) if request.watch is not None else -1
        # draw a seed for every request, so that giving one request a seed changes no other's
        drawn = int(self._seeds.integers(0, 2**63 - 1))
        seed = drawn if request.sampling.seed is None else request.sampling.seed
        live = RequestState.of(
            request, self.counts["requests"], seed, self.limits.max_model_len, watch, constrain
        )
        samples = (
            np.arange(request.sampling.n) if request.samples is None else np.array(request.samples)
        )
        self.live[request.request_id] = live
        self.outputs.scores.ask(int(live.record["logprobs"][0]))
        self.admission.push(self.groups.add(live, tokens, samples.astype(np.int32), tokens.size))
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += tokens.size

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        """Ends a request in any state, or one sample of it with the next plan; unknown ids are
        ignored. sample REST: ends all that have not ended; take_told() returns their tokens."""
        if (live := self.live.get(request_id)) is None:
            return
        if sample is not None and sample != REST:
            self.finisher.cancel_soon(live, sample)
            return
        self._cancel_samples()
        if sample == REST:
            self._told += self.outputs.made_by(live)
        self.finisher.cancel(live)
        self._forget([live])

    def _cancel_samples(self) -> None:
        """Ends the samples that were cancelled since the last call."""
        lives, by_row = self.finisher.cancel_samples()
        self.drafting.ended(by_row)
        self._forget(lives)

    def take_told(self) -> Deltas | None:
        """Returns the next final deltas of samples cancelled with REST; None: no more."""
        return self._told.popleft() if self._told else None

    @property
    def has_work(self) -> bool:
        """Returns True while a sample lives, or a row or block waits for a step to be read."""
        return bool(self.live) or self.finisher.waits or bool(self._told)

    @property
    def in_flight(self) -> int:
        return self._planned - 1 - self._read

    # --- planning a step --------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Returns the next step; None: nothing can be launched until a step is read, or at all."""
        self._cancel_samples()
        number, every = self._planned, self.limits.preempt_every
        if every and number % every == every - 1:
            self.preempter.preempt(1)
        if self.admission.starved and self.admission.knows_background:
            self.preempter.preempt_background()
        self.drafting.read_texts(self.outputs)
        short = self._short_of_blocks()
        if isinstance(self.pool, WindowedPool):
            # before rows join: their prompts, if prefilled in this step, would use marked pages
            self.pool.pass_rows(short, self.rows)
        rows, growth, stalled = self._grow(self._running(), short)
        admitted = Admitted() if stalled else self.admission.admit(number, rows.size)
        self.drafting.join(admitted.pieces)
        joins = joins_of(admitted.pieces, self.rows)
        if joins is not None:
            for piece in admitted.pieces:
                self.batch_order.joined(piece.group)
            joined = joins.rows
            rows = np.concatenate((rows, joined))
            _, more, _ = self._grow(joined, joined[self._need_block(joined)])
            growth = np.concatenate((growth, more))
            # The last token of a preempted sample may not have been sent yet: store it in its
            # slot, from which tokens are sent.
            self.slot_token.reshape(-1)[self.rows.slots(joined, joins.records["length"])] = (
                joins.records["last_token"]
            )
            for piece in admitted.pieces:
                self.outputs.bring_scores(piece.rows, piece.group)
        if not rows.size and not admitted.chunks and not self.slots.waits:
            if not self.in_flight:
                self.preempter.unblock()
                self._free_read()
            return None
        return self._launch(number, rows, growth, joins, admitted)

    def await_masks(self, seconds: float) -> int:
        """Waits up to `seconds` for token masks that are being made; returns the number still
        missing."""
        return self.mask_slots.makers.wait(seconds)

    def held_rows(self, plan: StepPlan) -> int:
        """Returns the number of a step's rows that have a constraint."""
        return int(self.mask_slots.guided(plan.rows).size)

    def draw(self, plan: StepPlan) -> LateMasks:
        """Returns the masks for the draw of a late step; call before the next plan(). Rows without
        a mask draw no token."""
        rows = self.mask_slots.guided(plan.rows)
        late = self.mask_slots.late(plan)
        drawn = np.zeros(self.rows.count, np.bool_)
        drawn[rows] = True
        drawn[late.sit_out] = False
        self._advance(drawn)
        self.counts["late_masks"] += int(
            np.count_nonzero(self.rows.state.take(late.sit_out) == RUNNING)
        )
        return late

    def plan_is_stuck(self) -> bool:
        """Returns True if plan() keeps giving nothing with nothing in flight."""
        # not stuck while rows or blocks are still being freed
        self._idle_plans = 0 if self.finisher.waits else self._idle_plans + 1
        return self._idle_plans > 3

    def commit(self, plan: StepPlan, result: StepTokens) -> Deltas:
        """Takes in the results of a step, in launch order; returns its deltas."""
        assert plan.number == self._read + 1, "flights are read in the order of their launch"
        self._read = plan.number
        prompts = self.news.read(plan, result)
        read = self.outputs.read(plan, result)
        self.counts["generation_tokens"] += read.taken
        self.counts["wasted_tokens"] += read.wasted
        self._clears |= bool(read.bad.size)
        self.finisher.invalidate(read.bad)
        self.mask_slots.accept(read.rows, read.tokens, read.goes_on)
        exact = self.drafting.read(plan, read, self.groups)
        self._forget(self.finisher.ended(read.ended))
        if exact:
            self._drain(self.rows.state == RUNNING)
        self._free_read()
        read.deltas.prompts = prompts
        return read.deltas

    def skipped(self, steps: int, rows: int) -> None:
        """Adds steps of `rows` rows that a leap (leap.py) planned and read to the counters."""
        self._planned += steps
        self._read += steps
        self.counts["steps"] += steps
        self.counts["generation_tokens"] += steps * rows

    def _launch(
        self, number: int, rows: Int32, growth: Int32, joins: Joins | None, admitted: Admitted
    ) -> StepPlan:
        order = self.batch_order.order(rows, number)
        rows, columns = order.rows, self.rows
        lengths = columns.planned_length.take(rows)
        # Write by a boolean mask over all rows: writing by row numbers costs ten times as much.
        columns.last_flight[order.active] = number
        drafts = self.drafting.offer(rows, lengths)
        self.counts["drafted_tokens"] += 0 if drafts is None else int(drafts.start[-1])
        draws_late = self.mask_slots.guided(rows).size > 0
        self._advance(order.active & ~columns.constrained if draws_late else order.active)
        self._planned += 1
        self._idle_plans = 0
        self.counts["steps"] += 1
        for group in [c.group for c in admitted.chunks] + [p.group for p in admitted.pieces]:
            group.live.begin()
        self.news.launched(number, admitted)
        return StepPlan(
            number=number,
            rows=rows,
            lengths=lengths,
            wants=order.wants,
            group_start=order.start,
            group_blocks=order.blocks,
            group_length=order.length,
            moves=Moves(
                np.concatenate(admitted.copies) if admitted.copies else np.zeros((0, 2), np.int32),
                self.slots.launched(),
            ),
            new_blocks=growth,
            joins=joins,
            chunks=chunks_of(admitted.chunks),
            drafts=drafts,
            texts=self.drafting.fresh_texts(),
            proposes=self.drafting.proposes,
            follows=self.drafting.follows,
            masks=self.mask_slots.masks(),
            draws_late=draws_late,
            clears=self._clears,
            window_pages=self.pool.take_fresh() if isinstance(self.pool, WindowedPool) else None,
        )

    def _advance(self, drawn: Bool) -> None:
        """Adds one token to the planned length of the rows in `drawn`, a boolean for every row."""
        self.rows.planned_length += drawn
        self._drain(drawn)

    def _drain(self, among: Bool) -> None:
        """Marks those of the rows in `among` as drained that have launched their last step."""
        columns = self.rows
        drained = (among & (columns.planned_length + 1 >= columns.limit)).nonzero()[0]
        if self.drafting.in_flight:
            # not rows with drafts in flight, which may turn out shorter than planned
            drained = drained[columns.drafted[drained] == 0]
        if drained.size:
            columns.state[drained] = DRAINED
            self.batch_order.changed = True

    def _running(self) -> Int32:
        """Returns the rows of this step. Left out are rows of which a step in flight must be read
        first: their mask needs a token of it, or its drafts may end them."""
        rows = self.mask_slots.launchable(self.batch_order.running(), self._read)
        return self.drafting.without_full(rows)

    def _need_block(self, of: Int32 | slice = slice(None)) -> Bool:
        """Returns True for rows whose next token needs a new block. of: the rows; for many rows
        leave it out, since selecting rows costs ten times as much as computing for all.

        A row's block table must reach one position beyond the token whose keys and values a step
        stores: the host stores the drawn token there."""
        short: Bool = self.rows.planned_length[of] + 1 >= self.rows.blocks[of] * BLOCK_SIZE
        return short

    def _short_of_blocks(self) -> Int32:
        """Returns the running rows whose next token needs a new block."""
        runs = self.rows.state == RUNNING
        needs = self.drafting.with_room(self._need_block() & runs, runs, self.pool.available)
        short = needs.nonzero()[0].astype(np.int32)
        short = self.mask_slots.launchable(short, self._read)
        return self.drafting.without_full(short)

    def _grow(self, rows: Int32, needy: Int32) -> tuple[Int32, Int32, bool]:
        """Gives each of the rows `needy` one block. Rows that get none are left out of the step.
        Returns (remaining rows, new blocks [m, 3] as in StepPlan, True if a row was left out)."""
        columns = self.rows
        if not needy.size:
            return rows, np.zeros((0, 3), np.int32), False
        stalled = needy.size > self.pool.available
        if stalled:
            self.preempter.reclaim(needy.size - self.pool.available)
            self._free_read()
            rows = rows[columns.state[rows] == RUNNING]
            needy = needy[columns.state[needy] == RUNNING]
            oldest = needy[np.argsort(columns.order[needy], kind="stable")]
            waits = oldest[self.pool.available :]
            needy = oldest[: self.pool.available]
            rows = rows[~np.isin(rows, waits)]
        at = needy.astype(np.intp)
        place = columns.blocks[at]
        blocks = self.pool.take(needy.size)
        columns.table[at, place] = blocks
        columns.blocks[at] = place + 1
        return rows, np.stack((needy, place, blocks), axis=1), stalled

    def _free_read(self) -> None:
        """Frees rows and blocks that no step in flight names; preempted rows queue again."""
        if not self.finisher.waits:
            return
        rows, blocks = self.deferred.take(self._read)
        self.mask_slots.leave(rows)
        self.preempter.resume(rows[self.rows.state[rows] == PREEMPTED])
        self.finisher.free(rows, blocks)

    def _forget(self, lives: list[RequestState]) -> None:
        for live in lives:
            if live.outstanding or self.live.pop(live.request_id, None) is None:
                continue
            self.mask_slots.forget(live)
            self.drafting.forget(live)
            if live.watch >= 0:
                self.watch.release(live.watch)

    # --- cache, gauges and checks, for the engine -------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache for later prompts; running rows keep their blocks."""
        self.tree.reset()

    def give_back_blocks(self) -> None:
        """Takes all blocks from all rows and groups, and empties the prefix cache; no step may be
        in flight. The samples wait in the queue with their tokens so far."""
        assert not self.in_flight, "blocks are given back between steps"
        self._cancel_samples()
        self.preempter.preempt_all()
        self._free_read()
        self.preempter.unplace()
        # repeat: blocks enter the prefix tree a limited number at a time
        while self.finisher.waits:
            self._free_read()
        self.tree.reset()
        self.drafting.forget_texts()
        assert not self.pool.held, "somebody holds blocks still"

    def stats(self) -> dict[str, float]:
        """Returns the gauges, and the counters since the start."""
        return {
            **self.counts,
            "running": self.rows.count - self.rows.free_count,
            "waiting": self.admission.pending,
            "kv_usage": self.pool.held / (self.pool.num_blocks - 1),
            "prefilled_tokens": self.admission.prefilled_tokens,
            "prefix_query_tokens": self.admission.queried_tokens,
            "prefix_hit_tokens": self.admission.cached_tokens,
            "preemptions": self.preempter.preemptions,
            "state_hits": self.slots.hits,
            "state_misses": self.slots.misses,
            "state_evictions": self.slots.evictions,
            "mean_output_tokens": self.lengths.mean,
            **self.drafting.stats(),
        }

    def expected_tokens_left(self) -> float:
        """Returns the output tokens that all known samples are still expected to draw."""
        return self.admission.expected_tokens_left()

    def check(self) -> None:
        """Checks the invariants of all parts; for tests, after each step."""
        self.rows.check()
        self.pool.check()
        self.tree.check()
        self.finisher.check()
        self.mask_slots.check()
        self.slots.check([group.state_slot for group in self.groups if group.state_slot >= 0])

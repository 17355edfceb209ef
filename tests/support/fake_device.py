"""A device for the scheduler's tests: no model, but real rows, tables and blocks.

A slot holds a hash of all tokens up to it, made from the slot before it, as KV of a position
depends on all positions before. A row's next token is a hash of all slots that its block table
shows. So a wrong block, a missed copy, a row used again too early, KV made behind another
beginning, or a token sent to the wrong sample changes what comes out. With `snapshots` it has
recurrent state too: a slot is folded with each row's newest token, and never goes back; drafts go
on from a copy, and right ones are folded again in the next step. What a token's state holds is held
against the blocks before each draw. It knows plans; no scheduler."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from penstock.request import SamplingParams
from penstock.row_table import (
    MAX_DRAFTS,
    MAX_STOP_IDS,
    WANTS_LOGPROBS,
    WANTS_MASK,
    WANTS_MIN_TOKENS,
)
from penstock.schedule.constraint import Constraint
from penstock.schedule.deltas import ERROR, LENGTH, NO_STOP_ID, STOP
from penstock.schedule.step import (
    BAD_LOGITS,
    FROM_DEVICE,
    NO_TOKEN,
    SCRATCH_BLOCK,
    Int32,
    LateMasks,
    StepPlan,
    StepTokens,
    TokenLogprobs,
)

Slots = list[int]
_START = 0x5EED
RING = 1 + 2 * MAX_DRAFTS  # tokens that a slot of recurrent state remembers


def stored(before: int, token: int) -> int:
    """What a slot holds: `before` is the slot before it."""
    return hash((before, int(token))) & 0x7FFF_FFFF_FFFF_FFFF


def slots_of(tokens: list[int]) -> Slots:
    slots = [_START]
    for token in tokens:
        slots.append(stored(slots[-1], token))
    return slots[1:]


def next_token(
    slots: Slots, seed: int, sample: int, vocab: int, barred: frozenset[int], bad_in: int
) -> int:
    """The token that follows. bad_in: one draw in so many has bad logits, 0: none."""
    draw = hash((*slots, seed, sample))
    if bad_in and draw % bad_in == 0:
        return BAD_LOGITS
    while draw % vocab in barred:
        draw = hash((draw,))
    return draw % vocab


def left_out(words: Int32 | None, vocab: int) -> frozenset[int]:
    """Tokens that a mask's words bar; None: none."""
    return frozenset(
        t for t in range(vocab) if words is not None and not words[t // 32] >> (t % 32) & 1
    )


def logprob_of(position: int, token: int) -> float:
    """A number that tells of its token and its position."""
    return -(position + token / 1024)


@dataclass
class Alone:
    """What a sample is when nothing else runs."""

    tokens: list[int]
    finish: int
    stop_id: int


def sample_alone(
    prompt: list[int],
    params: SamplingParams,
    sample: int,
    vocab: int,
    longest: int,
    eos: set[int],
    bad_in: int = 0,
    constraint: Constraint | None = None,
) -> Alone:
    """One sample by itself, token by token, without rows or blocks. `params` brings its seed."""
    limit = min(len(prompt) + (params.max_tokens or longest), longest)
    first_end = len(prompt) + params.min_tokens
    ends = set() if params.ignore_eos else eos
    stop_ids = params.stop_token_ids or []
    barred = frozenset(ends | set(stop_ids[:MAX_STOP_IDS]))
    outside = frozenset(range(vocab)) - set(params.allowed_token_ids or range(vocab))
    tokens, slots = list(prompt), slots_of(prompt)
    while True:
        at = len(tokens)
        bars = outside | (barred if at < first_end else frozenset())
        bars |= left_out(constraint.mask() if constraint is not None else None, vocab)
        token = next_token(slots, params.seed or 0, sample, vocab, bars, bad_in)
        tokens.append(max(token, 0))
        slots.append(stored(slots[-1], tokens[-1]))
        output = tokens[len(prompt) :]
        if token == BAD_LOGITS:
            return Alone(output, ERROR, NO_STOP_ID)
        if token in ends:
            return Alone(output, STOP, NO_STOP_ID)
        if token in stop_ids[:MAX_STOP_IDS] or (token in stop_ids and at >= first_end):
            return Alone(output, STOP, token)
        if len(tokens) >= limit:
            return Alone(output, LENGTH, NO_STOP_ID)
        if constraint is not None:
            constraint.accept(token)


class FakeDevice:
    """Runs plans in order; results are handed out when asked for, so any lag is the caller's
    choice."""

    def __init__(
        self,
        num_blocks: int,
        rows: int,
        width: int,
        vocab: int,
        eos: set[int],
        bad_in: int = 0,
        window: int = 0,
        window_tables: int = 0,
        snapshots: range = range(0),
    ) -> None:
        self.slots = np.full((num_blocks, 16), -7, np.int64)
        self.window, self.snapshots = window, snapshots
        # as a slot of a block: of all tokens that were folded in
        self.states = np.full(snapshots.stop, -7, np.int64)
        self.folded = np.full(snapshots.stop, -7, np.int64)  # how many those were
        self.rings = np.full((snapshots.stop, RING), -7, np.int64)  # the last tokens, by position
        self.after: dict[int, list[int]] = {}  # row -> states after its last step's queries
        self.folded_again = 0  # right drafts
        self._empty_state()
        self.states_moved = 0
        # of a block, for layers with windows
        self.pages = np.zeros((num_blocks, window_tables), np.int64)
        self.table = np.zeros((rows, width), np.int64)
        self.length = np.zeros(rows, np.int64)
        self.last = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.first_end = np.zeros(rows, np.int64)
        self.seed = np.zeros(rows, np.int64)
        self.sample = np.zeros(rows, np.int64)
        self.ignore = np.zeros(rows, bool)
        self.logprobs = np.full(rows, -1, np.int64)
        self.wants = np.zeros(rows, np.int64)
        self.stops: dict[int, set[int]] = {}
        self.mask_slot = np.full(rows, -1, np.int64)
        self.masks: dict[int, frozenset[int]] = {}  # slot -> what it bars
        self.done = np.ones(rows, bool)
        self.vocab, self.eos, self.bad_in = vocab, eos, bad_in
        self.results: deque[tuple[StepPlan, StepTokens]] = deque()
        self.prefilled = 0
        self.launched = 0
        self.drafting = np.zeros(rows, bool)  # whether the row was ever offered a draft
        self.positions: list[int] = []  # of the tokens that the last step's queries draw
        self.open: StepPlan | None = None  # its forward has run, its draw has not
        self.forced: dict[int, int] = {}  # query -> its token, in a draw
        self.said = 0  # forced tokens
        self.sat_out: dict[int, Int32] = {}  # by step: rows that its draw left out
        self.right = 0  # drafts that were what was drawn
        self.proposes = False  # whether it makes drafts behind each draw
        self.drafts = np.zeros((rows, MAX_DRAFTS), np.int64)  # that it made
        self.right_by_device = 0  # of these, that were what was drawn
        self.both_kinds = 0  # steps with drafts of the host's and of its own
        self.grouped = 0  # rows that were attended in a prefix group

    def forget(self) -> None:
        """Loses all that rows and blocks hold, as in a sleep."""
        assert not self.results and self.open is None, "a step is out"
        self.slots[:] = self.states[:] = self.folded[:] = self.rings[:] = -7
        self._empty_state()
        for column in (self.pages, self.table, self.length, self.last):
            column[:] = 0
        self.done[:] = True
        self.mask_slot[:] = -1
        self.masks.clear()

    def launch(self, plan: StepPlan) -> None:
        assert plan.number == self.launched, "flights are numbered in the order of their launch"
        self.launched += 1
        self._take_pages(plan)
        self._copy(plan)
        self._join(plan)
        for row, index, block in plan.new_blocks:
            assert block != SCRATCH_BLOCK
            self.table[row, index] = block
        if plan.masks is not None:
            slots = plan.masks.slots.tolist()
            assert len(set(slots)) == len(slots), "a mask slot is written twice"
            self.masks |= {
                s: left_out(w, self.vocab) for s, w in zip(slots, plan.masks.words, strict=True)
            }
        self._store(plan)
        self._check_groups(plan)
        self.open = plan if plan.draws_late else None
        if not plan.draws_late:
            self._draw_all(plan, set())

    def draw(self, late: LateMasks) -> None:
        """Ends the step that was launched last."""
        plan, out = self.open, set(late.sit_out.tolist())
        assert plan is not None and out <= set(plan.rows.tolist())
        slots, self.open = late.slots.tolist(), None
        assert len(set(slots)) == len(slots) and set(slots) <= set(
            self.mask_slot[plan.rows].tolist()
        )
        self.masks |= {
            s: left_out(w, self.vocab) for s, w in zip(slots, late.words[late.places], strict=True)
        }
        self.sat_out[plan.number] = late.sit_out
        self.forced = dict(zip(late.forced.tolist(), late.tokens.tolist(), strict=True))
        self._draw_all(plan, out)
        self.said += len(self.forced)
        self.forced = {}

    def _draw_all(self, plan: StepPlan, out: set[int]) -> None:
        assert len(set(plan.rows.tolist())) == plan.rows.size, "a row stands in a step twice"
        asked = int(np.bitwise_or.reduce(self.wants[plan.rows], initial=0))
        assert plan.wants == asked, "the step's wants are not its rows'"
        self.positions = []
        told = [] if plan.drafts is None else plan.drafts.told.tolist()
        self.both_kinds += FROM_DEVICE in told and max(told) >= 0
        tokens = [
            token
            for i in range(plan.rows.size)
            for token in self._decode(plan, i, int(plan.rows[i]) in out)
        ]
        result = StepTokens(
            np.array(tokens, np.int32), self._score(plan, tokens), self._score_prompts(plan)
        )
        self.results.append((plan, result))

    def _take_pages(self, plan: StepPlan) -> None:
        assert (plan.window_pages is not None) == bool(self.window)
        if plan.window_pages is not None:
            taken = plan.window_pages.reshape(-1)
            assert len(set(taken.tolist())) == taken.size and SCRATCH_BLOCK not in taken, (
                "a page is given twice"
            )
            self.slots[taken] = -7
            self.pages[plan.window_pages[:, 0]] = plan.window_pages[:, 1:]

    def _see_window(self, table: np.ndarray, at: int) -> None:
        """What layers with a window read of the tokens up to `at` is what was stored there."""
        positions = np.arange(max(0, at - self.window + 1), at + 1)
        blocks, offset = table[positions // 16], positions % 16
        for pages in self.pages[blocks].T:
            assert (self.slots[pages, offset] == self.slots[blocks, offset]).all(), (
                "a window's tokens are gone"
            )

    def _copy(self, plan: StepPlan) -> None:
        targets = plan.moves.blocks[:, 1]
        assert len(set(targets.tolist())) == targets.size and SCRATCH_BLOCK not in targets
        for source, target in plan.moves.blocks:
            self.slots[target] = self.slots[source]
        sources, targets = plan.moves.slots.T
        assert len(set(targets.tolist())) == targets.size and not set(sources.tolist()) & set(
            targets.tolist()
        )
        assert self.snapshots.start - 1 not in targets, "the empty slot is written"
        first = self.snapshots.start - 1
        assert (sources >= first).all(), "a row's state, which may lag behind its tokens, is copied"
        for each in (self.states, self.folded, self.rings):
            each[targets] = each[sources]
        self.states_moved += targets.size

    def _empty_state(self) -> None:
        if self.snapshots:
            self.states[self.snapshots.start - 1], self.folded[self.snapshots.start - 1] = _START, 0

    def _fold(self, slot: int, at: int, token: int) -> None:
        """Folds the token at a position into a slot; one that it holds already stays as it is."""
        if self.snapshots and self.folded[slot] != at + 1:
            assert self.folded[slot] == at, (
                f"a state of {self.folded[slot]} tokens is asked to take one at {at}"
            )
            self.states[slot] = stored(int(self.states[slot]), token)
            self.folded[slot] += 1

    def _fold_row(self, row: int, tokens: list[int]) -> None:
        """Folds a row's right drafts of the step before, and its newest token; drafts go on from a
        copy. tokens: the queries'."""
        length, folded = int(self.length[row]), int(self.folded[row])
        for at in range(folded, length):
            self._fold(row, at, int(self.rings[row, at % RING]))
            self.folded_again += 1
        self._fold(row, length, tokens[0])
        self.after[row] = [int(self.states[row])]
        for at, token in enumerate(tokens):
            self.rings[row, (length + at) % RING] = token
            if at:
                self.after[row].append(stored(self.after[row][-1], token))

    def _join(self, plan: StepPlan) -> None:
        joins = plan.joins
        if joins is None:
            return
        for i, row in enumerate(joins.rows):
            self.table[row] = SCRATCH_BLOCK
            self.table[row, : joins.blocks.shape[1]] = joins.blocks[i]
            told = joins.records[i]
            self.length[row], self.last[row] = told["length"], told["last_token"]
            self.limit[row], self.first_end[row] = told["limit"], told["min_length"]
            self.seed[row], self.sample[row] = told["seed"], told["sample"]
            self.ignore[row], self.logprobs[row], self.wants[row] = (
                told["ignore_eos"],
                told["logprobs"],
                told["wants"],
            )
            self.stops[int(row)] = set(told["stop_ids"].tolist()) - {-1}
            self.mask_slot[row] = told["mask_slot"]
            self.done[row] = self.drafting[row] = False

    def _store(self, plan: StepPlan) -> None:
        """All stores of a step come before any draw, as in a layer; chunks first, since joining
        rows build on them."""
        chunks = plan.chunks
        for c in range(0 if chunks is None else chunks.context.size):
            assert chunks is not None
            tokens = chunks.tokens[chunks.start[c] : chunks.start[c + 1]]
            self.prefilled += len(tokens)
            for at, token in enumerate(tokens.tolist(), int(chunks.context[c])):
                assert chunks.blocks[c, at // 16] != SCRATCH_BLOCK
                self._put(chunks.blocks[c], at, token)
                if self.snapshots:
                    assert chunks.slots is not None and self.folded[chunks.slots[c]] == at, (
                        "a chunk's state is off"
                    )
                    self._fold(int(chunks.slots[c]), at, token)
                self._see_window(chunks.blocks[c], at)
        for i, row in enumerate(plan.rows):
            if not self.done[row]:
                queries = [int(self.last[row]), *self._drafts_of(plan, i)]
                for at, token in enumerate(queries, int(self.length[row])):
                    assert self.table[row, at // 16] != SCRATCH_BLOCK, (
                        "a draft beyond the row's blocks"
                    )
                    self._put(self.table[row], at, token)
                if self.snapshots:
                    self._fold_row(int(row), queries)

    def _put(self, table: np.ndarray, at: int, token: int) -> None:
        before = int(self.slots[table[(at - 1) // 16], (at - 1) % 16]) if at else _START
        self.slots[table[at // 16], at % 16] = stored(before, token)
        self.slots[self.pages[table[at // 16]], at % 16] = stored(before, token)

    def _check_groups(self, plan: StepPlan) -> None:
        assert plan.group_start[0] == 0 and plan.group_start.size == plan.group_length.size + 1
        self.grouped += int(plan.group_start[-1])
        for g, length in enumerate(plan.group_length):
            assert length % 16 == 0 and length > 0
            for row in plan.rows[plan.group_start[g] : plan.group_start[g + 1]]:
                n = length // 16
                assert (self.table[row, :n] == plan.group_blocks[g, :n]).all(), (
                    "a member doesn't share the prefix"
                )
                assert self.done[row] or self.length[row] >= length

    def _decode(self, plan: StepPlan, i: int, sits_out: bool) -> list[int]:
        """What each query of the plan's i-th row brings: draws as long as the drafts are what was
        drawn."""
        row, drafts, told = int(plan.rows[i]), self._drafts_of(plan, i), list[int]()
        self.drafting[row] |= bool(drafts)
        exact = self.done[row] or self.length[row] == plan.lengths[i]
        assert exact or (self.drafting[row] and self.length[row] < plan.lengths[i]), (
            "planned isn't its length"
        )
        for query, draft in enumerate([None, *drafts]):
            self.positions.append(int(self.length[row]) + 1)
            right = draft is None or (told[-1] == draft and told[-1] != NO_TOKEN)
            forced = self.forced.get(len(self.positions) - 1)
            told.append(self._draw(row, forced, query) if right and not sits_out else NO_TOKEN)
            self.right += right and draft is not None
            self.right_by_device += (
                right and draft is not None and offered_to(plan, i)[0] == FROM_DEVICE
            )
        if self.proposes and not self.done[row]:
            self._propose(row)
        return told

    def _drafts_of(self, plan: StepPlan, i: int) -> list[int]:
        """What the plan's i-th row feeds behind its last token."""
        mine = self.drafts[plan.rows[i]].tolist()
        return [
            mine[at] if token == FROM_DEVICE else token
            for at, token in enumerate(offered_to(plan, i))
        ]

    def _propose(self, row: int) -> None:
        """Guesses what the row draws next: the truth, where nothing bars it,
        every fourth spoilt."""
        length, token = int(self.length[row]), int(self.last[row])
        slots = self.slots[self.table[row, : length // 16 + 1]].reshape(-1)[:length].tolist()
        for at in range(MAX_DRAFTS):
            slots.append(stored(slots[-1] if slots else _START, token))
            token = next_token(
                slots, int(self.seed[row]), int(self.sample[row]), self.vocab, frozenset(), 0
            )
            self.drafts[row, at] = token if (length + at) % 4 else 1

    def _draw(self, row: int, forced: int | None, query: int) -> int:
        if self.done[row]:
            return NO_TOKEN
        length = int(self.length[row])
        self._see_window(self.table[row], length)
        blocks = self.table[row, : length // 16 + 1]
        slots = self.slots[blocks].reshape(-1)[: length + 1].tolist()
        assert not self.snapshots or self.after[row][query] == slots[-1], (
            "a row's state is not of its tokens"
        )
        ends = (set() if self.ignore[row] else self.eos) | self.stops[int(row)]
        early = length + 1 < self.first_end[row]
        assert not early or self.wants[row] & WANTS_MIN_TOKENS
        barred = frozenset(ends if early else ())
        if self.wants[row] & WANTS_MASK and self.mask_slot[row] >= 0:
            barred |= self.masks[int(self.mask_slot[row])]
        token = next_token(
            slots, int(self.seed[row]), int(self.sample[row]), self.vocab, barred, self.bad_in
        )
        if token != BAD_LOGITS and forced is not None:
            token = forced
        if token == BAD_LOGITS:
            self.done[row] = True
            return token
        self.last[row] = token
        self.length[row] += 1
        self.done[row] = token in ends or length + 2 >= self.limit[row]
        return token

    def _score(self, plan: StepPlan, tokens: list[int]) -> TokenLogprobs | None:
        if not plan.wants & WANTS_LOGPROBS:
            return None
        where = [
            i for i, row in enumerate(plan.query_rows) if self.logprobs[row] >= 0 and tokens[i] >= 0
        ]
        return _scores(where, [self.positions[i] for i in where], [tokens[i] for i in where])

    def _score_prompts(self, plan: StepPlan) -> TokenLogprobs | None:
        chunks = plan.chunks
        if chunks is None or (chunks.prompt_logprobs < 0).all():
            return None
        where, positions = [], []
        for c in np.flatnonzero(chunks.prompt_logprobs >= 0):
            first, stop = int(chunks.start[c]), int(chunks.start[c + 1])
            where += range(first, stop)
            positions += range(
                int(chunks.context[c]) + 1, int(chunks.context[c]) + 1 + stop - first
            )
        return _scores(where, positions, chunks.next_token[where].tolist())


def offered_to(plan: StepPlan, i: int) -> list[int]:
    """What the plan's i-th row is offered, FROM_DEVICE where the device made it."""
    drafts = plan.drafts
    return [] if drafts is None else drafts.told[drafts.start[i] : drafts.start[i + 1]].tolist()


def _scores(where: list[int], positions: list[int], tokens: list[int]) -> TokenLogprobs:
    """Three of the most likely tokens each, whatever was asked for, the drawn one among them."""
    chosen = np.array(
        [logprob_of(p, t) for p, t in zip(positions, tokens, strict=True)], np.float32
    )
    ids = np.array(tokens, np.int32).reshape(-1, 1) + np.arange(3, dtype=np.int32)
    return TokenLogprobs(
        where=np.array(where, np.int32),
        chosen=chosen,
        rank=np.array(positions, np.int32) % 7 + 1,
        top_ids=ids,
        top=chosen.reshape(-1, 1) - np.arange(3, dtype=np.float32),
    )

"""OutputProcessor: assigns a step's tokens to their samples. It also detects samples' ends and
gathers the deltas to send, for all rows at once with numpy.

Output tokens are stored by KV cache slot (`slot_token [blocks, 16]`), and so are their logprobs if
a row wants them (logprob_store.py). Both are read from there when they are sent to the client.
Knows rows, tokens and when requests want them; not admission, nor the use of freed blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.config import BLOCK_SIZE
from penstock.schedule.deltas import (
    ABORT,
    ERROR,
    GOES_ON,
    LENGTH,
    NO_STOP_ID,
    STOP,
    Deltas,
    empty_deltas,
)
from penstock.schedule.logprob_store import NO_SCORES, LogprobStore, TokenScores, no_scores
from penstock.schedule.request_state import ForkGroup, Groups, RequestState
from penstock.schedule.rows import (
    EACH_TOKEN,
    ENDED,
    FREE,
    IGNORES_EOS,
    MORE_STOP_IDS,
    ON_WATCH,
    STOP_IDS,
    Rows,
)
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import (
    BAD_LOGITS,
    NO_TOKEN,
    Bool,
    Drafts,
    Int32,
    Int64,
    StepPlan,
    StepTokens,
)
from penstock.schedule.stop_token_masks import StopTokenMasks

FEW_EOS = 4
NONE: Int64 = np.zeros(0, np.int64)
NONE_YET = -2  # value of RowBatch.number before a step was read


@dataclass(slots=True)
class Read:
    """Result of reading one step: its deltas, and the rows that ended."""

    ended: Int32  # rows whose samples ended in this step
    rows: Int64  # row of each token that was given to a sample
    tokens: Int32  # the token that each entry of `rows` was given
    goes_on: Bool  # True where the sample of an entry of `rows` goes on after its token
    bad: Int32  # rows with non-finite logits, including cancelled rows
    deltas: Deltas
    taken: int  # number of tokens given to samples
    wasted: int  # number of tokens computed for rows that had already ended
    # [S] number of right drafts of each row; None: the step had no drafts
    right: Int32 | None = None


@dataclass(slots=True)
class RowBatch:
    """Data of a step's S rows that later steps of the same rows use again: what does not change,
    and where the tokens of step `number`, the last one read, went."""

    plan_rows: Int32  # [S] the plan's own array, which names one sample per row as long as it lives
    rows: Int64  # [S] row numbers, as numpy gathers fastest
    member: Bool  # [size of the row table] True for these rows
    traits: NDArray[np.uint8]  # [S]
    last: Int32  # [S] position of the last token that the row may have
    number: int
    positions: Int32  # [S]
    slots: Int64  # [S] KV cache slots of `positions`


class OutputProcessor:
    """Gives the tokens of steps to samples, in launch order."""

    def __init__(
        self,
        limits: SchedulerConfig,
        rows: Rows,
        groups: Groups,
        slot_token: Int32,
        watch: StopTokenMasks,
    ) -> None:
        self.rows, self.groups, self.slot_token, self.watch = rows, groups, slot_token, watch
        self.scores = LogprobStore(len(slot_token))
        self.guesses = False  # True while a row has counts of drafts that were not sent
        self._eos = sorted({t for t in limits.eos_token_ids if 0 <= t < limits.vocab_size})
        self._batch: RowBatch | None = None

    def read(self, plan: StepPlan, result: StepTokens) -> Read:
        """Reads one step. `plan.rows` still name the samples of the launch: no row is reused before
        its steps are read."""
        tokens, columns = result.tokens, self.rows
        right: Int32 | None = None
        where: Int64 | None = None
        bad, distrusted = NONE, plan.rows[:0]
        # Nearly always every token was drawn for a row that goes on.
        drawn = int(tokens.min(initial=0)) >= 0
        batch = self._next(plan) if drawn and plan.drafts is None else None
        if batch is not None:
            rows, positions, slots = batch.rows, batch.positions, batch.slots
            traits, last = batch.traits, batch.last
            columns.read_length += batch.member
        else:
            rows = plan.query_rows.astype(np.int64)
            positions = columns.read_length.take(rows)
            positions += 1
            if plan.drafts is not None:
                positions += plan.drafts.offset
                right = self._settle(plan.rows, plan.drafts, tokens)
            lives = columns.state.take(rows)
            bad = np.flatnonzero(tokens == BAD_LOGITS)
            distrusted = plan.query_rows[bad[lives[bad] != FREE]]
            where = np.flatnonzero((tokens != NO_TOKEN) & (lives > ENDED))
            rows, tokens, positions = rows[where], tokens[where], positions[where]
            if bad.size:
                bad = np.flatnonzero(tokens == BAD_LOGITS)
                tokens[bad] = 0
            slots = columns.slots(rows, positions)
            traits, last = columns.traits.take(rows), columns.limit.take(rows) - np.int32(1)
        self.slot_token.reshape(-1)[slots] = tokens
        if result.logprobs is not None:
            every = np.full(result.tokens.size, -1, np.int64)
            every[slice(None) if where is None else where] = slots
            self.scores.put(every[result.logprobs.where], result.logprobs)
        if distrusted.size:
            self.scores.blank(slots[bad])
        some = int(np.bitwise_or.reduce(traits, initial=0))
        finish, stop_id = self._ends(rows, tokens, positions, last, traits, some, bad)
        taken, hits = rows.size, self._goes_up(rows, tokens, traits, some)
        given = rows, tokens, finish == GOES_ON
        if plan.drafts is not None:
            at, hits = _last_of_each(rows, finish, hits)
            rows, positions, finish, stop_id = rows[at], positions[at], finish[at], stop_id[at]
        if batch is None:
            columns.read_length[rows] = positions
        over = finish != GOES_ON
        ended = rows[np.flatnonzero(over)].astype(np.int32)
        news = np.flatnonzero(hits | over)
        deltas = self._deltas(rows[news], positions[news], finish[news], stop_id[news])
        wasted = result.tokens.size - taken
        if plan.drafts is not None and right is not None:
            wasted -= int(plan.drafts.start[-1] - right.sum())
        return Read(ended, *given, distrusted, deltas, taken, wasted, right)

    def _next(self, plan: StepPlan) -> RowBatch | None:
        """Returns the RowBatch of a step without drafts, with the places of its tokens; None if one of
        its rows ended after the launch."""
        columns, batch = self.rows, self._batch
        if batch is None or batch.plan_rows is not plan.rows:
            rows = plan.rows.astype(np.int64)
            member = np.zeros(columns.count, np.bool_)
            member[rows] = True
            last = columns.limit.take(rows)
            last -= 1
            traits = columns.traits.take(rows)
            self._batch = batch = RowBatch(
                plan.rows, rows, member, traits, last, NONE_YET, last, rows
            )
        if ((columns.state <= ENDED) & batch.member).any():
            return None
        if batch.number == plan.number - 1:
            batch.positions += 1
            batch.slots += 1
            fresh = np.flatnonzero(batch.positions & (BLOCK_SIZE - 1) == 0)
            batch.slots[fresh] = columns.slots(batch.rows[fresh], batch.positions[fresh])
        else:
            batch.positions = columns.read_length.take(batch.rows)
            batch.positions += 1
            batch.slots = columns.slots(batch.rows, batch.positions)
        batch.number = plan.number
        return batch

    def _settle(self, rows: Int32, drafts: Drafts, tokens: Int32) -> Int32:
        """Lowers the rows' planned lengths by the number of drafts in this step that were wrong.
        Returns the number of right ones of each row."""
        offered = drafts.counts
        told = np.add.reduceat((tokens != NO_TOKEN).astype(np.int32), drafts.query_start[:-1])
        right: Int32 = np.maximum(told - 1, 0)
        self.rows.planned_length[rows] -= offered - right
        self.rows.drafted[rows] -= offered
        # the tokens that a grammar forces are no guesses; of rows that have ended nobody is told
        own = ~self.rows.constrained.take(rows) & (self.rows.state.take(rows) > ENDED)
        own &= offered > 0
        if own.any():
            self.guesses = True
            self.rows.guesses[0][rows] += right * own
            self.rows.guesses[1][rows] += (offered - right) * own
        return right

    def _ends(
        self,
        rows: Int64,
        tokens: Int32,
        positions: Int32,
        last: Int32,
        traits: NDArray[np.uint8],
        some: int,
        bad: Int64,
    ) -> tuple[NDArray[np.int8], Int32]:
        """Returns each row's finish reason after this token, as in Deltas.finish, and the stop id
        that matched. last: the position of each row's last possible token. some: the traits that
        any row has. bad: the indices of rows whose logits were not finite."""
        columns = self.rows
        finish = np.full(rows.size, GOES_ON, np.int8)
        stop_id = np.full(rows.size, NO_STOP_ID, np.int32)
        finish[np.flatnonzero(positions >= last)] = LENGTH
        ends = self._eos_among(tokens)
        if ends.size:
            finish[ends[traits[ends] & IGNORES_EOS == 0]] = STOP
        if some & STOP_IDS:
            asks = np.flatnonzero(traits & STOP_IDS)
            asks = asks[finish[asks] != STOP]
            hit = asks[(columns.stop_ids[rows[asks]] == tokens[asks, None]).any(axis=1)]
            finish[hit], stop_id[hit] = STOP, tokens[hit]
            for i in asks[traits[asks] & MORE_STOP_IDS != 0].tolist():
                live = self.groups[int(columns.group[rows[i]])].live
                if positions[i] >= live.min_length and (live.more_stop_ids == tokens[i]).any():
                    finish[i], stop_id[i] = STOP, tokens[i]
        if bad.size:
            finish[bad], stop_id[bad] = ERROR, NO_STOP_ID
        return finish, stop_id

    def _eos_among(self, tokens: Int32) -> Int64:
        """Returns the indices of tokens that end a sequence. If there are few end ids, the tokens
        are compared with each of them, which is three times as fast as looking each token up."""
        if len(self._eos) > FEW_EOS:
            return np.flatnonzero(np.isin(tokens, self._eos))
        hits = np.zeros(tokens.size, np.bool_)
        for token in self._eos:
            hits |= tokens == token
        return np.flatnonzero(hits)

    def _goes_up(self, rows: Int64, tokens: Int32, traits: NDArray[np.uint8], some: int) -> Bool:
        """Returns True for tokens to send to the client now: the row is streamed, or the token may
        end one of its stop strings. some: the traits that any row has."""
        if not some & (EACH_TOKEN | ON_WATCH):
            return np.zeros(rows.size, np.bool_)
        hits: Bool = traits & EACH_TOKEN != 0
        if some & ON_WATCH:
            watched = np.flatnonzero(traits & ON_WATCH)
            hits[watched] = self.watch.hits(self.rows.watch[rows[watched]], tokens[watched])
        return hits

    def _deltas(
        self, rows: Int64, positions: Int32, finish: NDArray[np.int8], stop_id: Int32
    ) -> Deltas:
        if not rows.size:
            return empty_deltas()
        first, stop = self.rows.sent[rows], positions + np.int32(1)
        start, slots = self._slots(rows, first, stop)
        self.rows.sent[rows] = stop
        deltas = Deltas(
            request=self.rows.request[rows],
            sample=self.rows.sample[rows],
            finish=finish,
            stop_id=stop_id,
            start=start,
            tokens=self.slot_token.reshape(-1).take(slots),
        )
        if self.guesses:
            deltas.guesses = self.rows.guesses[:, rows]
            self.rows.guesses[:, rows] = 0
            self.guesses = bool(self.rows.guesses.any())
        tops = self.rows.top.take(rows)
        if self.scores.kept and (tops != NO_SCORES).any():
            found = self.scores.take(slots, np.repeat(tops, stop - first))
            deltas.chosen, deltas.rank, deltas.top_ids, deltas.top = (
                found.chosen,
                found.rank,
                found.top_ids,
                found.top,
            )
        return deltas

    def made_by(self, live: RequestState) -> list[Deltas]:
        """Returns the final deltas of a request's samples, which are about to be cancelled, with
        their tokens that have not been sent."""
        rows = live.living(self.rows).astype(np.int64)
        told = [_cut_pending(group) for group in live.groups if group.pending]
        if rows.size:
            finish, stop_id = (
                np.full(rows.size, ABORT, np.int8),
                np.full(rows.size, NO_STOP_ID, np.int32),
            )
            told.append(self._deltas(rows, self.rows.read_length[rows], finish, stop_id))
        return told

    def tokens_of(self, row: int) -> Int32:
        """Returns the output tokens of a row's sample, as far as steps are read."""
        return self.texts_of(np.array([row]))[1]

    def texts_of(self, rows: Int64) -> tuple[Int32, Int32]:
        """Returns the number of output tokens of each row's sample, as far as steps are read, and
        the tokens of one after the other."""
        first, stop = self.rows.prompt[rows], self.rows.read_length[rows] + np.int32(1)
        _, slots = self._slots(rows, first, stop)
        return stop - first, self.slot_token.reshape(-1).take(slots)

    def scores_of(self, row: int) -> TokenScores:
        """Returns the logprobs of a row's tokens that have been read and not sent."""
        one = np.array([row])
        _, slots = self._slots(one, self.rows.sent[one], self.rows.read_length[one] + np.int32(1))
        return self.scores.take(slots, np.full(slots.size, self.rows.top[row]))

    def bring_scores(self, rows: Int32, group: ForkGroup) -> None:
        """Copies the unsent logprobs of a resumed sample to its tokens' new slots."""
        if group.scored is None:
            return
        positions = np.arange(group.sent, group.tokens.size, dtype=np.int32)
        self.scores.put(self.rows.slots(np.repeat(rows, positions.size), positions), group.scored)

    def _slots(self, rows: Int32 | Int64, first: Int32, stop: Int32) -> tuple[Int32, Int64]:
        """Returns the start offsets [k + 1] and flat slots of output positions first[i] : stop[i]
        of rows[i]."""
        counts = stop - first
        start = np.zeros(rows.size + 1, np.int32)
        np.cumsum(counts, out=start[1:])
        positions = np.repeat(first - start[:-1], counts) + np.arange(start[-1], dtype=np.int32)
        return start, self.rows.slots(np.repeat(rows.astype(np.int64), counts), positions)


def _cut_pending(group: ForkGroup) -> Deltas:
    """Returns the final deltas of a group's pending samples: without tokens, unless the group is
    one preempted sample."""
    samples, made = group.samples[group.next :], group.tokens[group.sent :]
    deltas = Deltas(
        request=np.full(samples.size, group.live.request_id, np.int64),
        sample=samples,
        finish=np.full(samples.size, ABORT, np.int8),
        stop_id=np.full(samples.size, NO_STOP_ID, np.int32),
        start=np.arange(samples.size + 1, dtype=np.int32) * np.int32(made.size),
        tokens=np.tile(made, samples.size),
    )
    if any(group.guesses):
        deltas.guesses = np.tile(np.array(group.guesses, np.int32)[:, None], samples.size)
    k = int(group.live.record["logprobs"][0])
    if k != NO_SCORES:
        scored = group.scored or no_scores(k)
        deltas.chosen, deltas.rank, deltas.top_ids, deltas.top = (
            scored.chosen,
            scored.rank,
            scored.top_ids,
            scored.top,
        )
    return deltas


def _last_of_each(rows: Int64, finish: NDArray[np.int8], hits: Bool) -> tuple[Int64, Bool]:
    """Returns, for each row, the index of its last query that counts, and whether any query up to
    it is in `hits`. rows, finish, hits: per query [queries], a row's queries side by side. Queries
    after a row's end do not count."""
    if not rows.size:
        return np.zeros(0, np.int64), hits
    first = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    row = np.repeat(np.arange(first.size), np.diff(np.append(first, rows.size)))
    ends = (finish != GOES_ON).astype(np.int32)
    before = np.cumsum(ends) - ends
    counts = before == before[first][row]
    last = first + np.add.reduceat(counts.astype(np.int64), first) - 1
    return last, np.logical_or.reduceat(hits & counts, first)

"""Reading: a flight's tokens find their samples, ends are seen, and what goes up is gathered, all in whole columns.

Output tokens lie in the pool's geometry (`slot_token [blocks, 16]`) and are gathered from there when they go up. It
knows rows, tokens and requests' delivery; not who is admitted, nor who gets the freed blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.deltas import ERROR, GOES_ON, LENGTH, NO_STOP_ID, STOP, Deltas, empty_deltas
from penstock.schedule.groups import Groups
from penstock.schedule.limits import Limits
from penstock.schedule.rows import DRAINED, EACH_TOKEN, ENDED, FREE, MORE_STOP_IDS, ON_WATCH, Rows, spread
from penstock.schedule.step import BAD_LOGITS, NO_TOKEN, Bool, Int32, StepPlan, StepTokens, TokenLogprobs
from penstock.schedule.watch import WatchTables

_BY_BLOCKS = 8  # tokens a row from which on they are gathered block by block


@dataclass(slots=True)
class Read:
    """What one flight brought: rows that ended, and the news."""

    ended: Int32  # rows
    deltas: Deltas
    taken: int  # tokens that reached a sample
    wasted: int  # tokens computed for rows that had ended


class Reading:
    """Reads flights in the order of their launch."""

    def __init__(self, limits: Limits, rows: Rows, groups: Groups, slot_token: Int32, watch: WatchTables) -> None:
        self.rows, self.groups, self.slot_token, self.watch = rows, groups, slot_token, watch
        self._eos: Bool = np.zeros(limits.vocab_size, np.bool_)
        self._eos[[t for t in limits.eos_token_ids if t < limits.vocab_size]] = True

    def read(self, plan: StepPlan, result: StepTokens) -> Read:
        """Takes one flight in. `plan.rows` still name the sequences of the launch: no row is reused before this."""
        rows, tokens, positions = plan.rows, result.tokens, plan.lengths + np.int32(1)
        lives = self.rows.state.take(rows)
        accepted = (tokens != NO_TOKEN) & (lives != ENDED) & (lives != FREE)
        where: Int32 | None = None
        if not accepted.all():
            where = np.flatnonzero(accepted).astype(np.int32)
            rows, tokens, positions = rows[where], tokens[where], positions[where]
        bad = tokens == BAD_LOGITS
        if bad.any():
            tokens = np.where(bad, 0, tokens)
        self.slot_token.reshape(-1)[self.rows.slots(rows, positions)] = tokens
        self.rows.read[rows] = positions
        finish, stop_id = self._ends(rows, tokens, positions, bad)
        ended = rows[finish != GOES_ON]
        news = self._news(rows, tokens, finish)
        deltas = self._deltas(rows[news], positions[news], finish[news], stop_id[news])
        if result.logprobs is not None:
            at = np.full(plan.rows.size, -1, np.int32)
            at[news if where is None else where[news]] = deltas.start[1:] - 1
            _add_logprobs(deltas, at, result.logprobs)
        return Read(ended, deltas, rows.size, plan.rows.size - rows.size)

    def _ends(self, rows: Int32, tokens: Int32, positions: Int32, bad: Bool) -> tuple[NDArray[np.int8], Int32]:
        """Why each row ends with this token, as in Deltas.finish, and the stop id that did it."""
        columns = self.rows
        finish = np.full(rows.size, GOES_ON, np.int8)
        stop_id = np.full(rows.size, NO_STOP_ID, np.int32)
        finish[positions + 1 >= columns.limit.take(rows)] = LENGTH
        ends = self._eos.take(tokens) & ~columns.ignore_eos.take(rows)
        finish[ends] = STOP
        asks = np.flatnonzero(columns.stops.take(rows) & ~ends)
        if asks.size:
            hit = asks[(columns.stop_ids[rows[asks]] == tokens[asks, None]).any(axis=1)]
            finish[hit], stop_id[hit] = STOP, tokens[hit]
            for i in asks[columns.wants[rows[asks]] & MORE_STOP_IDS != 0].tolist():
                live = self.groups[int(columns.group[rows[i]])].live
                if positions[i] >= live.min_length and (live.more_stop_ids == tokens[i]).any():
                    finish[i], stop_id[i] = STOP, tokens[i]
        finish[bad], stop_id[bad] = ERROR, NO_STOP_ID
        return finish, stop_id

    def _news(self, rows: Int32, tokens: Int32, finish: NDArray[np.int8]) -> Int32:
        """Indices of rows whose tokens go up now."""
        deliver = self.rows.deliver.take(rows)
        goes_up = (finish != GOES_ON) | (deliver == EACH_TOKEN)
        watched = np.flatnonzero(deliver == ON_WATCH)
        if watched.size:
            goes_up[watched] |= self.watch.hits(self.rows.watch[rows[watched]], tokens[watched])
        return np.flatnonzero(goes_up).astype(np.int32)

    def _deltas(self, rows: Int32, positions: Int32, finish: NDArray[np.int8], stop_id: Int32) -> Deltas:
        if not rows.size:
            return empty_deltas()
        start, tokens = self.gather(rows, self.rows.sent[rows], positions + 1)
        self.rows.sent[rows] = positions + 1
        return Deltas(
            request=self.rows.request[rows],
            sample=self.rows.sample[rows],
            finish=finish,
            stop_id=stop_id,
            start=start,
            tokens=tokens,
        )

    def gather(self, rows: Int32, first: Int32, stop: Int32) -> tuple[Int32, Int32]:
        """CSR (start, tokens) of output positions first : stop of each row."""
        counts = (stop - first).astype(np.int64)
        start = np.zeros(rows.size + 1, np.int32)
        np.cumsum(counts, out=start[1:])
        if start[-1] > _BY_BLOCKS * rows.size:
            return start, self._by_blocks(rows, first, stop)
        positions = np.repeat(first, counts) + spread(counts).astype(np.int32)
        slots = self.rows.slots(np.repeat(rows, counts), positions)
        return start, self.slot_token.reshape(-1).take(slots)

    def _by_blocks(self, rows: Int32, first: Int32, stop: Int32) -> Int32:
        """gather's tokens, from whole blocks: a third of the time where a row has many (1,000 rows of 100: 0.4 ms)."""
        low = first >> 4
        counts = (((stop + 15) >> 4) - low).astype(np.int64)
        index = np.repeat(low, counts) + spread(counts)
        blocks = self.rows.table.reshape(-1).take(np.repeat(rows.astype(np.int64) * self.rows.width, counts) + index)
        position = (index << 4).astype(np.int32)[:, None] + np.arange(16, dtype=np.int32)
        mine = (position >= np.repeat(first, counts)[:, None]) & (position < np.repeat(stop, counts)[:, None])
        tokens: Int32 = self.slot_token.take(blocks, axis=0)[mine]
        return tokens


def _add_logprobs(deltas: Deltas, at: Int32, scored: TokenLogprobs) -> None:
    """Puts logprobs beside the tokens. `at [S]`: where a planned row's token lies in the deltas, -1 where it doesn't.

    A row that asks for logprobs sends every token, so its newest token is the only one of its delta.
    """
    places = at[scored.where]
    source = np.flatnonzero(places >= 0)
    places = places[source]
    total, width = deltas.tokens.size, scored.top_ids.shape[1]
    deltas.chosen = np.full(total, np.nan, np.float32)
    deltas.rank = np.zeros(total, np.int32)
    deltas.top_ids = np.full((total, width), -1, np.int32)
    deltas.top = np.full((total, width), np.nan, np.float32)
    deltas.chosen[places], deltas.rank[places] = scored.chosen[source], scored.rank[source]
    deltas.top_ids[places], deltas.top[places] = scored.top_ids[source], scored.top[source]


def drained(columns: Rows, rows: Int32) -> Int32:
    """Of rows just launched, those whose last step this was: the host knows without reading."""
    last = rows[columns.length.take(rows) + 1 >= columns.limit.take(rows)]
    columns.state[last] = DRAINED
    return last

"""Reading a flight in whole columns against a twin that keeps an object for each sequence."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from penstock.request import Request, SamplingParams
from penstock.row_table import MAX_STOP_IDS
from penstock.schedule.deltas import ERROR, GOES_ON, LENGTH, NO_STOP_ID, STOP, Deltas
from penstock.schedule.output_processor import OutputProcessor
from penstock.schedule.request_state import Groups, RequestState
from penstock.schedule.rows import (
    DRAINED,
    EACH_TOKEN,
    ENDED,
    FREE,
    ON_WATCH,
    PREEMPTED,
    RUNNING,
    Rows,
)
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import BAD_LOGITS, NO_TOKEN, Moves, StepPlan, StepTokens, TokenLogprobs
from penstock.schedule.stop_token_masks import StopTokenMasks

VOCAB, EOS, WIDTH = 40, (3, 9), 8
LONGEST = WIDTH * 16


@dataclass
class Twin:
    """One sequence as an object."""

    row: int
    live: RequestState
    sample: int
    state: int
    position: int  # of the last token read
    sent: int
    stop_ids: list[int]
    ignore_eos: bool
    watched: set[int]
    tokens: dict[int, int] = field(default_factory=dict)

    def read(self, token: int, position: int) -> tuple[list[int], int, int] | None:
        """What goes up: tokens, why it ends, which stop id did it; None: nothing."""
        if token == NO_TOKEN or self.state in (ENDED, FREE):
            return None
        self.tokens[position], self.position = max(token, 0), position
        finish, stop_id = self._end(token, position)
        if finish == GOES_ON and not self._goes_up(token):
            return None
        up = [self.tokens[p] for p in range(self.sent, position + 1)]
        self.sent = position + 1
        return up, finish, stop_id

    def _end(self, token: int, position: int) -> tuple[int, int]:
        if token == BAD_LOGITS:
            return ERROR, NO_STOP_ID
        if token in EOS and not self.ignore_eos:
            return STOP, NO_STOP_ID
        late = position >= self.live.min_length
        if token in self.stop_ids[:MAX_STOP_IDS] or (
            late and token in self.stop_ids[MAX_STOP_IDS:]
        ):
            return STOP, token
        return (LENGTH if position + 1 >= self.live.limit else GOES_ON), NO_STOP_ID

    def _goes_up(self, token: int) -> bool:
        return bool(self.live.traits & EACH_TOKEN) or (
            self.live.traits & ON_WATCH > 0 and token in self.watched
        )


class Scene:
    """Rows in every state, each in blocks of its own, and their twins."""

    def __init__(self, seed: int, rows: int) -> None:
        self.rng = rng = random.Random(seed)
        self.rows, self.groups, self.watch = Rows(rows, WIDTH), Groups(), StopTokenMasks(VOCAB)
        self.slot_token = np.zeros((rows * WIDTH + 1, 16), np.int32)
        limits = SchedulerConfig(
            num_blocks=len(self.slot_token),
            max_rows=rows,
            max_model_len=LONGEST,
            max_batched_tokens=rows,
            vocab_size=VOCAB,
            eos_token_ids=EOS,
        )
        self.outputs = OutputProcessor(limits, self.rows, self.groups, self.slot_token, self.watch)
        self.rows.table[:] = 1 + np.random.default_rng(seed).permutation(rows * WIDTH).reshape(
            rows, WIDTH
        )
        self.twins = [self._twin(row) for row in range(rows)]
        self.number = 0
        assert any(not t.live.traits & (EACH_TOKEN | ON_WATCH) for t in self.twins) or rows < 20
        rng.shuffle(self.twins)

    def _twin(self, row: int) -> Twin:
        rng = self.rng
        stop_ids = rng.sample(range(VOCAB), rng.choice([0, 0, 1, 8, 11]))
        watched = set(rng.sample(range(VOCAB), 5))
        prompt = rng.randrange(1, 40)
        params = SamplingParams(
            n=3,
            max_tokens=rng.randrange(1, 60),
            min_tokens=0,
            stop_token_ids=stop_ids,
            ignore_eos=rng.random() < 0.4,
            logprobs=row % 3 if row % 5 == 0 else None,
        )
        params.min_tokens = rng.randrange(0, 4)
        packed = (
            np.packbits(np.isin(np.arange(VOCAB), sorted(watched))).tobytes()
            if rng.random() < 0.4
            else None
        )
        tokens = np.zeros(prompt, np.int32)
        request = Request(
            request_id=10**10 + row,
            prompt=tokens.tobytes(),
            sampling=params,
            stream=rng.random() < 0.3,
            watch=packed,
        )
        slot = self.watch.hold(packed) if packed is not None else -1
        live = RequestState.of(request, row, 0, LONGEST, slot)
        group = self.groups.add(live, tokens, np.arange(3, dtype=np.int32), prompt)
        state = rng.choice([RUNNING, RUNNING, RUNNING, DRAINED, PREEMPTED, ENDED, FREE])
        self._columns(row, live, group.slot, state)
        columns = self.rows
        columns.sample[row] = row % 3
        ignore = params.ignore_eos
        return Twin(
            row,
            live,
            row % 3,
            state,
            prompt - 1,
            prompt,
            stop_ids,
            ignore,
            watched if packed else set(),
        )

    def _columns(self, row: int, live: RequestState, slot: int, state: int) -> None:
        columns, record = self.rows, live.record
        columns.state[row], columns.group[row], columns.request[row] = state, slot, live.request_id
        columns.planned_length[row] = columns.read_length[row] = live.prompt_length - 1
        columns.prompt[row] = columns.sent[row] = live.prompt_length
        columns.limit[row], columns.traits[row], columns.watch[row] = (
            live.limit,
            live.traits,
            live.watch,
        )
        columns.top[row] = record["logprobs"][0]
        self.outputs.scores.ask(int(columns.top[row]))
        columns.stop_ids[row] = record["stop_ids"][0]

    def flight(self) -> None:
        """A flight of some rows in any order; the columns must say what the twins do."""
        rng = self.rng
        some = rng.sample(self.twins, rng.randrange(1, len(self.twins) + 1))
        some = [t for t in some if t.position + 1 < t.live.limit]
        kinds = [rng.choice([NO_TOKEN, BAD_LOGITS, *range(VOCAB), *range(VOCAB)]) for _ in some]
        self._read(some, np.array([t.row for t in some], np.int32), kinds)

    def flights_of_the_same(self, most: int) -> None:
        """Up to so many flights of the same rows, one array, until a row ends. In some a row draws
        nothing; some are not the next by number."""
        rng = self.rng
        some = [t for t in self.twins if t.state > ENDED and t.position + 1 < t.live.limit]
        rows = np.array([t.row for t in some], np.int32)
        for _ in range(most):
            kinds = [rng.randrange(10, VOCAB) for _ in some]
            if some and rng.random() < 0.1:
                kinds[rng.randrange(len(some))] = NO_TOKEN
            self.number += rng.random() < 0.1
            self._read(some, rows, kinds)
            if any(t.state == ENDED for t in some):
                return

    def _read(self, some: list[Twin], rows: np.ndarray, kinds: list[int]) -> None:
        lengths = np.array([t.position for t in some], np.int32)
        plan = empty_plan(self.number, rows, lengths)
        tokens = np.array(kinds, np.int32)
        scored = [i for i, t in enumerate(some) if t.row % 5 == 0 and kinds[i] >= 0]
        result = StepTokens(tokens, scores(scored, kinds) if scored else None)
        want = {}
        taken = 0
        for twin, token in zip(some, kinds, strict=True):
            taken += token != NO_TOKEN and twin.state not in (ENDED, FREE)
            up = twin.read(token, twin.position + 1)
            if up is not None:
                want[twin.row] = up
        self._compare(plan, result, some, want, taken)
        self.number += 1

    def _compare(
        self,
        plan: StepPlan,
        result: StepTokens,
        some: list[Twin],
        want: dict[int, tuple[list[int], int, int]],
        n: int,
    ) -> None:
        read = self.outputs.read(plan, result)
        deltas = read.deltas
        got = {}
        for i in range(deltas.count):
            row = int(deltas.request[i]) - 10**10
            tokens = deltas.tokens[deltas.start[i] : deltas.start[i + 1]].tolist()
            got[row] = (tokens, int(deltas.finish[i]), int(deltas.stop_id[i]))
            assert deltas.sample[i] == row % 3
            self._compare_scores(deltas, i, row, tokens)
        assert got == want
        assert sorted(read.ended.tolist()) == sorted(
            row for row, up in want.items() if up[1] != GOES_ON
        )
        assert (read.taken, read.wasted) == (n, len(some) - n)
        for twin in self.twins:
            assert (
                self.rows.read_length[twin.row] == twin.position
                and self.rows.sent[twin.row] == twin.sent
            )
            if twin.row in want and want[twin.row][1] != GOES_ON:
                twin.state = self.rows.state[twin.row] = ENDED

    def _compare_scores(self, deltas: Deltas, i: int, row: int, tokens: list[int]) -> None:
        """All tokens of a row that asks have scores, those that waited too; those of others are
        told as none."""
        if row % 5:
            assert (
                deltas.chosen is None
                or np.isnan(deltas.chosen[deltas.start[i] : deltas.start[i + 1]]).all()
            )
            return
        assert deltas.chosen is not None and deltas.top_ids is not None
        k = row % 3
        for at, token in enumerate(
            tokens[:-1] if deltas.finish[i] == ERROR else tokens, int(deltas.start[i])
        ):
            assert deltas.chosen[at] == -token - 1
            assert deltas.top_ids[at].tolist() == [token, token + 1][:k] + [-1] * (
                deltas.top_ids.shape[1] - k
            )


def empty_plan(number: int, rows: np.ndarray, lengths: np.ndarray) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan(
        number=number,
        rows=rows,
        lengths=lengths,
        wants=0,
        group_start=np.zeros(1, np.int32),
        group_blocks=none.reshape(0, 0),
        group_length=none,
        moves=Moves.none(),
        new_blocks=none.reshape(0, 3),
        joins=None,
        chunks=None,
    )


def scores(where: list[int], tokens: list[int]) -> TokenLogprobs:
    ids = np.array([tokens[i] for i in where], np.int32)
    return TokenLogprobs(
        where=np.array(where, np.int32),
        chosen=(-ids - 1).astype(np.float32),
        rank=np.ones(ids.size, np.int32),
        top_ids=np.stack((ids, ids + 1), axis=1),
        top=np.zeros((ids.size, 2), np.float32),
    )


@pytest.mark.parametrize("seed", range(20))
def test_columns_are_the_objects(seed: int) -> None:
    scene = Scene(seed, random.Random(seed).choice([1, 4, 40]))
    for _ in range(60):
        scene.flight()


@pytest.mark.parametrize("seed", range(20))
def test_flights_of_the_same_rows_are_the_objects(seed: int) -> None:
    scene = Scene(seed, random.Random(seed).choice([1, 4, 12]))
    for _ in range(40):
        scene.flights_of_the_same(40)
        scene.flight()

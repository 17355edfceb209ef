"""Drives a scheduler with a fake device, and holds every delta against what its sample gives alone.

The state machine and the fixed replays share it: they choose what happens, this says what must come
of it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from fake_device import Alone, FakeDevice, logprob_of, sample_alone, stored
from toy_constraint import Alternating

from penstock.request import REST, Request, SamplingParams
from penstock.row_table import MAX_DRAFTS
from penstock.schedule.deltas import ABORT, ERROR, GOES_ON, Deltas, PromptNews
from penstock.schedule.group_texts import GroupTexts
from penstock.schedule.mask_makers import MasksHere
from penstock.schedule.rows import DRAINED, ENDED, FREE, PREEMPTED, RUNNING
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import Drafts, StepPlan

VOCAB = 200
EOS = {3}


@dataclass
class Asked:
    """A request and what has come of it."""

    request: Request
    prompt: list[int]
    alone: dict[int, Alone]
    watched: set[int]
    constraints: dict[int, Alternating] = field(default_factory=dict)  # of samples that had a row
    got: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # came to their end, or were cancelled
    told: bool = False  # PromptNews came


class Guesser:
    """A drafter that knows the truth and offers it, spoilt now and then: some of what it offers is
    right. counts_alone: it offers how many, the device makes them."""

    idle = False

    def __init__(self, drive: Drive, seed: int, counts_alone: bool) -> None:
        self.drive, self.random, self.counts_alone = drive, random.Random(seed), counts_alone

    most, reach = MAX_DRAFTS, MAX_DRAFTS
    proposes, follows = 0, False

    def wants(self, rows: np.ndarray) -> bool:
        return True

    def settled(self, rows: np.ndarray, offered: np.ndarray, right: np.ndarray) -> None:
        """Learns nothing."""

    def offer(self, rows: np.ndarray, lengths: np.ndarray, most: np.ndarray) -> Drafts:
        counts, tokens = [], []
        for row, length, longest in zip(
            rows.tolist(), lengths.tolist(), most.tolist(), strict=True
        ):
            truth = self._truth(row)[length + 1 :]
            some = [
                self._spoilt(token)
                for token in [*truth, 1, 2, 3, 4][: self.random.randrange(longest + 1)]
            ]
            counts.append(len(some))
            tokens += some
        start = np.cumsum([0, *counts], dtype=np.int32)
        return Drafts(start, None if self.counts_alone else np.array(tokens, np.int32))

    def _truth(self, row: int) -> list[int]:
        columns = self.drive.scheduler.rows
        asked = self.drive.asked[int(columns.request[row])]
        return asked.prompt + asked.alone[int(columns.sample[row])].tokens

    def _spoilt(self, token: int) -> int:
        return token if self.random.random() < 0.8 else self.random.randrange(VOCAB)


class ByTurns(Executor):
    """Threads that make all masks that are due, or every other time some of them: the others are
    late."""

    def __init__(self) -> None:
        self.due: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.turn = 0

    def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        self.due.append((Future(), partial(work, *args, **more)))
        return self.due[-1][0]

    def run(self) -> None:
        self.turn += 1
        for _ in range(len(self.due) if self.turn % 2 else self.turn % 3):
            if self.due:
                future, work = self.due.popleft()
                future.set_result(work())


class Drive:
    """A scheduler, its device, and the truth. drafts: seed of what rows are offered, of every other
    odd one by the device; None: nothing."""

    def __init__(
        self,
        limits: SchedulerConfig,
        bad_in: int = 0,
        misled: bool = False,
        drafts: int | None = None,
    ) -> None:
        self.limits, self.bad_in = limits, bad_in
        self.threads = ByTurns()
        makers = MasksHere(limits.vocab_size, self.threads)
        by_device = drafts is not None and drafts % 4 == 3
        guesser = None if drafts is None else Guesser(self, drafts, by_device)
        self.scheduler = Scheduler(limits, makers=makers)
        self.scheduler.drafting.drafter = guesser
        if by_device:
            self.scheduler.drafting.texts = GroupTexts(slots=2, width=24)
        width = -(-limits.max_model_len // 16)
        self.device = FakeDevice(
            limits.num_blocks,
            limits.max_rows,
            width,
            limits.vocab_size,
            EOS,
            bad_in,
            limits.window,
            limits.window_tables,
            limits.snapshots,
        )
        self.device.proposes = by_device
        self.asked: dict[int, Asked] = {}
        self.leaving: list[tuple[Asked, int]] = []  # cancelled samples, until the next plan
        self.requeued = self.stalled = self.taken = self.events = 0
        self.scored = self.kept_back = (
            0  # tokens with scores; those that did not go up when they were read
        )
        self.constrained = 0  # tokens of constrained samples that came to their end
        self.cut = 0  # tokens of cut samples that went up with their end
        self.cut_waiting = 0  # of those, scored ones of samples that were preempted and had no row
        self.carried = 0  # scores that were brought to a resumed row's blocks
        self._count_carried()
        # rows, blocks, mask slots of each flight that is not read
        self._named: deque[tuple[set[int], ...]] = deque()
        self._count_requeues()
        if (
            misled
        ):  # the forecast expects short outputs, so that too much is admitted and blocks run out
            self.scheduler.lengths.observe(np.ones(200, np.int32))

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        watched: set[int] | None = None,
        samples: list[int] | None = None,
        background: bool = False,
        tenant: int = 0,
        salt: int = 0,
        constrained: bool = False,
    ) -> int:
        number = len(self.asked)
        watch = (
            np.packbits(np.isin(np.arange(VOCAB), sorted(watched))).tobytes()
            if watched is not None
            else None
        )
        packed = np.array(prompt, np.int32).tobytes()
        request = Request(
            request_id=number,
            prompt=packed,
            sampling=params,
            stream=stream,
            watch=watch,
            samples=samples,
            background=background,
            tenant=tenant,
            salt=salt,
        )
        made: dict[int, Alternating] = {}
        forces = not params.allowed_token_ids and number % 4 > 0

        def constrain(sample: int) -> Alternating | None:
            """Each third sample is free."""
            if sample % 3 == 2:
                return None
            assert sample not in made, "a sample's constraint was made twice"
            return made.setdefault(sample, Alternating(VOCAB, forces=forces))

        self.scheduler.submit(request, constrain if constrained else None)
        longest = self.limits.max_model_len
        # a constraint sees to it by itself
        told = dataclasses.replace(params, min_tokens=0) if constrained else params
        alone = {
            k: sample_alone(
                prompt,
                told,
                k,
                VOCAB,
                longest,
                EOS,
                self.bad_in,
                Alternating(VOCAB, forces=forces) if constrained and k % 3 < 2 else None,
            )
            for k in (range(params.n) if samples is None else samples)
        }
        self.asked[number] = Asked(request, prompt, alone, watched or set(), made)
        return number

    def cancel(self, number: int, sample: int | None = None) -> None:
        made = self._made(number) if sample == REST else {}
        self.scheduler.cancel(number, sample)
        asked = self.asked[number]
        if sample not in (None, REST):  # it ends with the next plan, or with another cancel
            if sample in asked.alone:
                self.leaving.append((asked, sample))
        else:
            self._end_leaving()
            if sample == REST:
                self._take_cut(asked, made)
            asked.ended |= set(asked.alone)
        self.check()

    def _end_leaving(self) -> None:
        for asked, sample in self.leaving:
            asked.ended.add(sample)
        self.leaving.clear()

    def _made(self, number: int) -> dict[int, int]:
        """Sample -> how many of its tokens were read, of a request's that have not ended."""
        rows, live = self.scheduler.rows, self.scheduler.live.get(number)
        if live is None:
            return {}
        made = {
            int(rows.sample[row]): int(rows.read_length[row]) + 1 - live.prompt_length
            for row in live.living(rows)
        }
        for group in live.groups:
            count = group.tokens.size - live.prompt_length
            self.cut_waiting += (
                0 if group.scored is None else group.pending * group.scored.chosen.size
            )
            made |= dict.fromkeys(group.samples[group.next :].tolist(), count)
        return made

    def _take_cut(self, asked: Asked, made: dict[int, int]) -> None:
        """Every sample that had not ended is told of once, with all that it had made."""
        left = set(asked.alone) - asked.ended
        while (told := self.scheduler.take_told()) is not None:
            for i in range(told.count):
                sample, at = int(told.sample[i]), int(told.start[i])
                tokens = told.tokens[at : told.start[i + 1]].tolist()
                assert told.request[i] == asked.request.request_id and told.finish[i] == ABORT
                left.remove(sample)
                got = asked.got.setdefault(sample, [])
                got += tokens
                assert got == asked.alone[sample].tokens[: made[sample]], (
                    "a cut sample tells other tokens than it made"
                )
                self.cut += len(tokens)
                if asked.request.sampling.logprobs is not None:
                    assert told.chosen is not None
                    if tokens:
                        self._take_scores(asked, sample, tokens, ABORT, told, at)
        assert not left, "a sample was cut and not told of"

    def step(self) -> StepPlan | None:
        columns = self.scheduler.rows
        running = np.flatnonzero((columns.state == RUNNING) & ~columns.constrained).tolist()
        plan = self.scheduler.plan()
        self._end_leaving()
        if plan is not None:
            self._check_reuse(plan)
            self.device.launch(plan)
            if plan.draws_late:
                if self.device.results:
                    self.read()
                self.threads.run()
                self.device.draw(self.scheduler.draw(plan))
            self._named.append(self._names(plan))
            still = {row for row in running if self.scheduler.rows.state[row] == RUNNING}
            self.stalled += not still <= set(plan.rows.tolist())
        self._check_now_and_then()
        return plan

    def read(self) -> None:
        """Reads the oldest flight."""
        self._named.popleft()
        plan, result = self.device.results.popleft()
        self._take(self.scheduler.commit(plan, result))
        self._check_now_and_then()

    def sleep(self) -> None:
        """Reads what is out; then the device loses all, and whoever runs goes on behind it."""
        while self.device.results:
            self.read()
        self.scheduler.give_back_blocks()
        self.device.forget()
        self.check()

    def finish(self, lag: int = 0) -> None:
        """Runs until nothing is left; then nothing may be held,
        and every sample must have ended."""
        idle = 0
        while self.scheduler.has_work or self.device.results:
            plan = self.step()
            while self.device.results and (plan is None or len(self.device.results) > lag):
                self.read()
                idle = 0
                if plan is None:
                    break
            else:
                idle = 0 if plan is not None else idle + 1
            stuck = plan is None and not self.device.results and self.scheduler.has_work
            assert not (stuck and self.scheduler.plan_is_stuck()), "the scheduler gave up"
            assert idle < 200, "the scheduler has work and does nothing"
        self._check_over()
        texts = self.scheduler.drafting.texts
        assert texts is None or sorted(texts._free) == [0, 1], "a slot of texts was not given back"

    def _check_now_and_then(self) -> None:
        """Checks after every third launch or read, which come by turns: else checks take two fifths
        of a replay."""
        self.events += 1
        if self.events % 3 == 0:
            self.check()

    def check(self) -> None:
        self.scheduler.check()
        self._check_lengths()
        for block in np.flatnonzero(self.scheduler.pool.kept).tolist():
            tokens = self.scheduler.slot_token[block].tolist()
            slots = self.device.slots[block].tolist()
            made = [
                stored(before, token) for before, token in zip(slots[:-1], tokens[1:], strict=True)
            ]
            assert made == slots[1:], "the tree holds a block that isn't what it says"
        self._check_salts()

    def _check_lengths(self) -> None:
        """A row's planned length is what was read of it and its tokens in flight; after its end
        nothing is read."""
        rows, flying = self.scheduler.rows, np.zeros(self.limits.max_rows, np.int64)
        for plan, _ in self.device.results:
            np.add.at(flying, plan.query_rows, 1)
            np.add.at(flying, self.device.sat_out.get(plan.number, np.zeros(0, np.int32)), -1)
        if self.device.open is not None:  # rows with constraints move at its draw
            np.add.at(flying, self.device.open.query_rows, 1)
            np.add.at(flying, self.device.open.rows[rows.constrained[self.device.open.rows]], -1)
        alive = (rows.state == RUNNING) | (rows.state == DRAINED) | (rows.state == PREEMPTED)
        assert (rows.planned_length[alive] == (rows.read_length + flying)[alive]).all(), (
            "planned isn't read + in flight"
        )
        ended = rows.state == ENDED
        assert (rows.planned_length[ended] >= (rows.read_length + flying)[ended]).all(), (
            "an ended row is read on"
        )

    def _check_salts(self) -> None:
        """No block is in the tables of two salts."""
        rows, salt_of = self.scheduler.rows, dict[int, int]()
        held = [
            (self.asked[rows.request[row]].request.salt, rows.table[row, : rows.blocks[row]])
            for row in np.flatnonzero(rows.state == RUNNING).tolist()
        ]
        held += [(group.live.salt, group.blocks) for group in self.scheduler.groups]
        for salt, blocks in held:
            for block in blocks.tolist():
                assert salt_of.setdefault(block, salt) == salt, "two salts share a block"

    def _names(self, plan: StepPlan) -> tuple[set[int], ...]:
        blocks = {0}
        for row, length in zip(plan.rows.tolist(), plan.lengths.tolist(), strict=True):
            blocks |= set(self.device.table[row, : length // 16 + 1].tolist())
        if plan.chunks is not None:
            blocks |= set(plan.chunks.blocks.reshape(-1).tolist())
        return set(plan.rows.tolist()), blocks - {0}, set(self.device.mask_slot[plan.rows].tolist())

    def _check_reuse(self, plan: StepPlan) -> None:
        """The rule of flights: rows, blocks, mask slots are used anew once every flight that names
        them was read."""
        joined = set() if plan.joins is None else set(plan.joins.rows.tolist())
        fresh = {*plan.new_blocks[:, 2].tolist(), *plan.moves.blocks[:, 1].tolist()}
        written = set() if plan.masks is None else set(plan.masks.slots.tolist())
        for rows, blocks, slots in self._named:
            assert not written & slots, (
                "a mask was written before the flights that name its slot were read"
            )
            assert not joined & rows, "a row was used again before its flights were read"
            assert not fresh & blocks, "a block was used again before its flights were read"

    def _count_requeues(self) -> None:
        admission = self.scheduler.admission
        requeue = admission.requeue

        def counted(group):  # type: ignore[no-untyped-def]
            self.requeued += 1
            return requeue(group)

        admission.requeue = counted  # type: ignore[method-assign]

    def _count_carried(self) -> None:
        reading = self.scheduler.outputs
        bring = reading.bring_scores

        def counted(rows, group):  # type: ignore[no-untyped-def]
            self.carried += 0 if group.scored is None else group.scored.chosen.size
            bring(rows, group)

        reading.bring_scores = counted  # type: ignore[method-assign]

    def _take(self, deltas: Deltas) -> None:
        for news in deltas.prompts:
            self._take_news(news)
        seen = set()
        for i in range(deltas.count):
            number, sample = int(deltas.request[i]), int(deltas.sample[i])
            assert (number, sample) not in seen, "a sample stands in a step's deltas twice"
            seen.add((number, sample))
            tokens = deltas.tokens[deltas.start[i] : deltas.start[i + 1]].tolist()
            self._take_sample(
                self.asked[number], sample, tokens, int(deltas.finish[i]), int(deltas.stop_id[i])
            )
            if self.asked[number].request.sampling.logprobs is not None:
                at, finish = int(deltas.start[i]), int(deltas.finish[i])
                self._take_scores(self.asked[number], sample, tokens, finish, deltas, at)
            elif deltas.chosen is not None:
                assert np.isnan(deltas.chosen[deltas.start[i] : deltas.start[i + 1]]).all()

    def _take_sample(
        self, asked: Asked, sample: int, tokens: list[int], finish: int, stop_id: int
    ) -> None:
        assert asked.told, "tokens came before the news of their prompt"
        assert sample not in asked.ended, "tokens of a sample that had ended"
        assert tokens, "a delta without tokens"
        alone, got = asked.alone[sample], asked.got.setdefault(sample, [])
        got += tokens
        self.taken += len(tokens)
        assert got == alone.tokens[: len(got)], "a sample's tokens are not what it gives alone"
        if len(got) == len(alone.tokens):
            why = (alone.finish, alone.stop_id)
            assert (finish, stop_id) == why, "a sample ended for another reason than alone"
            asked.ended.add(sample)
            if sample in asked.constraints:
                told = asked.constraints[sample].tokens  # it may have been run ahead of forced ones
                assert told[: len(got) - 1] == got[:-1], "a constraint was told other tokens"
                self.constrained += len(got)
        else:
            assert finish == GOES_ON, "a sample ended early"
        self._check_delivery(asked, tokens, finish)

    def _check_delivery(self, asked: Asked, tokens: list[int], finish: int) -> None:
        drafts = bool(self.scheduler.drafting.drafter or asked.constraints)
        if asked.request.stream:
            assert len(tokens) == 1 or drafts, "a streamed token was kept back"
        else:
            last = 1 + MAX_DRAFTS * drafts  # of one step
            assert not asked.watched & set(tokens[:-last]), "a watched token was kept back"
            assert finish != GOES_ON or asked.watched & set(tokens[-last:]), (
                "tokens went up that nobody waits for"
            )

    def _take_scores(
        self, asked: Asked, sample: int, tokens: list[int], finish: int, deltas: Deltas, at: int
    ) -> None:
        """Every token that could be drawn has the score of its own position, however late it goes
        up."""
        assert deltas.chosen is not None and deltas.rank is not None
        assert deltas.top_ids is not None and deltas.top is not None
        k = asked.request.sampling.logprobs
        assert (
            k is not None and deltas.top_ids.shape == deltas.top.shape and deltas.top.shape[1] >= k
        )
        first = len(asked.prompt) + len(asked.got[sample]) - len(tokens)
        for i, token in enumerate(tokens[:-1] if finish == ERROR else tokens):
            score = np.float32(logprob_of(first + i, token))
            assert deltas.chosen[at + i] == score, "a score that isn't its token's"
            assert deltas.rank[at + i] == (first + i) % 7 + 1
            assert (
                deltas.top_ids[at + i].tolist()[: k + 1]
                == [*range(token, token + k), -1][: deltas.top.shape[1]]
            )
            assert deltas.top[at + i, :k].tolist() == [score - np.float32(j) for j in range(k)]
        self.scored += len(tokens)
        self.kept_back += len(tokens) - 1

    def _take_news(self, news: PromptNews) -> None:
        asked = self.asked[news.request]
        assert not asked.told, "a prompt's news came twice"
        asked.told = True
        assert 0 <= news.cached_tokens < len(asked.prompt) and news.cached_tokens % 16 == 0
        width = asked.request.sampling.prompt_logprobs
        if width is None:
            assert news.chosen is None
            return
        assert (
            news.chosen is not None
            and news.top_ids is not None
            and news.rank is not None
            and news.top is not None
        )
        want = [logprob_of(p, asked.prompt[p]) for p in range(1, len(asked.prompt))]
        assert news.chosen.tolist() == np.array(want, np.float32).tolist()
        assert news.top_ids.shape == news.top.shape == (len(want), width)
        assert news.rank.tolist() == [p % 7 + 1 for p in range(1, len(asked.prompt))]

    def _check_over(self) -> None:
        scheduler = self.scheduler
        for asked in self.asked.values():
            assert asked.ended == set(asked.alone), "a sample was lost"
        assert not scheduler.live and scheduler.in_flight == 0
        assert scheduler.rows.free_count == scheduler.rows.count, "a row was kept"
        assert (scheduler.rows.state == FREE).all()
        assert scheduler.pool.held == 0, "blocks were kept"
        assert not list(scheduler.groups) and not scheduler.admission.pending
        assert not scheduler.watch._users, "a watch table was kept"
        assert len(scheduler.mask_slots._free) == self.limits.mask_slots, "a mask slot was kept"
        stats = scheduler.stats()
        assert stats["prefilled_tokens"] == self.device.prefilled
        assert stats["generation_tokens"] >= self.taken
        assert stats["running"] == stats["waiting"] == 0 == scheduler.expected_tokens_left()


HEADERS = [[(7 * i + k) % VOCAB for i in range(100)] for k in range(3)]  # what prompts begin with


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """A header's beginning, often at a block's border, and something of its own."""
    size = rng.randrange(1, rng.choice([longest, min(longest, 40)]))
    shared = rng.choice([0, 16, 32, 48, rng.randrange(100)])
    return (rng.choice(HEADERS)[:shared] + [rng.randrange(VOCAB) for _ in range(size)])[:size]


def random_params(rng: random.Random, rows: int, longest: int) -> SamplingParams:
    """Anything that the scheduler reads."""
    most = rng.choice([None, None, 1, 2, rng.randrange(1, 40)])
    stops = rng.choice([None, None, None, [5], rng.sample(range(VOCAB), rng.choice([2, 8, 9, 12]))])
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 5, rows + 1, 2 * rows + 3]),
        temperature=rng.choice([0.0, 1.0]),
        top_p=rng.choice([1.0, 1.0, 0.5]),
        presence_penalty=rng.choice([0.0, 0.0, 1.0]),
        logit_bias=rng.choice([None, None, {1: 2.0, 4: -1.0}]),
        allowed_token_ids=rng.choice(
            [None, None, list(range(50)), list(range(120, 40, -1)), [*range(60), 5]]
        ),
        max_tokens=most,
        min_tokens=rng.choice([0, 0, rng.randrange(0, 1 + min(most or longest, 20))]),
        stop_token_ids=stops,
        ignore_eos=rng.random() < 0.2,
        seed=rng.randrange(1000),
        logprobs=rng.choice([None, None, 0, 1, 2, 3]),
        prompt_logprobs=rng.choice([None, None, None, 0, 2]),
    )


def submit_random(drive: Drive, rng: random.Random) -> int:
    longest, rows = drive.limits.max_model_len, drive.limits.max_rows
    params = random_params(rng, rows, longest)
    samples = (
        rng.sample(range(params.n), rng.randrange(1, params.n + 1)) if rng.random() < 0.2 else None
    )
    watched = set(rng.sample(range(VOCAB), 6)) if rng.random() < 0.3 else None
    prompt = random_prompt(rng, longest)
    stream, background = rng.random() < 0.3, rng.random() < 0.3
    tenant, salt, constrained = (
        rng.choice([0, 0, 1, 2]),
        rng.choice([0, 0, 0, 7]),
        rng.random() < 0.3,
    )
    return drive.submit(
        prompt,
        params,
        stream=stream,
        watched=watched,
        samples=samples,
        background=background,
        tenant=tenant,
        salt=salt,
        constrained=constrained,
    )

"""ReplicaSet: one client of several engines. It has AsyncClient's methods. Each request goes to the
replica expected to finish it first (schedule/replica_router.py); samples of one prompt go to
several if that pays.

    submit -> router -> a part for each replica that takes samples -> deltas -> ReplicaStream ->
    reader

If a replica dies, its part of a request runs again on another replica, once, provided that no delta
of the part's unfinished samples was sent. The seed was drawn here, so the tokens are the same.
Learns of engines' starts and ends from messages (replica_words.py), and starts none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.children.carried_error import CarriedError
from penstock.engine.async_client import AsyncClient, ReplicaState, SharedEngine
from penstock.engine.build_engine import EngineFacts
from penstock.engine.channel import ClientEnd
from penstock.engine.control import Control
from penstock.engine.group_stop import GroupStop
from penstock.engine.launch import facts_of, load_tokenizer
from penstock.engine.request_stream import Stream
from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.errors import EngineError, NoReplicaError, PenstockError, ReplicaError
from penstock.replicas.replica_stats import ReplicaStats
from penstock.replicas.replica_stream import Replica, ReplicaStream, RequestPart, Seeds
from penstock.replicas.replica_words import (
    Ended,
    Hung,
    Join,
    Joined,
    JoinFailed,
    Leave,
    RestartAll,
    WordDown,
    WordUp,
)
from penstock.request import MAX_SEED, SamplingParams
from penstock.schedule.replica_router import Router

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

TWICE = "the replica at work on it died, and so did the next one: it was not run a third time"
TORN = "the replica at work on it died; the others go on: send it again"
NONE = "no replica is ready; they start again by themselves: send it again in a moment"


class ReplicaSet:
    """Requests of one event loop over `count` engines. `facts` is set once the first engine has
    joined.

    tell: sends messages to the supervisor. number: index of this process among the processes that
    send requests to these engines. seed: source of seeds for requests without one; process 0 draws
    the same seeds as a single engine."""

    def __init__(
        self,
        count: int,
        tell: Callable[[WordUp], None],
        *,
        number: int = 0,
        seed: int = 0,
        tokenizer: bool = True,
        step_timeout: float = STEP_TIMEOUT,
    ) -> None:
        self.facts: EngineFacts
        self.tokenizer: Tokenizer | None = None
        self.router = Router(count, number)
        self._replicas = [Replica(number) for number in range(count)]
        self._tell, self._wants_tokenizer, self._step_timeout = tell, tokenizer, step_timeout
        self._seeds = Seeds(seed, number)
        # number of an engine process (life) -> its engine
        self._engines: dict[int, SharedEngine] = {}
        self._place: dict[int, Replica] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = asyncio.Event()
        self._closing = False
        self._died: AsyncClient | None = None  # client of the last replica that died

    # --- state of the replicas

    async def began(self) -> bool:
        """Waits until one replica is ready; returns True."""
        return await self._began.wait()

    @property
    def count(self) -> int:
        return len(self._replicas)

    @property
    def ready(self) -> int:
        """Returns the number of replicas that take requests."""
        return sum(replica.takes for replica in self._replicas)

    @property
    def alive(self) -> bool:
        """Returns True if at least one replica takes requests."""
        return self.ready > 0

    @property
    def gone(self) -> bool:
        """Returns True if no replica will ever take requests again. Always False for several
        replicas, since each restarts."""
        return self.count == 1 and not self.alive

    @property
    def death(self) -> str | None:
        """Returns the last dead replica's cause of death in one line, or None."""
        return None if self._last is None else self._last.death

    @property
    def _last(self) -> AsyncClient | None:
        return self._replicas[0].client if self.count == 1 else self._died

    @property
    def open_at_death(self) -> frozenset[Stream]:
        """Returns the requests that were open at the last replica that died."""
        parts = frozenset[Stream]() if self._last is None else self._last.open_at_death
        return frozenset(part.whole for part in parts if isinstance(part, RequestPart))

    @property
    def cut_before_death(self) -> bool:
        """Returns True if a request was cancelled shortly before the last death; see
        AsyncClient."""
        return self._last is not None and self._last.cut_before_death

    @property
    def step_age(self) -> float:
        """Seconds since the last step, of the replica where that is longest."""
        return max(
            (r.client.step_age for r in self._replicas if r.client is not None and r.client.alive),
            default=0.0,
        )

    def stats(self) -> dict[str, float]:
        """Returns all replicas' gauges and counters, combined as one engine's."""
        return ReplicaStats.together([replica.stats for replica in self._replicas])

    def each(self) -> list[ReplicaState]:
        """Returns the states of all replicas, in the order of their numbers."""
        return [ReplicaState(r.takes, max(0, r.lives - 1), r.stats.now) for r in self._replicas]

    @property
    def weights_version(self) -> str:
        """The version of the weights. There are several, joined by commas, if a replica restarted
        after the weights were changed."""
        return ",".join(
            sorted(
                {
                    r.client.weights_version
                    for r in self._replicas
                    if r.takes and r.client is not None
                }
            )
        )

    @property
    def asleep(self) -> tuple[str, ...]:
        """Parts asleep on any replica."""
        found = {
            tag
            for r in self._replicas
            if r.takes and r.client is not None
            for tag in r.client.asleep
        }
        return tuple(sorted(found))

    async def control(self, word: Control) -> None:
        """Has every replica that takes requests run a control command (new weights, sleep, ...),
        one after another, so that the others serve meanwhile. Raises the first error; later
        replicas are left unchanged."""
        for client in [replica.client for replica in self._replicas if replica.takes]:
            assert client is not None
            await client.control(word)

    def restart(self) -> None:
        """Restarts all replicas, one at a time, each once it is idle. Raises UsageError for a
        single replica."""
        if self.count == 1:
            assert self._replicas[0].client is not None
            self._replicas[0].client.restart()
        self._tell(RestartAll())

    # --- requests

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stream: bool,
        samples: Sequence[int] | None = None,
        background: bool = False,
        tenant: int = 0,
        salt: int = 0,
        group_stop: GroupStop | None = None,
        answers: bool = False,
        whole: bool = False,
        among: Collection[int] = (),
    ) -> ReplicaStream:
        """Sends a request, like AsyncClient. whole: keep its samples on one replica; among: prefer
        these replicas if one of them takes requests. Raises NoReplicaError if no replica does."""
        if self._closing:
            raise EngineError("the engine is closed")
        if self.count > 1:
            sampling = self._seeds.give(sampling)
        if group_stop is None and sampling.stop_when is not None:
            # one group stop for all parts of the request
            group_stop = GroupStop.of(sampling.stop_when)
        how: dict[str, Any] = {
            "stream": stream,
            "background": background,
            "tenant": tenant,
            "salt": salt,
            "group_stop": group_stop,
            "answers": answers,
        }
        made = ReplicaStream(self._part_over, self._lost, prompt_ids, sampling, **how)
        self._send(made, samples, whole=whole or sampling.prompt_logprobs is not None, among=among)
        return made

    def wanting(self) -> set[int]:
        """Returns the replicas to send more of a job to: within a few seconds they will have free
        rows or almost no waiting requests."""
        rows, longest = self.facts.max_num_seqs // self.count, self.facts.max_model_len
        room = self.router.room(rows, longest)
        return {r.number for r in self._replicas if r.takes and r.samples < room}

    def _send(
        self,
        made: ReplicaStream,
        samples: Sequence[int] | None,
        *,
        whole: bool = False,
        among: Collection[int] = (),
    ) -> None:
        taking = {replica.number for replica in self._replicas if replica.takes}
        if not taking:
            raise (
                EngineError(self.death or "the engine is gone")
                if self.gone
                else NoReplicaError(NONE)
            )
        params, prompt = made.sampling, made.prompt_ids
        wanted = range(params.n) if samples is None else samples
        limit = max(1, min(params.max_tokens or MAX_SEED, self.facts.max_model_len - len(prompt)))
        tokens = self.router.expected_tokens(limit, runs_on=params.ignore_eos)
        salt = made.how["salt"]
        shares = self.router.route(
            prompt, salt, len(wanted), tokens, taking & set(among) or taking, whole=whole
        )
        at = 0
        try:
            for share in shares:
                mine = wanted[at : at + share.samples]
                at += share.samples
                replica = self._replicas[share.replica]
                assert replica.client is not None
                part = replica.client.submit(
                    prompt,
                    params,
                    samples=None if len(mine) == params.n else list(mine),
                    make=partial(RequestPart, made, replica, mine),
                    **made.how,
                )
                made.asked = made.asked or part.asked
                self.router.sent(share, part.asked.request_id)
        except PenstockError as error:
            # the parts already sent would give an incomplete answer: fail the whole request
            made.fail(error)
            raise

    def _part_over(self, part: RequestPart) -> None:
        """Updates the open samples and the router's numbers after a part has ended, with or without
        an error."""
        part.replica.samples -= len(part.samples)
        self.router.ended(part.replica.number, part.asked.request_id)
        self._close_if_idle(part.replica)

    def _lost(self, part: RequestPart, error: PenstockError) -> None:
        """Handles a part that ended in an error; if its replica died, runs its unfinished samples
        again if possible."""
        whole, client = part.whole, part.replica.client
        if not isinstance(error, EngineError) or self._closing or self.count == 1:
            whole.fail(error)
            return
        self._died = client
        whole.deaths += 1
        if whole.deaths > 1 or part.begun - part.asked.over or whole.how["background"]:
            # Fail lines of a batch instead of running them again: the batch reruns them
            # itself, and so finds the line that kills replicas.
            whole.fail(ReplicaError(TWICE if whole.deaths > 1 else TORN))
            return
        first = whole.asked is part.asked
        try:
            if first:
                whole.asked = None  # type: ignore[assignment]
            self._send(whole, [sample for sample in part.samples if sample not in part.asked.over])
            if first:
                whole.asked.count_guesses(*part.asked.guesses)
        except PenstockError as none:
            whole.asked = whole.asked or part.asked
            whole.fail(none)

    # --- engine processes that start and end

    def hear(self, word: WordDown) -> None:
        """Processes a message from the supervisor."""
        if isinstance(word, Join):
            self._place[word.life] = self._replicas[word.replica]
            self._engines[word.life] = engine = SharedEngine(
                partial(self._hung, self._replicas[word.replica], word.life)
            )
            self._begin(
                self._join(self._replicas[word.replica], word.life, ClientEnd(word.address), engine)
            )
        elif isinstance(word, Leave):
            self._place[word.life].leaving = True
            self._close_if_idle(self._place[word.life])
        elif isinstance(word, Ended):
            self._engines.pop(word.life).ended(word.code)
            replica = self._place.pop(word.life)
            replica.stats.ended()
            self.router.went_down(replica.number)

    async def _join(
        self, replica: Replica, life: int, end: ClientEnd, engine: SharedEngine
    ) -> None:
        try:
            facts = await facts_of(end, engine)
            if self._wants_tokenizer and self.tokenizer is None:
                self.tokenizer = load_tokenizer(facts)
        except PenstockError as error:
            end.close()
            self._tell(JoinFailed(life, CarriedError.of(error)))
            return
        except BaseException:
            end.close()
            raise
        if replica.client is not None:
            await replica.client.close()
        if not self._began.is_set():
            self.facts = replace(facts, max_num_seqs=facts.max_num_seqs * self.count)
        replica.client = AsyncClient(
            facts, self.tokenizer, end, engine, self._step_timeout, partial(self._said, replica)
        )
        replica.leaving = False
        replica.lives += 1
        self.router.came_up(replica.number, facts.cached_blocks)
        self._began.set()
        self._tell(Joined(life))

    def _hung(self, replica: Replica, life: int) -> None:
        assert replica.client is not None
        self._tell(Hung(life, replica.client.death or "the engine hung"))

    def _said(self, replica: Replica, stats: dict[str, float], heard: int) -> None:
        replica.stats.now = stats
        self.router.said(replica.number, stats, heard)

    def _close_if_idle(self, replica: Replica) -> None:
        """Closes the client of a replica that is to be left, once it has no request of this set.
        Its engine ends when all clients have closed."""
        if replica.leaving and replica.client is not None and replica.client.idle:
            self._begin(replica.client.close())

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, hurry: asyncio.Event | None = None) -> None:
        """Leaves all engines; open requests get an EngineError. The engines' owner ends them."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(r.client.close() for r in self._replicas if r.client is not None))


EngineClient = AsyncClient | ReplicaSet  # the client a server uses: one engine, or several

"""Runs an LLM's engines in several processes. For data_parallel_size above 1. A thread of the
caller's process talks to them.

    prompts --pulled--> backlog --a replica wants more--> ReplicaSet.submit
        --news--> queue --> the caller's generator

The backlog holds prompts that no replica has yet; news are deltas. A replica takes more prompts
when few of its requests wait for rows. Among the job's last prompts the longest go first, and the
samples of the very last prompts are split over replicas. Knows the client of several engines; no
outputs, no files.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.config import Config
from penstock.engine.group_stop import GroupStop
from penstock.errors import (
    EngineError,
    FaultError,
    NoReplicaError,
    PenstockError,
    ReplicaError,
    TokenizerError,
    UsageError,
)
from penstock.llm.inputs import Prompt
from penstock.replicas.launch_replicas import launch_replicas
from penstock.replicas.replica_set import ReplicaSet
from penstock.replicas.replica_stream import ReplicaStream, Seeds
from penstock.request import Delta
from penstock.schedule.check_request import check_request

if TYPE_CHECKING:
    from penstock.engine.client import PendingRequest

Result = TypeVar("Result")
# Prompts per replica that are pulled ahead, so that the end of the job is recognised in time.
LOOK_AHEAD = 8
TURN = 0.1  # seconds to wait for deltas before after_step is called again
NONE_READY = 120.0  # seconds without a live replica after which the job fails


@dataclass(slots=True)
class _Asked:
    """A prompt with its token ids; its params have a seed. suspect: True if a replica died while
    running it."""

    prompt: Prompt
    ids: list[int]
    suspect: bool = False

    @property
    def samples(self) -> int:
        return self.prompt.params.n if self.prompt.samples is None else len(self.prompt.samples)


@dataclass(slots=True)
class _News:
    """Deltas of one prompt. over: True in the prompt's last message. error: the error that ended
    it, or None."""

    number: int
    deltas: list[Delta]
    over: bool = False
    error: PenstockError | None = None


class _Job:
    """One call of generate, chat or stream. `submit_some` and its callees run in the engines'
    thread."""

    def __init__(self, replicas: ReplicaSet, seeds: Seeds) -> None:
        self.replicas, self.seeds = replicas, seeds
        self.news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self.backlog: deque[_Asked] = deque()
        self.last = False  # True once all prompts have been pulled
        self.suspects: deque[_Asked] = deque()  # prompts to run again at the end, one at a time
        # open prompts by number; the stream is None until a replica has accepted the prompt
        self.open: dict[int, tuple[ReplicaStream | None, _Asked]] = {}
        self.done: dict[int, set[int]] = {}  # samples that have ended, by number of the open prompt
        self._count = 0
        self._reading: set[asyncio.Task[None]] = set()

    async def submit_some(self) -> None:
        """Moves prompts from the backlog to replicas that want more."""
        facts, router = self.replicas.facts, self.replicas.router
        if self.last:
            length = {
                id(one): one.samples * router.expected_tokens(_limit(one, facts.max_model_len))
                for one in self.backlog
            }
            self.backlog = deque(sorted(self.backlog, key=lambda one: -length[id(one)]))
        while self.backlog and (wanting := self.replicas.wanting()):
            whole = not self.last or len(self.backlog) >= self.replicas.count
            one = self.backlog.popleft()
            params, samples = one.prompt.params, one.prompt.samples
            number, self._count = self._count, self._count + 1
            self.open[number] = None, one
            try:
                stream = self.replicas.submit(
                    one.ids,
                    params,
                    stream=False,
                    samples=samples,
                    whole=whole,
                    among=wanting,
                    group_stop=one.prompt.group_stop,
                    answers=one.prompt.answers,
                )
            except PenstockError as error:
                self.news.put(_News(number, [], over=True, error=error))
                continue
            self.open[number] = stream, one
            self._reading.add(task := asyncio.ensure_future(self._read(number, stream)))
            task.add_done_callback(self._reading.discard)

    async def _read(self, number: int, stream: ReplicaStream) -> None:
        try:
            async for deltas in stream:
                self.news.put(_News(number, deltas))
            self.news.put(_News(number, [], over=True))
        except PenstockError as error:
            self.news.put(_News(number, [], over=True, error=error))

    async def cancel(self) -> None:
        """Cancels the running requests on all replicas."""
        for task in list(self._reading):
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)


def _limit(one: _Asked, longest: int) -> int:
    room = longest - len(one.ids)
    return max(1, min(one.prompt.params.max_tokens or room, room))


class ReplicaEngines:
    """Starts the engines of `config` from a thread of this process. They end with the thread."""

    def __init__(self, config: Config) -> None:
        self._seeds = Seeds(config.model.seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="penstock-replicas", daemon=True
        )
        self._thread.start()
        try:
            self.replicas = self._run(launch_replicas(config))
        except BaseException:
            self._stop()
            raise

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` in the engines' thread and returns its result. Cancels it if the caller's
        wait is interrupted (Ctrl-C)."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stats(self) -> dict[str, float]:
        """Returns gauges and counters of all replicas as one engine's."""
        return self.replicas.stats()

    def close(self) -> None:
        """Ends the engines and the thread. Idempotent."""
        if self._thread.is_alive():
            try:
                self._run(self.replicas.close())
            finally:
                self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(_cancel_all())
        self._loop.close()

    def deltas(
        self,
        prompts: Iterable[Prompt],
        ids_of: Callable[[Prompt], tuple[list[int], Prompt]],
        after_step: Callable[[], object] | None = None,
    ) -> Generator[tuple[Delta, PendingRequest | None, Prompt]]:
        """Yields deltas with their request and prompt, as LLM's own engine would. A prompt that
        cannot run is yielded without a request."""
        source, job = iter(prompts), _Job(self.replicas, self._seeds)
        heard = time.monotonic()
        try:
            while True:
                yield from self._pull(source, ids_of, job)
                if job.last and job.suspects and not job.backlog and not job.open:
                    job.backlog.append(job.suspects.popleft())
                if job.backlog:
                    self._run(job.submit_some())
                if not job.open and not job.backlog:
                    return
                # Don't wait for deltas while replicas still take every prompt that is pulled.
                news = _next(job.news, TURN if job.last or job.backlog else 0.0)
                heard = time.monotonic() if news or self.replicas.alive else heard
                if time.monotonic() - heard > NONE_READY:
                    raise EngineError(
                        f"no replica was ready for {NONE_READY:g} s: their last words are above"
                    )
                for each in news:
                    yield from _take(job, each)
                if after_step is not None:
                    after_step()
        finally:
            if self._thread.is_alive():
                self._run(job.cancel())

    def _pull(
        self,
        source: Iterator[Prompt],
        ids_of: Callable[[Prompt], tuple[list[int], Prompt]],
        job: _Job,
    ) -> Iterator[tuple[Delta, None, Prompt]]:
        """Pulls prompts into the backlog. Yields the error of each prompt that can never run."""
        facts = self.replicas.facts
        while not job.last and len(job.backlog) < LOOK_AHEAD * self.replicas.count:
            prompt = next(source, None)
            if prompt is None:
                job.last = True
                return
            try:
                ids, prompt = ids_of(prompt)
                span = (min(ids), max(ids)) if ids else None
                check_request(len(ids), span, prompt.params, facts.max_model_len, facts.vocab_size)
                # the stop condition lives in this process, so its counts survive a replica's death
                if prompt.params.stop_when is not None:
                    prompt = replace(
                        prompt,
                        group_stop=prompt.group_stop or GroupStop.of(prompt.params.stop_when),
                    )
            except (UsageError, TokenizerError, FaultError) as error:  # errors of this prompt alone
                yield _refused(error), None, prompt
                continue
            job.backlog.append(_Asked(replace(prompt, params=job.seeds.give(prompt.params)), ids))


def _take(job: _Job, news: _News) -> Iterator[tuple[Delta, PendingRequest | None, Prompt]]:
    stream, one = job.open[news.number]
    done = job.done.setdefault(news.number, set())
    for delta in news.deltas:
        assert stream is not None
        if delta.finish_reason is not None:
            done.add(delta.index)
        yield delta, stream.asked, one.prompt
    if not news.over:
        return
    del job.open[news.number], job.done[news.number]
    if news.error is None:
        return
    wanted = range(one.prompt.params.n) if one.prompt.samples is None else one.prompt.samples
    # run again only the samples that have not ended
    left = replace(one.prompt, samples=[sample for sample in wanted if sample not in done])
    if isinstance(news.error, NoReplicaError):
        job.backlog.appendleft(_Asked(left, one.ids, one.suspect))
    elif isinstance(news.error, ReplicaError) and not one.suspect:
        job.suspects.append(_Asked(left, one.ids, suspect=True))
    elif isinstance(news.error, (UsageError, FaultError, ReplicaError)):
        yield _refused(news.error), None, one.prompt
    else:
        raise news.error


def _refused(error: PenstockError) -> Delta:
    return Delta(-1, -1, finish_reason="error", error=str(error))


def _next(news: queue.SimpleQueue[_News], seconds: float) -> list[_News]:
    """Returns all queued news; waits up to `seconds` for the first."""
    found: list[_News] = []
    try:
        found.append(news.get(timeout=seconds))
        while True:
            found.append(news.get_nowait())
    except queue.Empty:
        return found


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

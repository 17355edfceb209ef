"""AsyncClient: asyncio client of an engine in another process.

Knows the channel, Client (which makes text of tokens), and whether the engine's process lives; not
how the process was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from penstock.children.carried_error import CarriedError
from penstock.children.spawn import how_ended
from penstock.engine.build_engine import EngineFacts
from penstock.engine.channel import Ask, Cancel, ClientEnd, Close, GoesOn, StepOutputs
from penstock.engine.client import Client, PendingRequest
from penstock.engine.control import Control, Controlled, Weights
from penstock.engine.group_stop import GroupStop
from penstock.engine.request_stream import CancelRequest, Stream
from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.errors import EngineError, FaultError, PenstockError, UsageError
from penstock.request import FIRST_WEIGHTS, Delta, Request, SamplingParams
from penstock.schedule.deltas import Deltas

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

END_PATIENCE = 10.0  # seconds the engine gets to end after it was asked to close
HURRIED = 1.0  # seconds the engine gets to end when the close is hurried
# number of checks for a hanging engine within one step timeout; they are at least a second apart
LOOKS = 10
# after this many stats messages since a cancel the engine has certainly dropped the request
CUT_KNOWN = 3
PART = 65_536  # tokens of a message processed in one turn of the event loop; about 10 ms


class ReplicaState(NamedTuple):
    """State of one replica: ready (requests go to it), number of restarts, and its last stats."""

    ready: bool
    restarts: int
    stats: dict[str, float]


class EngineProcess(Protocol):
    """Interface of the engine's process: an asyncio subprocess if this process is its parent, else
    a SharedEngine."""

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


class SharedEngine:
    """Process of an engine that a parent process started for several clients. The engine ends when
    its last client closes.

    ask_kill: called to ask the parent to kill the process."""

    def __init__(self, ask_kill: Callable[[], None]) -> None:
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self.kill = ask_kill

    def ended(self, code: int) -> None:
        """Records the process's exit code; called by the parent."""
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class AsyncClient:
    """Client of an engine process for one event loop. Made by launch.launch(), or by launch.join()
    for an engine that other clients share.

    Attributes that count once the engine is dead: open_at_death: the streams that were open then;
    cut_before_death: True if a request or sample was cancelled so shortly before that the engine
    may still have been running it."""

    def __init__(
        self,
        facts: EngineFacts,
        tokenizer: Tokenizer | None,
        end: ClientEnd,
        process: EngineProcess,
        step_timeout: float = STEP_TIMEOUT,
        on_stats: Callable[[dict[str, float], int], None] | None = None,
    ) -> None:
        """on_stats: called with each stats message and the number of this client's requests it
        covers."""
        self.facts, self.tokenizer, self.step_timeout = facts, tokenizer, step_timeout
        self._end, self._process = end, process
        # time of the last completed step, or of the first request after the engine was idle
        self._progress = time.monotonic()
        self._client = Client(facts, tokenizer, self._send, self._fault)
        self.weights_version, self.asleep = FIRST_WEIGHTS, tuple[str, ...]()
        # True while the engine runs a control command (new weights, sleep, ...)
        self._changing = False
        self._streams: dict[int, Stream] = {}
        self._controls: dict[int, asyncio.Future[None]] = {}
        self._control_numbers = itertools.count()
        self._stats: dict[str, float] = {}
        self._on_stats = on_stats
        self._closing = False
        self._dead: PenstockError | None = None
        self._since_cut = CUT_KNOWN  # stats messages received since the last cancellation
        self.open_at_death: frozenset[Stream] = frozenset()
        self.cut_before_death = False
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())
        self._looker = asyncio.create_task(self._look())

    @property
    def alive(self) -> bool:
        """Returns True while the engine's process runs and has reported no failure."""
        return self._dead is None and self._process.returncode is None

    @property
    def gone(self) -> bool:
        """Returns True once the engine is dead; it never becomes alive again."""
        return not self.alive

    @property
    def death(self) -> str | None:
        """Returns the engine's cause of death in one line, or None while it lives or if it was
        closed."""
        return None if self._dead is None or self._closing else str(self._dead)

    @property
    def idle(self) -> bool:
        """Returns True while no request is open."""
        return not self._streams

    @property
    def step_age(self) -> float:
        """Seconds since the last sign of progress: a completed step, a GoesOn message, or the first
        request after idle. 0 while the engine is idle, asleep, or runs a control command."""
        works = self._streams and not self.asleep and not self._changing
        return time.monotonic() - self._progress if works else 0.0

    def stats(self) -> dict[str, float]:
        """Returns the engine's latest gauges and counters, by name."""
        return dict(self._stats)

    def each(self) -> list[ReplicaState]:
        """Returns the states of all replicas: here only this engine's."""
        return [ReplicaState(self.alive, 0, self._stats)]

    def restart(self) -> None:
        """Raises UsageError: no other replica could serve meanwhile."""
        rule = (
            "one engine cannot restart beside another: start the server again, or give it"
            " --data-parallel-size"
        )
        raise UsageError(rule)

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
        make: Callable[[PendingRequest, CancelRequest], Stream] = Stream,
    ) -> Stream:
        """Sends a request. samples, background, tenant, salt: see request.Request; group_stop,
        answers: see Client.submit. make: builds the stream. Raises UsageError if the request can
        never be served, EngineError if the engine is gone."""
        if self._dead is not None or self._closing:
            raise self._dead or EngineError("the engine is closed")
        asked = self._client.submit(
            prompt_ids,
            sampling,
            stream=stream,
            samples=samples,
            background=background,
            tenant=tenant,
            salt=salt,
            group_stop=group_stop,
            answers=answers,
        )
        if not self._streams:
            self._progress = time.monotonic()
        self._streams[asked.request_id] = made = make(asked, self._cancel)
        return made

    async def control(self, word: Control) -> None:
        """Has the engine run a control command (control.py), such as loading new weights, and waits
        for it. Raises the command's error, or EngineError if the engine is gone."""
        if self._dead is not None or self._closing:
            raise self._dead or EngineError("the engine is closed")
        number = next(self._control_numbers)
        self._controls[number] = done = asyncio.get_running_loop().create_future()
        self._end.send_down(msgspec.structs.replace(word, number=number))
        try:
            await done
        finally:
            self._controls.pop(number, None)

    async def close(self, hurry: asyncio.Event | None = None) -> None:
        """Ends the engine's process, unless other clients share it; open requests get an
        EngineError. hurry: once set, the engine gets only HURRIED seconds to end."""
        if self._closing:
            return
        self._closing = True
        # a failed engine has no work to finish
        patience = END_PATIENCE if self._dead is None else HURRIED
        self._fail(EngineError("the engine was closed"))
        if self._process.returncode is None:
            self._end.send_down(Close())
            if not isinstance(self._process, SharedEngine):
                await self._end_process(patience, hurry or asyncio.Event())
        for task in (self._reader, self._watcher, self._looker):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._end.close(flush=self._process.returncode is None)

    async def _end_process(self, patience: float, hurry: asyncio.Event) -> None:
        ended, hurried = (
            asyncio.ensure_future(self._process.wait()),
            asyncio.ensure_future(hurry.wait()),
        )
        try:
            await asyncio.wait(
                (ended, hurried), timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            if hurried.done():
                await asyncio.wait((ended,), timeout=HURRIED)
        finally:
            hurried.cancel()
        if not ended.done():
            self._process.kill()
        await ended

    def _send(self, word: Request | tuple[int, int | None]) -> None:
        if isinstance(word, Request):
            self._end.send_down(Ask(word))
        else:
            self._since_cut = 0
            self._end.send_down(Cancel(*word))

    def _cancel(self, asked: PendingRequest, *, told: bool = False) -> None:
        """Ends a request. told: True: its samples first send their tokens so far, as their final
        deltas."""
        if told:
            if not self._closing and self._dead is None:
                self._client.end_rest(asked.request_id)
            return
        self._streams.pop(asked.request_id, None)
        if not self._closing and self._dead is None:
            self._client.cancel(asked)

    def _fault(self, request_id: int, error: Exception) -> None:
        """Ends one request, alone, because processing its deltas raised an error."""
        logging.getLogger(__name__).error(
            "a request was ended: its news could not be made into text", exc_info=error
        )
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.end(FaultError("the server failed at this request; its log says how"))

    async def _read(self) -> None:
        """Processes messages from the engine as they arrive."""
        try:
            while True:
                word = await self._end.receive()
                if isinstance(word, CarriedError):
                    self._fail(word.error())
                    return
                if isinstance(word, StepOutputs):
                    await self._news(word)
                elif isinstance(word, GoesOn):
                    self._progress = time.monotonic()
                elif isinstance(word, Weights):
                    self.weights_version, self.asleep, self._changing = (
                        word.version,
                        word.asleep,
                        word.changing,
                    )
                    self._progress = time.monotonic()
                elif (
                    isinstance(word, Controlled)
                    and (done := self._controls.get(word.number)) is not None
                ):
                    if word.refused is None:
                        done.set_result(None)
                    else:
                        done.set_exception(word.refused.error())
        except EngineError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001
            # every waiting request and control command raises it; they would wait for ever
            # otherwise
            failure = EngineError(
                f"the client cannot read the engine's news: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._fail(failure)

    async def _news(self, word: StepOutputs) -> None:
        if word.stats is not None:
            completed = word.stats["completed_steps"]
            if completed != self._stats.get("completed_steps"):
                self._progress = time.monotonic()
            self._stats = word.stats
            self._since_cut += 1
            if self._on_stats is not None:
                self._on_stats(word.stats, word.heard)
        if word.deltas is not None:
            self._progress = time.monotonic()
        for refused in word.refused:
            stream = self._streams.pop(refused.request_id, None)
            if stream is not None:
                stream.end(refused.error.error())
            self._client.refused(refused.request_id)
        if word.deltas is None:
            return
        for place, part in enumerate(word.deltas.in_parts(PART)):
            if place:
                # give other tasks a turn between parts: processing a large message takes long
                await asyncio.sleep(0)
            self._deltas(part)

    def _deltas(self, news: Deltas) -> None:
        by_request: dict[int, list[Delta]] = {}
        for delta in self._client.process(news):
            if self.weights_version != FIRST_WEIGHTS:
                delta.weights_version = self.weights_version
            by_request.setdefault(delta.request_id, []).append(delta)
        for request_id, deltas in by_request.items():
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            stream.push(deltas)
            if not stream.asked.remaining:
                self._streams.pop(request_id, None)  # the reader may have left after the push
                stream.end()

    async def _watch(self) -> None:
        """Waits for the process's end, then fails all open requests."""
        code = await self._process.wait()
        if not self._closing:
            await asyncio.sleep(0.2)  # the process's last message may still be on the way
            hung = self.step_age > self.step_timeout
            self._fail(
                self._hung() if hung else EngineError(f"the engine's process {how_ended(code)}")
            )

    async def _look(self) -> None:
        """Kills an engine that completes no step while it has work, if its own watchdog
        (watchdog.py) does not end it.

        Such an engine is stopped, or stuck where no signal reaches it. It gets one second more than
        its own watchdog gives it."""
        pause = min(1.0, self.step_timeout / LOOKS)
        late = 0
        while self._dead is None:
            await asyncio.sleep(pause)
            # Three late checks in a row are needed: if this loop itself was held up, waiting
            # messages are read before the third.
            late = late + 1 if self.step_age > self.step_timeout + 1.0 else 0
            if late == 3:
                self._fail(self._hung())
                if self._process.returncode is None:
                    self._process.kill()

    def _hung(self) -> EngineError:
        late = (
            f"the engine completed no step for {self.step_timeout:g} s though it had work, and was"
            " ended"
        )
        return EngineError(f"{late} (where steps take that long, raise --step-timeout)")

    def _fail(self, error: PenstockError) -> None:
        if self._dead is None:
            self._dead = error
            self.open_at_death = frozenset(self._streams.values())
            self.cut_before_death = self._since_cut < CUT_KNOWN
        for done in self._controls.values():
            if not done.done():
                done.set_exception(self._dead)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(self._dead)

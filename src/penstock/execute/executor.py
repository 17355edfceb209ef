"""Executor: where launched steps run, in order, and flights: steps that are not read yet.

It knows work and results; nothing of what a step is. On the CPU the executor is one thread; on CUDA
it is a stream, and what comes back lies in pinned memory behind an event.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from penstock.errors import EngineError, PenstockError
from penstock.execute.prompt_scorer import Logprobs
from penstock.schedule.step import Flight, StepTokens, TokenLogprobs


@dataclass(slots=True)
class Outcome:
    """What a step leaves on the device."""

    tokens: Tensor  # [S] int32
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None

    def to_host(self, *, pinned: bool) -> Outcome:
        """The same in host memory; where pinned, only once the stream has come so far."""
        return Outcome(
            _to_host(self.tokens, pinned),
            _logprobs_to_host(self.logprobs, pinned),
            _logprobs_to_host(self.prompt_logprobs, pinned),
        )

    def read(self) -> StepTokens:
        """Reads an outcome in host memory."""
        return StepTokens(self.tokens.numpy(), _read(self.logprobs), _read(self.prompt_logprobs))


Made = TypeVar("Made")
Work = Callable[[], Outcome]
LOOK = 1.0  # seconds between two looks of who waits for a step
TRIM = 60.0  # seconds between two returns of memory that nothing lives in
# glibc's; other C libraries have none. It keeps what steps of many sizes took and gave back: of 795
# MB of an engine under mixed load for 8 minutes, 206.
_malloc_trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)


class Executor(Protocol):
    """Runs work in the order of its launch."""

    def call(self, work: Callable[[], Made]) -> Made:
        """Runs work that is no step, waits for it,
        and gives what it made or raises what it raised."""

    def launch(self, work: Work) -> Flight: ...

    def watch(self, look: Callable[[], None]) -> None:
        """Has `look` called each LOOK seconds by whoever waits for a step, in the waiting thread.
        On CUDA it isn't: no step there takes long."""

    def close(self) -> None: ...


def open_executor(device: torch.device) -> Executor:
    """A stream on CUDA, a thread on the CPU."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor()


class ThreadExecutor:
    """The CPU's executor. After an error every later step fails with it: the rows' state is not to
    be trusted any more.

    The model is loaded in this thread too. OpenMP keeps a team of workers for each thread that ever
    used it, and once there are more of them than processors it stops waiting actively: with a
    second team in the loading thread a decode step of 1,024 rows took 1.5 times as long (attention
    72 ms against 45).
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "penstock-device")
        self._error: BaseException | None = None
        self._closed = False
        self._look: Callable[[], None] = lambda: None
        self._trimmed = time.monotonic()

    def call(self, work: Callable[[], Made]) -> Made:
        return self._thread.submit(_inferred, work).result()

    def launch(self, work: Work) -> Flight:
        if self._closed:
            raise EngineError("the device is closed: make a new engine")
        if self._error is not None:
            raise _told(self._error)
        return _ThreadFlight(self._thread.submit(self._one, work), lambda: self._look())

    def watch(self, look: Callable[[], None]) -> None:
        self._look = look

    def close(self) -> None:
        """Ends the thread; steps that wait are not run, their flights fail."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)

    def _one(self, work: Work) -> Outcome:
        if self._error is None:
            try:
                outcome = _inferred(work).to_host(pinned=False)
            except BaseException as error:  # noqa: BLE001  whoever fetches or launches raises it
                self._error = error
            else:
                self._trim()
                return outcome
        raise self._error

    def _trim(self) -> None:
        """Gives memory that nothing lives in back to the system, now and then."""
        now = time.monotonic()
        if now - self._trimmed >= TRIM:
            self._trimmed = now
            _malloc_trim(0)


def _inferred(work: Callable[[], Made]) -> Made:
    with torch.inference_mode():
        return work()


class _ThreadFlight:
    __slots__ = ("_look", "_outcome")

    def __init__(self, outcome: Future[Outcome], look: Callable[[], None]) -> None:
        self._outcome, self._look = outcome, look

    def ready(self) -> bool:
        return self._outcome.done()

    def fetch(self) -> StepTokens:
        while True:
            try:
                error = self._outcome.exception(LOOK)
                break
            except TimeoutError:
                self._look()
            except CancelledError:
                raise EngineError("the device was closed before this step ran") from None
        if error is not None:
            raise _told(error)
        return self._outcome.result().read()


class StreamExecutor:
    """CUDA's executor: launches go out at once from the caller's thread, on a stream of its own.
    Once one has failed, later ones fail with it: half a step may have gone out."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._error: Exception | None = None
        self._closed = False

    def call(self, work: Callable[[], Made]) -> Made:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            made = work()
        self._stream.synchronize()
        return made

    def launch(self, work: Work) -> Flight:
        if self._closed:
            raise EngineError("the device is closed: make a new engine")
        if self._error is not None:
            raise _told(self._error)
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                outcome = work()
                host = outcome.to_host(pinned=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
        except Exception as error:
            self._error = error
            raise _told(error) from error
        return _StreamFlight(host, event)

    def watch(self, look: Callable[[], None]) -> None:
        """Does nothing: see Executor."""

    def close(self) -> None:
        self._closed = True
        self._stream.synchronize()


class _StreamFlight:
    __slots__ = ("_event", "_outcome")

    def __init__(self, outcome: Outcome, event: torch.cuda.Event) -> None:
        self._outcome = outcome
        self._event = event

    def ready(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def fetch(self) -> StepTokens:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise _told(error) from error
        return self._outcome.read()


def _told(error: BaseException) -> PenstockError:
    """A new exception for each that raises it, since a traceback is one thread's."""
    if isinstance(error, EngineError):
        told: PenstockError = EngineError(str(error))
    else:
        told = EngineError(f"the device failed: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _to_host(x: Tensor, pinned: bool) -> Tensor:
    if not pinned:
        return x.clone()  # the next step writes to the same place
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def _logprobs_to_host(found: Logprobs | None, pinned: bool) -> Logprobs | None:
    if found is None:
        return None
    chosen, rank, ids, top = (
        _to_host(x, pinned) for x in (found.chosen, found.rank, found.top_ids, found.top)
    )
    return Logprobs(found.where, found.k, chosen, rank, ids, top, found.place)


def _read(found: Logprobs | None) -> TokenLogprobs | None:
    """Each token is told of its own k: past it, ids are -1 and values -inf, as wide as the largest
    k."""
    if found is None:
        return None
    lines = (found.chosen.numpy(), found.rank.numpy(), found.top_ids.numpy(), found.top.numpy())
    chosen, rank, ids, top = (
        line.copy() if found.place is None else line[found.place] for line in lines
    )
    width = int(found.k.max(initial=0))
    ids, top = ids[:, :width], top[:, :width]
    for k in set(found.k.tolist()):
        rows = found.k == k
        ids[rows, k:] = -1
        top[rows, k:] = float("-inf")
    return TokenLogprobs(found.where.astype("int32"), chosen, rank, ids, top)

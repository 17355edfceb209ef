"""Executor: runs launched steps in order. A flight is a step that is launched and not read yet.

Knows functions to run and their results; not the content of a step. On the CPU the executor is one
thread; on CUDA it is a stream, and results are copied to pinned memory, followed by an event.
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
    """Results of a step on the device."""

    tokens: Tensor  # token drawn after each of the step's queries, int32 [queries]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None

    def to_host(self, *, pinned: bool) -> Outcome:
        """Returns a copy in host memory. If pinned, the copy is made asynchronously: it is complete
        once the stream has reached it."""
        return Outcome(
            _to_host(self.tokens, pinned),
            _logprobs_to_host(self.logprobs, pinned),
            _logprobs_to_host(self.prompt_logprobs, pinned),
        )

    def read(self) -> StepTokens:
        """Converts this outcome, once it is in host memory, to numpy arrays."""
        return StepTokens(self.tokens.numpy(), _read(self.logprobs), _read(self.prompt_logprobs))


Made = TypeVar("Made")
Work = Callable[[], Outcome]
LOOK = 1.0  # seconds between two calls of `look` while waiting for a step
TRIM = 60.0  # seconds between two calls of malloc_trim
# glibc only. glibc keeps memory freed by steps of many sizes: 206 of the 795 MB of an engine under
# mixed load for 8 minutes.
_malloc_trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)


class Executor(Protocol):
    """Runs functions on a device in launch order."""

    def call(self, work: Callable[[], Made]) -> Made:
        """Runs a function that is no step and waits for it; returns its result or raises its
        error."""

    def launch(self, work: Work) -> Flight: ...

    def watch(self, look: Callable[[], None]) -> None:
        """Has `look` called every LOOK seconds by a thread that waits for a step. Not on CUDA: no
        step there takes long."""

    def close(self) -> None: ...


def open_executor(device: torch.device) -> Executor:
    """Returns a stream on CUDA, a thread on the CPU."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor()


class ThreadExecutor:
    """The CPU's executor. After an error every later step fails with the same error, because the
    rows' state may be inconsistent.

    The model is loaded in this thread too. OpenMP keeps a team of threads for each thread that has
    used it. With more threads than processors, idle ones sleep instead of polling, which is slow.
    With a second team, of a loading thread, a decode step of 1,024 rows took 1.5 times as long (its
    attention 72 ms instead of 45 ms).
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
        """Ends the thread; waiting steps do not run, and their flights fail."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)

    def _one(self, work: Work) -> Outcome:
        if self._error is None:
            try:
                outcome = _inferred(work).to_host(pinned=False)
            except BaseException as error:  # noqa: BLE001 later calls of fetch and launch raise it
                self._error = error
            else:
                self._trim()
                return outcome
        raise self._error

    def _trim(self) -> None:
        """Returns unused memory to the system, if TRIM seconds have passed since the last time."""
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
    """CUDA's executor: launches work at once from the caller's thread, on a stream of its own.
    After a failed launch later ones fail with its error: half a step may have been launched."""

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
        """Does nothing on CUDA: see Executor."""

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
    """Returns a new exception with the error's message. Each raise needs its own, since a traceback
    belongs to one thread."""
    if isinstance(error, EngineError):
        told: PenstockError = EngineError(str(error))
    else:
        told = EngineError(f"the device failed: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _to_host(x: Tensor, pinned: bool) -> Tensor:
    if not pinned:
        return x.clone()  # copy: the next step overwrites this tensor
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
    """Converts logprobs to numpy. k is the largest number of most likely tokens wanted; where a
    token wants fewer, further ids are -1 and values -inf."""
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

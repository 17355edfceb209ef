"""A run of one shape: point by point, into its folder, with a fresh server where a point failed,
three times at most.

A stopped run goes on from its folder. A server that somebody else started ends the run where it is
gone. It knows the parts of the bench; no engine but by its peer file.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from penstock.almanac.intervals import effective, ranks, share_interval
from penstock.almanac.record import PointFailure
from penstock.almanac.samples import OK, Samples
from penstock.almanac.throughput import issued
from penstock.bench.endpoint import Endpoint, target_of
from penstock.bench.point_planner import (
    CLOSED,
    OPEN,
    SINGLE,
    PointPlan,
    PointResult,
    failed,
    next_plan,
)
from penstock.bench.request_schedule import load_of, one_load, warm_load
from penstock.bench.response_reader import OWN_LIMIT
from penstock.bench.run_folder import FailedPoint, MeasuredPoint, RunFolder
from penstock.bench.run_load import ClientReport, run_load
from penstock.bench.run_spec import RunSpec, ServerSpec
from penstock.bench.server_process import HOST, ServerProcess, free_port, tail_of
from penstock.bench.text_prompts import TextPrompts
from penstock.bench.worker_pool import LoadProgress, WorkerPool
from penstock.bench.worker_protocol import Load, PlannedRequest
from penstock.bench.workload import Draw, RequestStyle, Workload, prompts
from penstock.bench.write_record import plain, without_folders
from penstock.errors import EngineError, UsageError

MOST_FAILURES = 3  # of points; then the shape is given up
MESSAGE = 1000  # characters of a failure's
LOST = ("cut", "refused")
DYING = 3.0  # seconds from broken connections to the end of a process that dies
UNFINISHED = "unfinished"  # the point's end cut it off: overload, not a fault
_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|cannot allocate|bad_alloc", re.I)
_REFUSED = re.compile(r"status 4\d\d")
# what engines say of one too short
_CONTEXT = re.compile(r"context[ _](size|length|window|is)|the context \d|max_model_len", re.I)

Kind = Literal[
    "out of memory",
    "crashed",
    "did not start",
    "stalled",
    "wrong output",
    "refused",
    "context too short",
]
Tell = Callable[[PointPlan, Load, LoadProgress | None], None]  # None: the point begins


class _Watch:
    """Hears the progress of a point: tells it on, and ends the point when the server owes answers
    and has long been silent. silence: what to say of that; empty: it was not."""

    def __init__(self, patience: float, tell: Callable[[LoadProgress], None]) -> None:
        self._patience, self._tell = patience, tell
        self._heard, self._since = (0, 0), 0.0
        self.silence = ""

    def __call__(self, now: LoadProgress) -> bool:
        self._tell(now)
        heard = (now.events, now.ended)
        if heard != self._heard or not now.in_flight:
            self._heard, self._since = heard, now.seconds
        elif now.seconds - self._since > self._patience:
            self.silence = (
                f"nothing came for {self._patience:g} s; {now.ended} of {now.sent} requests were"
                " answered before"
            )
        return bool(self.silence)


class ShapeRun:
    """One shape of a run, and its folder."""

    def __init__(self, run: RunSpec, work: Workload, folder: RunFolder, tell: Tell) -> None:
        self._run, self._work, self._folder, self._tell = run, work, folder, tell
        self._settings = run.settings.of_samples(work.n)
        self._texts: TextPrompts | None = None
        self._tried = False  # a point, by this process
        self._since = time.monotonic()  # what the next point's time is counted from
        self.gone = ""  # somebody else's server: in a line that says how to go on

    def measure(self) -> None:
        """Measures what the folder lacks. Raises UsageError for what cannot be asked; what the
        server does wrong is a failure of the run, and is kept."""
        peer = self._run.subject.peer
        if self._work.n > 1 and peer is not None and not peer.samples:
            self._fail(
                None,
                "refused",
                f"{peer.name} serves one sample a request, {self._work.n} were to be asked",
                "",
            )
        while (plan := self._next()) is not None:
            log = self._folder.new_log()
            with ExitStack() as stack, WorkerPool() as self._pool:
                try:
                    target, server = stack.enter_context(_serving(self._run.subject, log))
                except EngineError as error:
                    self._fail(None, "did not start", str(error), tail_of(log))
                    return
                self._on_one(plan.start, target, server)

    def _next(self) -> PointPlan | None:
        lost = self._folder.state.failures
        if self.gone or len(lost) >= MOST_FAILURES or any(one.result is None for one in lost):
            return None
        return next_plan(self._settings, self._folder.state.found)

    def _on_one(self, start: int, target: Endpoint, server: ServerProcess | None) -> None:
        """Points of a start, on one process of the server, until it has failed."""
        if not self._takes_one(target, server):
            return
        warm = warm_load(self._settings, self._asked(target, f"warm-up.{start}"))
        self._settle(self._load(target, warm, "warm-up", start)[0], target)
        while (plan := self._next()) is not None and plan.start == start:
            self._tried = True
            if not self._point(plan, target, server):
                return  # what failed may have left the server in any state

    def _takes_one(self, target: Endpoint, server: ServerProcess | None) -> bool:
        """Returns whether a single request of this shape is answered as asked; if not, no point of
        it can be measured."""
        samples, seen = self._one(target, "one")
        alone = PointPlan(SINGLE, SINGLE, 0, self._settings.longest)
        if (wrong := self._wrong(alone, samples, seen, target, server)) is None:
            return True
        if self.gone and not self._tried:
            raise EngineError(f"nothing serves at {target.url}: {_said(seen)}")
        self._fail(None, wrong[0], f"a single request: {wrong[1]}", server.tail() if server else "")
        return False

    def _point(self, plan: PointPlan, target: Endpoint, server: ServerProcess | None) -> bool:
        """Measures a point; False when it failed."""
        load = load_of(plan, self._settings.stall, self._asked(target, plan.key), self._run.seed)
        self._tell(plan, load, None)
        watch = _Watch(self._settings.stall, lambda now: self._tell(plan, load, now))
        samples, seen = self._load(target, load, plan.name, plan.start, watch)
        if (wrong := self._wrong(plan, samples, seen, target, server, watch.silence)) is not None:
            return self._fail(plan, *wrong, server.tail() if server else "", samples)
        ceiling = self._run.ceiling
        look = seen.look(ceiling.events, ceiling.requests) if ceiling else seen.look(None, None)
        self._folder.add(
            MeasuredPoint(result_of(plan, samples, self._settings.goals, self._took()), look),
            samples,
        )
        self._settle(samples, target)
        return True

    def _wrong(
        self,
        plan: PointPlan,
        samples: Samples,
        seen: ClientReport,
        target: Endpoint,
        server: ServerProcess | None,
        silence: str = "",
    ) -> tuple[Kind, str] | None:
        """Returns why a point is none, in a word and in a line; None: it is one."""
        if silence:
            return "stalled", silence
        message = _said(seen)
        if _lost(samples) and self._has_ended(target, server):
            memory = server is not None and _MEMORY.search(server.tail())
            return ("out of memory" if memory else "crashed"), f"the server ended. {message}"
        if (fault := fault_of(plan, samples)) is None:
            return None
        nothing = (
            f"no request ended within {plan.window:g} s: give more --longest or fewer --at-once"
            if samples.window.any()
            else f"no request was due in its window of {plan.window:g} s: give a longer --window"
        )
        return kind_of(fault, message), message or nothing

    def _has_ended(self, target: Endpoint, server: ServerProcess | None) -> bool:
        if server is not None:
            return server.ended(DYING)
        if _lost(self._one(target, "there")[0]):
            what = "no longer answers: this point goes into no figure"
            self.gone = (
                f"the server at {target.url} {what}; start it again, and the same command goes on"
            )
        return bool(self.gone)

    def _settle(self, before: Samples, target: Endpoint) -> None:
        """Waits, where requests were cut off by a point's end, until one gets through what they
        left behind: not every server drops the requests of clients that are gone. One that cannot
        is told by the next point."""
        if (before.outcome == UNFINISHED).any():
            self._one(target, "settle")

    def _one(self, target: Endpoint, salt: str) -> tuple[Samples, ClientReport]:
        """Sends a single request, which goes into no figure."""
        return self._load(target, one_load(self._settings, self._asked(target, salt)), "one", 0)

    def _load(
        self,
        target: Endpoint,
        load: Load,
        point: str,
        start: int,
        hear: Callable[[LoadProgress], bool] | None = None,
    ) -> tuple[Samples, ClientReport]:
        return run_load(
            target,
            load,
            point=point,
            start=start,
            processes=self._run.processes,
            progress=hear,
            pool=self._pool,
        )

    def _asked(self, target: Endpoint, salt: str) -> Iterator[PlannedRequest]:
        """Yields requests of the shape. No two runs, points or goes of a point have a prompt in
        common."""
        subject = self._run.subject
        peer = subject.peer
        more, without = (
            (tuple(peer.more.items()), tuple(peer.without)) if peer is not None else ((), ())
        )
        speech = RequestStyle(target.model, subject.vocabulary, subject.ids, more, without)
        state = self._folder.state
        unlike = f"{state.run}.{state.opened}.{salt}.{len(state.failures)}"
        return prompts(self._work, speech, self._run.seed, unlike, self._made)

    def _made(self, length: int, draw: Draw) -> Iterator[str]:
        if self._texts is None:
            if self._run.subject.tokenizer is None:
                raise UsageError(
                    "prompts are texts here: name the model's tokenizer.json", param="tokenizer"
                )
            self._texts = TextPrompts(self._run.subject.tokenizer)
        return self._texts.of(length, draw)

    def _fail(
        self,
        plan: PointPlan | None,
        kind: Kind,
        message: str,
        log: str,
        samples: Samples | None = None,
    ) -> Literal[False]:
        """Keeps what went wrong, and the samples of a point."""
        said = without_folders(plain(" ".join(message.split())))
        said = said if len(said) <= MESSAGE else f"{said[: MESSAGE - 4].rsplit(maxsplit=1)[0]} ..."
        point = plan.name if plan is not None else None
        failure = PointFailure(
            point=point, kind=kind, message=said, log=without_folders(plain(log))
        )
        result = failed(plan, self._settings.goals, self._took()) if plan is not None else None
        self._folder.add_failure(FailedPoint(failure, result), samples)
        return False

    def _took(self) -> float:
        """Returns seconds since the last point, or since this process took up the shape."""
        since, self._since = self._since, time.monotonic()
        return self._since - since


def result_of(
    plan: PointPlan, samples: Samples, goals: Sequence[float], took: float
) -> PointResult:
    """Returns, for the planner, rates and shares of the window's requests; one that failed met no
    goal. The shares' upper ends are by as many independent requests as these are worth."""
    inside = samples.of(samples.window)
    ok = inside.outcome == OK
    waited = np.where(ok, inside.first - issued(inside), np.inf)
    met = {goal: float(np.mean(waited <= goal)) for goal in goals}
    worth = effective([ranks(waited)])
    _, ends = share_interval(np.array(list(met.values())) * worth, worth)
    # What a rate is over: the window, or from the first send to the last end.
    steady = plan.kind in (OPEN, CLOSED)
    seconds = plan.window if steady else float(np.nanmax(inside.end) - np.nanmin(inside.actual))
    rate = float(ok.sum()) / seconds if seconds > 0 else 0.0
    loaded = float(np.nan_to_num(inside.end[ok] - inside.first[ok]).mean()) if ok.any() else 0.0
    return PointResult(
        plan, rate, met, dict(zip(met, ends.tolist(), strict=True)), took=took, loaded=loaded
    )


# --- what went wrong


def _said(seen: ClientReport) -> str:
    """Returns the first message of each outcome; of one alone without its word, which is the
    failure's own."""
    told = {word: text for word, text in seen.troubles.items() if word != UNFINISHED}
    return "; ".join(f"{word}: {text}" if len(told) > 1 else text for word, text in told.items())


def fault_of(plan: PointPlan, samples: Samples) -> str | None:
    """Returns the outcome for which a point is no point; None when it is one. Overload is no fault:
    a queue that is never served within the window is what a point above the highest rate looks
    like. A window without a request is one."""
    inside = samples.of(samples.window)
    if not len(inside):
        return UNFINISHED
    if (inside.outcome == OK).any():
        return None
    faults = inside.outcome[inside.outcome != UNFINISHED].astype(str)
    if plan.kind not in (OPEN, CLOSED) and not len(faults):
        return UNFINISHED
    if 2 * len(faults) <= len(inside):
        return None
    words, counts = np.unique(faults, return_counts=True)
    return str(words[np.argmax(counts)])


def _lost(samples: Samples) -> bool:
    """Returns whether connections broke or were refused, as they are where a server ends."""
    return bool(np.isin(samples.outcome.astype(str), LOST).any())


def kind_of(outcome: str, message: str) -> Kind:
    """Returns a failure's word, of the commonest outcome and what the server said."""
    if outcome in ("stalled", UNFINISHED):
        return "stalled"
    if (outcome == "length" and OWN_LIMIT in message) or (
        outcome == "status" and _CONTEXT.search(message)
    ):
        return "context too short"
    if outcome == "status" and _MEMORY.search(message):
        return "out of memory"
    if outcome == "refused" or (outcome == "status" and _REFUSED.search(message)):
        return "refused"
    return "wrong output"


# --- servers


@contextmanager
def _serving(subject: ServerSpec, log: Path) -> Iterator[tuple[Endpoint, ServerProcess | None]]:
    """Returns the server that answers: ours to start and end, or one that is there already."""
    peer = subject.peer
    if peer is None:
        yield target_of(subject.url or "", model=subject.model, api_key=subject.api_key), None
        return
    port = free_port()
    served = peer.served_as(subject.model)
    words = peer.words(subject.python, subject.model, HOST, port) + list(subject.options)
    environment = {**peer.environment, **subject.environment}
    with ServerProcess(
        words, port, log, environment, peer.ready, peer.signal, subject.cores
    ) as server:
        yield Endpoint(HOST, port, peer.path, served), server

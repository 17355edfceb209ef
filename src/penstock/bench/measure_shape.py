"""Measures workload shapes. A shape gives the lengths of prompts and answers. It is measured
point by point (a point is one load level) into a folder, with a fresh server after a failed load
level; after three failures the shape is given up.

A stopped run continues from its folder. The run ends when a server that somebody else started is
gone. Knows the parts of the bench; engines only by their peer files.
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
from penstock.bench.board_sampler import BoardSampler
from penstock.bench.draft_counters import accepted, read_counters
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

MOST_FAILURES = 3  # failed load levels after which the workload shape is given up
NAMELESS = "one without a name (no GPU's id, no /etc/machine-id)"
MESSAGE = 1000  # most characters of a failure's message
LOST = ("cut", "refused")
DYING = 3.0  # seconds that a dying process may take to exit after its connections broke
UNFINISHED = "unfinished"  # cut off by the load level's end: overload, not a fault
_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|cannot allocate|bad_alloc", re.I)
_REFUSED = re.compile(r"status 4\d\d")
# matches engines' error messages about a too short context
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
# called with a load level's progress; None as progress: the load level begins
Tell = Callable[[PointPlan, Load, LoadProgress | None], None]


class _Watch:
    """Forwards a load level's progress, and ends the load level when requests are in flight and
    nothing has arrived for `patience` seconds. silence: the error message in that case, else empty.
    """

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
    """The measurement of one workload shape, and its folder. board: reads the GPUs' power; None:
    nothing does."""

    def __init__(
        self,
        run: RunSpec,
        work: Workload,
        folder: RunFolder,
        tell: Tell,
        board: BoardSampler | None = None,
    ) -> None:
        self._run, self._work, self.folder, self._tell = run, work, folder, tell
        self._board = board
        self._settings = run.settings.of_samples(work.n)
        self._texts: TextPrompts | None = None
        self._tried = False  # True once this process has tried a load level
        # time at which the last load level ended, or this process began
        self._since = time.monotonic()
        self.gone = ""  # if somebody else's server is gone: a line that says how to continue

    def check(self) -> None:
        """Stores a failure if the engine cannot answer requests of this workload shape. Raises
        UsageError where another machine measured a part of the next server start, and where the
        record could not tell this machine from another one."""
        state, plan, here = self.folder.state, self.next(), self._run.machine.identity
        # server start -> its machine's name; None: it had none
        known = {**dict.fromkeys(one.result.plan.start for one in state.points), **state.machines}
        names = {here, *known.values()}
        if plan is not None and (
            known.get(plan.start, here) != here or (None in names and len(names) > 1)
        ):
            start = plan.start if plan.start in known else min(known)
            there, this = (name or NAMELESS for name in (known[start], here))
            raise UsageError(
                f"start {start} in {self.folder.path} was begun on {there}, and this machine is"
                f" {this}: go on there, or remove {self.folder.path}: this shape is then measured"
                " anew, the others go on",
                param="out",
            )
        peer = self._run.subject.peer
        if self._work.n > 1 and peer is not None and not peer.samples:
            self.fail(
                None,
                "refused",
                f"{peer.name} serves one sample a request, {self._work.n} were to be asked",
                "",
            )

    def next(self) -> PointPlan | None:
        lost = self.folder.state.failures
        if self.gone or len(lost) >= MOST_FAILURES or any(one.result is None for one in lost):
            return None
        return next_plan(self._settings, self.folder.state.found)

    def on_one(
        self, start: int, target: Endpoint, server: ServerProcess | None, pool: WorkerPool
    ) -> bool:
        """Measures the load levels of server start number `start` on one server process. Returns
        False when a load level failed, which may leave the server in any state, or a single request
        ended the server."""
        self._pool = pool
        if self._settings.edition:
            self._took()  # the server's start and other shapes don't count for the budget
        if not self._takes_one(target, server):
            return server is None or not server.ended(0)
        warm = warm_load(self._settings, self._asked(target, f"warm-up.{start}"))
        self._settle(self._load(target, warm, "warm-up", start)[0], target)
        while (plan := self.next()) is not None and plan.start == start:
            self._tried = True
            if not self._point(plan, target, server):
                return False
        return True

    def _takes_one(self, target: Endpoint, server: ServerProcess | None) -> bool:
        """Returns True if a single request of this workload shape is answered correctly; if not, no
        load level of the shape can be measured."""
        samples, seen = self._one(target, "one")
        alone = PointPlan(SINGLE, SINGLE, 0, self._settings.longest)
        if (wrong := self._wrong(alone, samples, seen, target, server)) is None:
            return True
        if self.gone and not self._tried:
            raise EngineError(f"nothing serves at {target.url}: {_said(seen)}")
        self.fail(None, wrong[0], f"a single request: {wrong[1]}", server.tail() if server else "")
        return False

    def _point(self, plan: PointPlan, target: Endpoint, server: ServerProcess | None) -> bool:
        """Measures a load level; returns False when it failed."""
        load = load_of(plan, self._settings.stall, self._asked(target, plan.key), self._run.seed)
        self._tell(plan, load, None)
        watch = _Watch(self._settings.stall, lambda now: self._tell(plan, load, now))
        names = self._run.subject.peer.drafts if self._run.subject.peer else []
        before = read_counters(server, names)
        samples, seen = self._load(target, load, plan.name, plan.start, watch)
        if (wrong := self._wrong(plan, samples, seen, target, server, watch.silence)) is not None:
            return self.fail(plan, *wrong, server.tail() if server else "", samples)
        ceiling = self._run.ceiling
        look = seen.look(ceiling.events, ceiling.requests) if ceiling else seen.look(None, None)
        if self._run.machine.identity is not None:
            self.folder.on_machine(plan.start, self._run.machine.identity)
        self.folder.add(
            MeasuredPoint(
                result_of(plan, samples, self._settings.goals, self._took()),
                look,
                accepted(before, read_counters(server, names)),
            ),
            samples,
            self._board.since(seen.begin, plan.name, plan.start) if self._board else (),
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
        """Returns (kind, message) of a load level's failure; None for a valid load level."""
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
        """Waits until the server answers a single request again. Used when a load level's end has
        cut off requests: some servers go on computing the answers of clients that are gone. A
        failure here raises nothing; the next load level will report it."""
        if (before.outcome == UNFINISHED).any():
            self._one(target, "settle")

    def _one(self, target: Endpoint, salt: str) -> tuple[Samples, ClientReport]:
        """Sends a single request, which counts for no figure."""
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
        """Yields requests of the workload shape. salt: gives other prompts; no two runs, load
        levels or attempts at a load level share one."""
        subject = self._run.subject
        peer = subject.peer
        more, without = (
            (tuple(peer.more.items()), tuple(peer.without)) if peer is not None else ((), ())
        )
        speech = RequestStyle(target.model, subject.vocabulary, subject.ids, more, without)
        state = self.folder.state
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

    def fail(
        self,
        plan: PointPlan | None,
        kind: Kind,
        message: str,
        log: str,
        samples: Samples | None = None,
    ) -> Literal[False]:
        """Stores a failure, with the samples of its load level. Returns False."""
        said = without_folders(plain(" ".join(message.split())))
        said = said if len(said) <= MESSAGE else f"{said[: MESSAGE - 4].rsplit(maxsplit=1)[0]} ..."
        point = plan.name if plan is not None else None
        failure = PointFailure(
            point=point, kind=kind, message=said, log=without_folders(plain(log))
        )
        result = failed(plan, self._settings.goals, self._took()) if plan is not None else None
        self.folder.add_failure(FailedPoint(failure, result), samples)
        return False

    def _took(self) -> float:
        """Returns the seconds since the last load level ended, or since this process began this
        workload shape."""
        since, self._since = self._since, time.monotonic()
        return self._since - since


def measure_together(run: RunSpec, shapes: Sequence[ShapeRun]) -> None:
    """Measures the load levels that the shapes' folders lack. Those of one server start are
    measured on one server, shape after shape; after a failed load level, on a fresh one. Raises
    UsageError for a run that cannot be measured; faults of the server are stored as failures."""
    for shape in shapes:
        shape.check()
    while plans := {shape: plan for shape in shapes if (plan := shape.next()) is not None}:
        start = min(plan.start for plan in plans.values())
        now = [shape for shape, plan in plans.items() if plan.start == start]
        log = now[0].folder.new_log()
        with ExitStack() as stack, WorkerPool() as pool:
            try:
                target, server = stack.enter_context(serving(run.subject, log))
            except EngineError as error:
                for shape in now:
                    shape.fail(None, "did not start", str(error), tail_of(log))
                return
            for shape in now:
                if not shape.on_one(start, target, server, pool):
                    break


def result_of(
    plan: PointPlan, samples: Samples, goals: Sequence[float], took: float
) -> PointResult:
    """Returns a load level's rates, and the share of requests that met each latency goal, for the
    planner; a failed request met none. The shares' 95 % intervals are for the effective number of
    independent requests."""
    inside = samples.of(samples.window)
    ok = inside.outcome == OK
    waited = np.where(ok, inside.first - issued(inside), np.inf)
    met = {goal: float(np.mean(waited <= goal)) for goal in goals}
    worth = effective([ranks(waited)])
    _, ends = share_interval(np.array(list(met.values())) * worth, worth)
    # A steady rate is over the window, other rates from the first send to the last end.
    steady = plan.kind in (OPEN, CLOSED)
    seconds = plan.window if steady else float(np.nanmax(inside.end) - np.nanmin(inside.actual))
    rate = float(ok.sum()) / seconds if seconds > 0 else 0.0
    loaded = float(np.nan_to_num(inside.end[ok] - inside.first[ok]).mean()) if ok.any() else 0.0
    return PointResult(
        plan, rate, met, dict(zip(met, ends.tolist(), strict=True)), took=took, loaded=loaded
    )


# --- causes of failed load levels


def _said(seen: ClientReport) -> str:
    """Returns the clients' first error message of each outcome. With a single outcome its name is
    left out, because the failure already names it."""
    told = {word: text for word, text in seen.troubles.items() if word != UNFINISHED}
    return "; ".join(f"{word}: {text}" if len(told) > 1 else text for word, text in told.items())


def fault_of(plan: PointPlan, samples: Samples) -> str | None:
    """Returns the outcome that makes a load level invalid; None for a valid load level. Overload is
    no fault: above the highest rate the queue is never served within the window. A window without a
    request is a fault.
    """
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
    """Returns True if connections broke or were refused, as happens when a server ends."""
    return bool(np.isin(samples.outcome.astype(str), LOST).any())


def kind_of(outcome: str, message: str) -> Kind:
    """Returns the kind of a failure, from its commonest outcome and the server's message."""
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


# --- starting the server under test


@contextmanager
def serving(subject: ServerSpec, log: Path) -> Iterator[tuple[Endpoint, ServerProcess | None]]:
    """Yields the server under test: one that is started and ended here,
    or one that runs already."""
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

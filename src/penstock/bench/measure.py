"""A run: one shape of one model on one server, point by point, into its folder; then the record.

    plan ─▶ load ─▶ samples ─▶ folder          until the plan is empty; a stopped run goes on from its folder
                                 └─▶ record    from the folder alone

A server that dies ends its start and is a failure of the record; the points that are done stay. It knows the parts of
the bench; no engine but by its peer file.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.almanac.record import Failure
from penstock.bench.arrivals import load_of, warm_load
from penstock.bench.load import Progress, run_load
from penstock.bench.method import SINGLE, Plan, Settings, next_plan
from penstock.bench.peers import Peer
from penstock.bench.run_folder import Measured, RunFolder
from penstock.bench.serving import HOST, LOG_TAIL, Server, free_port
from penstock.bench.target import Target, target_of
from penstock.bench.texts import texts, tokenizer_of
from penstock.bench.workload import Prompted, Speech, Workload, prompts
from penstock.errors import PenstockError, UsageError

LINE = 2000  # characters of a failure's message
_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|cannot allocate|bad_alloc", re.I)


@dataclass(frozen=True)
class Subject:
    """What is measured: a peer that we start, or a URL that is there (peer None). model: folder, hub id or name."""

    model: str
    peer: Peer | None = None
    url: str | None = None
    python: str = sys.executable
    options: tuple[str, ...] = ()
    api_key: str | None = None
    tokenizer: Path | None = None
    vocabulary: int = 0
    ids: bool = True
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ceiling:
    """What the clients reach against a server that does nothing; None: not calibrated."""

    events: float | None = None
    requests: float | None = None


Tell = Callable[[Plan, Progress | None], None]


def measure(
    subject: Subject, work: Workload, settings: Settings, folder: RunFolder, *, seed: int, processes: int,
    ceiling: Ceiling, tell: Tell,
) -> None:  # fmt: skip
    """Measures what the folder lacks. Raises UsageError for what cannot be asked; what the server does wrong is kept as
    a failure of the run."""
    lost = {failure.message for failure in folder.failures()}
    while (plan := _next(settings, folder)) is not None and not lost:
        start = plan.start
        try:
            with _serving(subject, folder, start) as (target, server):
                _warm(subject, work, settings, target, seed, start)
                while plan is not None and _starts(plan, server, folder) and not lost:
                    tell(plan, None)
                    lost |= _point(
                        subject, work, settings, folder, plan, target, server, seed, processes, ceiling, tell
                    )
                    plan = _next(settings, folder)
        except UsageError:
            raise
        except PenstockError as error:
            log = folder.log(start)
            tail = log.read_text(errors="replace")[-LOG_TAIL:] if log.exists() else ""
            lost.add(_fail(folder, None, "did not start", str(error), tail))


def _next(settings: Settings, folder: RunFolder) -> Plan | None:
    return next_plan(settings, [one.found(settings.goals) for one in folder.measured()])


def _starts(plan: Plan, server: Server | None, folder: RunFolder) -> bool:
    """Whether the plan belongs to the server that runs: another start means another server."""
    return server is None or server.log == folder.log(plan.start)


def _point(
    subject: Subject, work: Workload, settings: Settings, folder: RunFolder, plan: Plan, target: Target,
    server: Server | None, seed: int, processes: int, ceiling: Ceiling, tell: Tell,
) -> set[str]:  # fmt: skip
    """Measures one point; what failed altogether, if anything."""
    asked = _asked(subject, work, target.model, seed, plan.key)
    load = load_of(plan, settings, _alone(folder), asked, seed)
    samples, seen = run_load(
        target, load, point=plan.name, start=plan.start, processes=processes, progress=lambda now: tell(plan, now)
    )
    inside = samples.of(samples.window)
    complete = inside.of(inside.outcome == "ok")
    tail = server.tail() if server is not None else ""
    trouble = next(iter(seen.troubles.items()), ("", ""))
    if server is not None and not server.alive:
        kind = "out of memory" if _MEMORY.search(tail) else "crashed"
        return {_fail(folder, plan.name, kind, f"the server ended: {trouble[1]}", tail)}
    if set(inside.outcome) - {"ok", "unfinished"} and not len(complete):
        kind = {"refused": "refused", "stalled": "stalled"}.get(trouble[0], "wrong output")
        return {_fail(folder, plan.name, kind, f"no request of {len(inside)} was complete: {trouble[1]}", tail)}
    window = load.window[1] - load.window[0]
    whole = float(np.nanmax(inside.end) - np.nanmin(inside.actual))
    seconds = window if plan.kind in ("open", "closed") else whole
    folder.add(Measured(plan, samples, seen.look(ceiling.events, ceiling.requests), seconds))
    return set()


def _alone(folder: RunFolder) -> float | None:
    """Seconds of a request that is by itself, once that is measured."""
    single = [one.samples.of(one.samples.outcome == "ok") for one in folder.measured() if one.plan.kind == SINGLE]
    return float((single[0].end - single[0].actual).mean()) if single and len(single[0]) else None


def _warm(subject: Subject, work: Workload, settings: Settings, target: Target, seed: int, start: int) -> None:
    asked = _asked(subject, work, target.model, seed, f"warm-up.{start}")
    run_load(target, warm_load(settings.warm_up, asked), point="warm-up", start=start, processes=1)


def _asked(subject: Subject, work: Workload, served: str, seed: int, salt: str) -> Iterator[Prompted]:
    more = tuple(subject.peer.more.items()) if subject.peer is not None else ()
    speech = Speech(served, subject.vocabulary, subject.ids, more)
    made = None
    if not subject.ids and not work.rows:
        if subject.tokenizer is None:
            raise UsageError("this server takes no token ids: name the model's tokenizer", param="tokenizer")
        made = texts(tokenizer_of(subject.tokenizer), work.input, seed, salt)
    return prompts(work, speech, seed, salt, made)


def _serving(subject: Subject, folder: RunFolder, start: int) -> AbstractContextManager[tuple[Target, Server | None]]:
    """The server that answers: ours to start and end, or one that is there already."""
    if subject.peer is None:
        target = target_of(subject.url or "", model=subject.model, api_key=subject.api_key)
        return nullcontext((target, None))
    return _Started(subject, subject.peer, folder, start)


class _Started(AbstractContextManager[tuple[Target, Server | None]]):
    def __init__(self, subject: Subject, peer: Peer, folder: RunFolder, start: int) -> None:
        port = free_port()
        served = peer.served_as(subject.model)
        words = peer.words(subject.python, subject.model, HOST, port) + list(subject.options)
        environment = {**peer.environment, **subject.environment}
        self._server = Server(words, port, served, folder.log(start), environment, peer.ready, peer.signal)
        self._target = Target(HOST, port, peer.path, served)

    def __enter__(self) -> tuple[Target, Server]:
        self._server.__enter__()
        return self._target, self._server

    def __exit__(self, *ended: Any) -> None:
        self._server.__exit__(*ended)


def _fail(folder: RunFolder, point: str | None, kind: Any, message: str, log: str) -> str:
    line = " ".join(message.split())[:LINE]
    plain = "".join(c for c in line if c.isprintable())
    folder.add_failure(Failure(point=point, kind=kind, message=plain, log=log))
    return plain


def run_name(asked: dict[str, Any]) -> str:
    """A run's name: of what was asked and when."""
    return hashlib.sha256(f"{asked}{time.time_ns()}".encode()).hexdigest()[:12]


def asked_of(subject: Subject, work: Workload, settings: Settings, seed: int) -> dict[str, Any]:
    """What run.json keeps, and holds a later start of the same folder to."""
    return {
        "model": subject.model,
        "engine": subject.peer.name if subject.peer is not None else subject.url,
        "options": list(subject.options),
        "shape": work.name,
        "settings": {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()
        },
        "seed": seed,
    }

"""Deaths under load: a part of the service is broken, and what becomes of waiters and processes is timed.

`break_under_load` breaks one part once; `loop` does it many times over. It knows a service and its waiters.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fake_runner import Orders
from service import COMPLETIONS, Serving, alive, make_folder, wait_until

FAULTS = ("exit", "kill", "raise", "raise_late", "memory")  # of the engine, by orders: it ends at once
HANGS = ("hang", "hang_with_lock", "stop")  # the engine lives and completes no step
TOLD_WITHIN = 2.0  # seconds after detection: the issue's
EXIT_WITHIN = 5.0


class Waiters:
    """Requests that would run for very long, half of them streamed; each is over when its connection says something
    final. `ends`: (how, seconds of the monotonic clock)."""

    def __init__(self, url: str, count: int) -> None:
        self.ends: list[tuple[str, float]] = []
        self.begun = 0  # streams that have had a token
        self._url, self._count = url, count
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    async def _all(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(self._count)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        stream = number % 2 == 0
        body = {"prompt": [1 + number % 250] * 20, "max_tokens": 400, "stream": stream, "seed": 1}
        how = "nothing"
        try:
            async with client.stream("POST", self._url + COMPLETIONS, json=body) as answer:
                text = ""
                async for piece in answer.aiter_text():
                    self.begun += stream and not text
                    text = (text + piece)[-4000:]
                how = _kind(answer.status_code, text, stream)
        except httpx.HTTPError:
            how = "torn"  # the connection ended: what the other end's kernel says of a process that was killed
        self.ends.append((how, time.monotonic()))


def _kind(status: int, text: str, stream: bool) -> str:
    if '"error"' in text:
        return "error"
    whole = text.rstrip().endswith("data: [DONE]") if stream else status == 200
    return "answered" if whole else f"{status}: {text[-200:]}"


@dataclass
class Outcome:
    """What came of one break. Seconds count from the break, or, of a hang, from when it could be known."""

    what: str
    told: float  # until the last waiter had its end
    ended: float  # until the service's own process had ended
    code: int
    left: int  # of its processes that were alive then, after at most EXIT_WITHIN more
    said: str
    kinds: dict[str, int] = field(default_factory=dict)

    def faults(self, slack: float = 1.0) -> list[str]:
        """What is not as it has to be; `slack` stretches the times, for a machine that has others to serve."""
        wrong = [f"{self.what}: {count} waiters ended {kind}" for kind, count in self._bad().items()]
        if self.what == "worker":  # the other servers' requests get their time
            return wrong + ([f"worker: {self.left} processes left behind"] if self.left or not self.code else [])
        if self.told > TOLD_WITHIN * slack:
            wrong.append(f"{self.what}: the last waiter heard after {self.told:.1f} s")
        if self.ended > EXIT_WITHIN * slack or self.code == 0:
            wrong.append(f"{self.what}: the process ended after {self.ended:.1f} s with code {self.code}")
        return wrong + ([f"{self.what}: {self.left} processes left behind"] if self.left else [])

    def _bad(self) -> dict[str, int]:
        right = {"server": {"torn"}, "parent": {"torn"}, "worker": {"torn", "answered", "error"}}
        return {kind: n for kind, n in self.kinds.items() if kind not in right.get(self.what, {"error"})}


def break_under_load(
    folder: Path, what: str, *, servers: int = 1, waiters: int = 24, step_timeout: float = 120.0
) -> Outcome:
    """Breaks `what` (of FAULTS or HANGS, or kill -9 of engine, server, parent, worker); waits for the end."""
    with Serving(folder, servers=servers, limits={"step_timeout": step_timeout}) as serving:
        load = Waiters(serving.url, waiters)
        assert wait_until(lambda: load.begun == (waiters + 1) // 2, 60) is not None, "the load never ran"
        children = serving.children
        broken = time.monotonic()
        _break(serving, what)
        # A hang can be known once a step is overdue: what counts is from there on.
        known = broken + (step_timeout if what in HANGS else 0.0)
        load.join(step_timeout + 60)
        code, said = serving.ended()
        ended = time.monotonic()
        wait_until(lambda: not any(map(alive, children)), EXIT_WITHIN)
        left = [pid for pid in children if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        kinds: dict[str, int] = {}
        for kind, _ in load.ends:
            kinds[kind] = kinds.get(kind, 0) + 1
        kinds["nothing"] = waiters - len(load.ends)
        told = max((at for _, at in load.ends), default=ended) - known
        found = {kind: count for kind, count in kinds.items() if count}
        return Outcome(what, told, ended - known, code, len(left), said + serving.stderr(), found)


def _break(serving: Serving, what: str) -> None:
    if what in ("server", "parent"):
        os.kill(serving.process.pid, signal.SIGKILL)
    elif what == "worker":
        os.kill(serving.workers[0], signal.SIGKILL)
    elif what == "stop":
        os.kill(serving.engine, signal.SIGSTOP)
    elif what == "engine":
        os.kill(serving.engine, signal.SIGKILL)
    else:
        serving.order(fault=what, step_seconds=0.02)


def drain(folder: Path, *, servers: int = 1, second: bool = False) -> Outcome:
    """SIGTERM under load: running requests end in their time; with a second signal they are told, at once. None ends
    by itself before: 400 tokens take 20 s, until the first signal has been heard."""
    make_folder(folder, Orders(step_seconds=0.05), rows=64, num_blocks=4096, longest=512)
    with Serving(folder, servers=servers) as serving:
        load, children = Waiters(serving.url, 24), serving.children

        def all_run() -> bool:
            return load.begun == 12 and serving.metrics()["penstock:num_requests_running"] == 24

        assert wait_until(all_run, 60) is not None, "the load never ran"
        serving.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: "a second signal" in serving.stderr(), 60) is not None, "the signal was not heard"
        if second:
            serving.process.send_signal(signal.SIGINT)
        else:
            serving.order(step_seconds=0.005)
        sent = time.monotonic()
        load.join(60)
        code, said = serving.ended()
        ended = time.monotonic() - sent
        wait_until(lambda: not any(map(alive, children)), EXIT_WITHIN)
        kinds: dict[str, int] = {}
        for kind, _ in load.ends:
            kinds[kind] = kinds.get(kind, 0) + 1
        told = max(at for _, at in load.ends) - sent
        what = "SIGTERM, twice" if second else "SIGTERM"
        return Outcome(what, told, ended, code, sum(map(alive, children)), said + serving.stderr(), kinds)


def drain_faults(outcome: Outcome, slack: float = 1.0) -> list[str]:
    """A drain is no death: code 0, everything answered, or told where the second signal came."""
    want = {"error": 24} if outcome.what.endswith("twice") else {"answered": 24}
    wrong = [] if outcome.kinds == want else [f"{outcome.what}: waiters ended {outcome.kinds}"]
    if outcome.code or outcome.left:
        wrong.append(f"{outcome.what}: code {outcome.code}, {outcome.left} processes left")
    late = "error" in want and (outcome.told > TOLD_WITHIN * slack or outcome.ended > EXIT_WITHIN * slack)
    return wrong + ([f"{outcome.what}: ended after {outcome.ended:.1f} s"] if late else [])


def loop(folder: Path, what: str, times: int, **how: Any) -> list[Outcome]:
    """So many services, one after the other, each broken under load. 400 tokens take 8 s: none ends by itself."""
    make_folder(folder, Orders(step_seconds=0.02), rows=64, num_blocks=4096, longest=512)
    return [break_under_load(folder, what, **how) for _ in range(times)]


def summary(outcomes: Sequence[Outcome]) -> str:
    told, ended = max(o.told for o in outcomes), max(o.ended for o in outcomes)
    return f"{len(outcomes)} times: waiters told within {told:.2f} s, process ended within {ended:.2f} s"

"""Deaths under load: a part of the service is broken, and what becomes of waiters and processes is
timed.

`break_under_load` breaks one part once; `loop` does it many times over. It knows a service and its
waiters.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fake_runner import Orders
from service import COMPLETIONS, HANG, Serving, alive, make_folder, until, wait_until

# of the engine, by orders: it ends at once
FAULTS = (
    "exit",
    "kill",
    "raise",
    "raise_late",
    "memory",
)
HANGS = ("hang", "hang_with_lock", "stop")  # the engine lives and completes no step
# Of several ranks, whose rank 0 is the engine's process.
RANKS = {"rank": signal.SIGKILL, "rank stopped": signal.SIGSTOP}
OF_RANKS = {
    "model": "demo",
    "knobs": {"tensor_parallel_size": 2, "device": "cpu", "kv_cache_tokens": 16_384},
}
SHM = Path("/dev/shm")
TOLD_WITHIN = 2.0  # seconds after detection: the issue's
EXIT_WITHIN = 5.0
WAITERS = 24


class Waiters:
    """Requests that would run for very long, half of them streamed; each is over when its
    connection says something final. `ends`: (how, seconds of the monotonic clock)."""

    def __init__(self, url: str, count: int = WAITERS) -> None:
        self.ends: list[tuple[str, float]] = []
        self.begun = 0  # streams that have had a token
        self.count = count
        self._url = url
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    async def _all(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(self.count)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        stream = number % 2 == 0
        body = {
            "prompt": [1 + number % 250] * 20,
            "max_tokens": 400,
            "stream": stream,
            "seed": 1,
            "ignore_eos": True,
        }
        try:
            async with client.stream("POST", self._url + COMPLETIONS, json=body) as answer:
                text = ""
                async for piece in answer.aiter_text():
                    self.begun += stream and not text
                    text = (text + piece)[-4000:]
                how = _kind(answer.status_code, text, stream)
        except httpx.HTTPError:
            # the connection ended: what the other end's kernel says of a process that was killed
            how = "torn"
        self.ends.append((how, time.monotonic()))


def _kind(status: int, text: str, stream: bool) -> str:
    if '"error"' in text:
        return "error"
    whole = text.rstrip().endswith("data: [DONE]") if stream else status == 200
    return "answered" if whole else f"{status}: {text[-200:]}"


@dataclass
class Outcome:
    """What came of one break. Seconds count from the break, or, of a hang, from when it could be
    known."""

    what: str
    told: float  # until the last waiter had its end
    ended: float  # until all of the service's processes had ended
    code: int
    left: int  # of its processes, the number that never ended
    said: str
    kinds: dict[str, int] = field(default_factory=dict)
    files: int = 0  # that it left in shared memory

    def faults(self, slack: float = 1.0) -> list[str]:
        """What is not as it has to be; `slack` stretches the times, for a machine that has others
        to serve."""
        if self.what.startswith("SIGTERM"):
            return self._drain_faults(slack)
        right = {"server": {"torn"}, "parent": {"torn"}, "worker": {"torn", "answered", "error"}}
        bad = {
            kind: n for kind, n in self.kinds.items() if kind not in right.get(self.what, {"error"})
        }
        wrong = [f"{self.what}: {count} waiters ended {kind}" for kind, count in bad.items()]
        if self.what == "worker":  # the other servers' requests get their time
            return wrong + (
                [f"worker: {self.left} processes left behind"] if self.left or not self.code else []
            )
        wrong += [f"{self.what}: {self.files} files left in {SHM}"] if self.files else []
        if self.told > TOLD_WITHIN * slack:
            wrong.append(f"{self.what}: the last waiter heard after {self.told:.1f} s")
        if self.ended > EXIT_WITHIN * slack or self.code == 0:
            wrong.append(
                f"{self.what}: the process ended after {self.ended:.1f} s with code {self.code}"
            )
        return wrong + ([f"{self.what}: {self.left} processes left behind"] if self.left else [])

    def _drain_faults(self, slack: float) -> list[str]:
        """A drain is no death: code 0, everything answered,
        or told where the second signal came."""
        want = {"error": WAITERS} if self.what.endswith("twice") else {"answered": WAITERS}
        wrong = [] if self.kinds == want else [f"{self.what}: waiters ended {self.kinds}"]
        if self.code or self.left:
            wrong.append(f"{self.what}: code {self.code}, {self.left} processes left")
        late = "error" in want and (
            self.told > TOLD_WITHIN * slack or self.ended > EXIT_WITHIN * slack
        )
        return wrong + ([f"{self.what}: ended after {self.ended:.1f} s"] if late else [])


def break_under_load(
    folder: Path,
    what: str,
    *,
    servers: int = 1,
    step_timeout: float = 120.0,
    draining: bool = False,
    later: float = 0.0,
    **how: Any,
) -> Outcome:
    """Breaks `what` (of FAULTS, HANGS or RANKS, or kill -9 of engine, server, parent, worker);
    waits for the end. draining: while running requests end, after a first signal.   later: seconds
    that the load has run by then. how: as Serving's."""
    before = set(SHM.iterdir())
    with Serving(folder, servers=servers, limits={"step_timeout": step_timeout}, **how) as serving:
        load = Waiters(serving.url)
        until(lambda: load.begun == WAITERS // 2 or serving.process.poll() is not None)
        assert load.begun == WAITERS // 2, "the load never ran"
        time.sleep(later)
        if draining:
            _signal(serving)
        # A hang can be known once a step is overdue: what counts is from there on.
        known = time.monotonic() + (
            step_timeout if what in HANGS or RANKS.get(what) == signal.SIGSTOP else 0.0
        )
        children = serving.children
        _break(serving, what)
        outcome = _end(serving, load, children, what, known)
    # Others' files come and go beside us; ours have our name, or the number of a process in theirs,
    # as OpenMP's do.
    ours = ["penstock", *map(str, (serving.process.pid, *children))]
    outcome.files = sum(
        any(word in path.name for word in ours) for path in set(SHM.iterdir()) - before
    )
    return outcome


def _break(serving: Serving, what: str) -> None:
    if what in ("server", "parent"):
        os.kill(serving.process.pid, signal.SIGKILL)
    elif what == "worker":
        os.kill(serving.workers[0], signal.SIGKILL)
        serving.order(step_seconds=0.005)
    elif what in RANKS:
        os.kill(serving.ranks[0], RANKS[what])
    elif what in ("stop", "engine"):
        os.kill(serving.engine, signal.SIGSTOP if what == "stop" else signal.SIGKILL)
    else:
        serving.order(fault=what, step_seconds=0.02)


def _end(
    serving: Serving,
    load: Waiters,
    children: Sequence[int],
    what: str,
    known: float,
) -> Outcome:
    load.join(HANG)
    code, said = serving.ended()
    wait_until(lambda: not any(map(alive, children)), HANG)
    ended = time.monotonic()
    left = [pid for pid in children if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    kinds = Counter(kind for kind, _ in load.ends)
    kinds["nothing"] = load.count - len(load.ends)
    told = max((at for _, at in load.ends), default=ended) - known
    return Outcome(
        what, told, ended - known, code, len(left), said + serving.stderr(), dict(+kinds)
    )


def _signal(serving: Serving, number: int = signal.SIGTERM) -> None:
    """A signal, once it was heard. A hangup comes to all its processes, as from a terminal: they
    wait for its word."""
    for pid in serving.children:
        os.kill(pid, signal.SIGHUP)
    serving.process.send_signal(number)
    until(lambda: "a second signal" in serving.stderr())


def drain(
    folder: Path, *, servers: int = 1, second: bool = False, number: int = signal.SIGTERM
) -> Outcome:
    """SIGTERM under load: running requests end in their time; with a second signal they are told,
    at once. None ends by itself before: 400 tokens take 80 s, until the first signal has been
    heard."""
    make_folder(folder, Orders(step_seconds=0.2), rows=64, num_blocks=4096, longest=512)
    with Serving(folder, servers=servers, limits={"drain_seconds": HANG}) as serving:
        load, children = Waiters(serving.url), serving.children

        def all_run() -> bool:
            return (
                load.begun == WAITERS // 2
                and serving.metrics()["penstock:num_requests_running"] == WAITERS
            )

        until(all_run)
        _signal(serving, number)
        if second:
            serving.process.send_signal(signal.SIGINT)
        else:
            serving.order(step_seconds=0.005)
        what = "SIGTERM, twice" if second else "SIGTERM"
        return _end(serving, load, children, what, time.monotonic())


def loop(folder: Path, what: str, times: int, **how: Any) -> list[Outcome]:
    """So many services, one after the other, each broken under load. 400 tokens take 80 s: none ends
    by itself."""
    make_folder(folder, Orders(step_seconds=0.2), rows=64, num_blocks=4096, longest=512)
    return [break_under_load(folder, what, **how) for _ in range(times)]


def rank_loop(folder: Path, times: int, **how: Any) -> list[Outcome]:
    """So many services of the demo model over two ranks, each with one of them killed, or stopped,
    at a random moment. It brings 400 tokens in 12 s."""
    draw, made = random.Random(how.get("step_timeout", 0)), list[Outcome]()
    make_folder(folder)
    for what in ("rank stopped", "stop") if "step_timeout" in how else ("rank", "engine"):
        made += [
            break_under_load(folder, what, later=draw.random(), **how, **OF_RANKS)
            for _ in range(times // 2)
        ]
    return made


def summary(outcomes: Sequence[Outcome]) -> str:
    told, ended = max(o.told for o in outcomes), max(o.ended for o in outcomes)
    left = sum(o.left for o in outcomes)
    said = (
        f"{len(outcomes)} times: waiters told within {told:.2f} s, process ended within"
        f" {ended:.2f} s"
    )
    return f"{said}; {left} processes left"

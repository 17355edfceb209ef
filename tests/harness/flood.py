"""More than the queue holds: all at once against an engine that is held, and ten times what it can
do for minutes.

The client is in this process, the service in others. It knows a service over HTTP and its metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bare_http import CLOSE, request
from fake_runner import Orders, expected
from in_loop import close
from service import HANG, Serving, make_folder, memory, wait_until


@dataclass
class Flood:
    """statuses: of all that were sent; 0 stands for a connection that ended without one."""

    statuses: dict[int, int] = field(default_factory=dict)
    wrong: int = 0  # answers of 200 whose tokens are not the prompt's own
    no_retry_after: int = 0  # refusals without it
    grown: int = 0  # bytes of the server's memory, at most
    at_rest: bool = False

    def line(self) -> str:
        counts = f"{self.statuses.get(200, 0):,} answered, {self.statuses.get(429, 0):,} x 429"
        return f"{counts}; +{self.grown >> 20} MB at most"

    def faults(self, want: dict[int, int] | None = None) -> list[str]:
        found = [f"{self.wrong} wrong answers"] if self.wrong else []
        found += (
            [f"{self.no_retry_after} refusals without Retry-After"] if self.no_retry_after else []
        )
        found += [] if self.at_rest else ["not at rest afterwards"]
        if want is None and set(self.statuses) - {200, 429}:
            found.append(f"statuses {self.statuses}")
        if want is not None and self.statuses != want:
            found.append(f"statuses {self.statuses} instead of {want}")
        return found + ([f"memory grew by {self.grown >> 20} MB"] if self.grown > 200 << 20 else [])


async def _ask(
    port: int, body: dict[str, Any], words: list[int], flood: Flood, answered: list[int]
) -> int:
    """Sends one request and reads its answer to the end -> the status."""
    status = 0
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request(body, CLOSE))
            head, _, data = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            await close(writer)
        status = int(head.split()[1]) if head else 0
        if status == 200:
            want = expected(body["prompt"], body["max_tokens"], words, body["seed"])
            flood.wrong += data.count(str(want).replace(" ", "").encode()) != 1
        elif status == 429:
            flood.no_retry_after += b"\r\nretry-after: " not in head.lower()
    answered[status == 200] += 1
    return status


def all_at_once(folder: Path, count: int, queue: int, *, held: bool) -> Flood:
    """`count` requests at one moment. held:
    no step comes until all that can be refused have been."""
    words = make_folder(folder, Orders(step_seconds=0.002), rows=256, num_blocks=8192, longest=256)
    flood, answered = Flood(), [0, 0]
    with Serving(folder, limits={"max_num_queued_reqs": queue}) as serving:
        port, before = int(serving.url.rsplit(":", 1)[1]), memory(serving.process.pid)
        if held:
            serving.order(held=True)

        async def main() -> list[int]:
            bodies = [_body(number, 4) for number in range(count)]
            tasks = [
                asyncio.create_task(_ask(port, body, words, flood, answered)) for body in bodies
            ]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0.05)
                flood.grown = max(flood.grown, memory(serving.process.pid) - before)
                if held and answered[0] >= count - queue:
                    await asyncio.sleep(0.5)
                    serving.order(step_seconds=0.002)
            return [task.result() for task in tasks]

        flood.statuses = dict(sorted(Counter(asyncio.run(main())).items()))
        flood.at_rest = wait_until(serving.at_rest, HANG) is not None
    return flood


@dataclass
class Overload(Flood):
    peak: float = 0.0  # answers a second where just enough are open
    goodput: float = 0.0  # of 200, under the load
    asked: float = 0.0  # requests a second that were sent
    refusal_p99: float = 0.0  # seconds
    # by how many seconds a sleeper in the client's loop wakes too late: the machine's crowd
    late_p99: float = 0.0

    def line(self) -> str:
        share = self.goodput / self.peak if self.peak else 0.0
        said = f"{self.asked:.0f}/s asked, {self.goodput:.1f}/s answered, {share:.1%} of the peak"
        return f"{said}; refusals p99 {self.refusals()}"

    def faults(self, want: dict[int, int] | None = None) -> list[str]:
        found = super().faults(want)
        if self.goodput < 0.95 * self.peak:
            found.append(f"goodput {self.goodput:.0f}/s of a peak of {self.peak:.0f}/s")
        own = self.refusal_p99 - self.late_p99
        return found + ([f"refusals p99 {self.refusals()}"] if own > 0.05 else [])

    def refusals(self) -> str:
        return (
            f"{self.refusal_p99 * 1000:.0f} ms (the client's own loop {self.late_p99 * 1000:.0f}"
            " late)"
        )


def overload(folder: Path, seconds: float, times: float = 10.0) -> Overload:
    """A load of `times` what the engine can do, open loop: requests are sent at their moments,
    whatever comes back."""
    words = make_folder(folder, Orders(step_seconds=0.02), rows=32, num_blocks=2048, longest=256)
    made = Overload()
    with Serving(folder, limits={"max_num_queued_reqs": 96}) as serving:
        port, before = int(serving.url.rsplit(":", 1)[1]), memory(serving.process.pid)
        made.peak = asyncio.run(_closed(port, words, made, 64, max(8.0, seconds / 4)))
        made.wrong = made.no_retry_after = 0
        asyncio.run(_open(port, words, made, made.peak * times, seconds))
        made.grown = memory(serving.process.pid) - before
        made.at_rest = wait_until(serving.at_rest, HANG) is not None
    return made


def _body(number: int, tokens: int) -> dict[str, Any]:
    prompt = [1 + number % 250, 1 + number // 250 % 250] * 8
    return {"prompt": prompt, "max_tokens": tokens, "seed": number, "return_token_ids": True}


async def _closed(port: int, words: list[int], flood: Flood, clients: int, seconds: float) -> float:
    """`clients` that each send the next when they have an answer -> answers a second, the first
    second left out."""
    began, done = time.monotonic(), 0

    async def one(client: int) -> None:
        nonlocal done
        number = client
        while time.monotonic() - began < seconds:
            number += clients
            if await _ask(port, _body(number, 50), words, flood, [0, 0]) == 200:
                done += 1.0 < time.monotonic() - began < seconds

    await asyncio.gather(*(one(client) for client in range(clients)))
    return done / (seconds - 1.0)


async def _open(port: int, words: list[int], made: Overload, rate: float, seconds: float) -> None:
    began, statuses, refusals, good = time.monotonic(), Counter[int](), list[float](), 0
    tasks = set[asyncio.Task[None]]()

    async def one(number: int) -> None:
        nonlocal good
        sent = time.monotonic()
        status = await _ask(port, _body(number, 50), words, made, [0, 0])
        statuses[status] += 1
        now = time.monotonic()
        good += status == 200 and 4.0 < now - began < seconds
        if status == 429:
            refusals.append(now - sent)

    late: list[float] = []
    sleeping = asyncio.create_task(_sleep(late))
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        task = asyncio.create_task(one(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    made.asked = int(rate * seconds) / (time.monotonic() - began)
    await asyncio.gather(*tasks)
    sleeping.cancel()
    made.late_p99 = sorted(late)[int(0.99 * len(late))]
    made.statuses, made.goodput = dict(sorted(statuses.items())), good / (seconds - 4.0)
    made.refusal_p99 = sorted(refusals)[int(0.99 * len(refusals))] if refusals else 0.0


async def _sleep(late: list[float]) -> None:
    """How late a sleeper wakes, a hundred times a second."""
    while True:
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        late.append(time.monotonic() - due)

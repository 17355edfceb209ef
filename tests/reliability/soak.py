"""A service under a mixed load for long: whole answers, streams, cuts, refusals, batches. Its memory stays flat.

`python tests/reliability/soak.py --minutes 60 [--samples FILE]`. What is looked at once a second is each process's own
memory (resident, without pages of files, which come as they are first touched); `trend.py` says what grows. What a run
of less than `trend.SHORTEST` can say is how much it has risen.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import batch_client
import trend
from batch_client import Asked
from cut_streams import Tally, _one
from fake_runner import Orders
from in_loop import close, raw
from service import Serving, descriptors, make_folder, own_memory

MOST_GROWTH = 16  # MB an hour, and in all of a short run
BATCH = Asked(lines=200, bad=10, ids=20, tokens=30, compared=2)
# A batch takes what others leave, and these clients leave nothing: they come in waves. From one wave to the next, and
# from one batch's upload where it doesn't take longer, are WAVE seconds; in the last REST of them no client asks.
WAVE, REST = 10.0, 2.0
CANCELLED = 4  # one of so many is, half way
# What is refused, by its status: nonsense, another model, a body and a head that are too large.
REFUSALS = {
    400: raw({"prompt": [5], "n": "many"}),
    404: raw({"prompt": [5], "model": "other"}),
    413: raw({"prompt": [5]}).replace(b"content-length: ", b"content-length: 999999999"),
    431: raw({"prompt": [5]}, "/" + "x" * 70_000),
}


@dataclass
class Soak:
    minutes: float
    tally: Tally
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # process -> (seconds, MB)
    descriptors: tuple[int, int] = (0, 0)  # of the server, before and after
    at_rest: bool = False
    refused: Counter[int] = field(default_factory=Counter)  # by status
    batches: Counter[str] = field(default_factory=Counter)  # by the status that they ended in
    strange: list[str] = field(default_factory=list)  # about batches and their files

    def faults(self) -> list[str]:
        found = [f"{who} {told}" for who in self.samples if (told := self._growth(who))]
        found += [] if self.at_rest else ["not at rest afterwards"]
        if self.descriptors[1] > self.descriptors[0]:
            found.append(f"descriptors: {self.descriptors[0]} before, {self.descriptors[1]} after")
        if set(self.refused) - set(REFUSALS):
            found.append(f"refusals: {dict(self.refused)}")
        found += [] if self.batches else ["no batch came to its end"]
        return found + self.strange + self.tally.faults()

    def _growth(self, who: str) -> str:
        series = self.samples[who]
        if trend.long_enough(series):
            said = trend.verdict(series, MOST_GROWTH)
            return "" if said == trend.FLAT else f"{said}: {_shown(trend.late(series))}"
        rise = trend.rise(series)
        return "" if rise <= MOST_GROWTH else f"rose by {rise:.0f} MB"

    def line(self, who: str) -> str:
        """What came of a process's memory, in words."""
        series = self.samples[who]
        if not trend.long_enough(series):
            return f"{who} {trend.rise(series):+.1f} MB"
        before, now = trend.early(series).slope, trend.late(series)
        return f"{who} {_shown(now)} ({trend.verdict(series, MOST_GROWTH)}; {before:+.1f} while it warmed up)"


def _shown(found: trend.Trend) -> str:
    return f"{found.slope:+.1f} MB an hour [{found.low:+.1f}, {found.high:+.1f}]"


def soak(folder: Path, minutes: float, clients: int = 40, samples: IO[str] | None = None) -> Soak:
    """samples: where a line a second goes: seconds, MB of the server, MB of the engine, requests so far."""
    words = make_folder(folder, Orders(step_seconds=0.004), rows=32, num_blocks=256, longest=256, batched_tokens=512)
    made = Soak(minutes, Tally(), {"server": [], "engine": []})
    knobs = {"steps_ahead": 2, "preempt_every": 50}
    limits, state = {"max_num_queued_reqs": 1_000}, folder / "state"
    with Serving(folder, knobs=knobs, limits=limits, state_dir=str(state)) as serving:
        before = descriptors(serving.process.pid)
        asyncio.run(_load(made, serving, words, clients, samples))
        time.sleep(2.0)
        made.descriptors = before, descriptors(serving.process.pid)
        made.at_rest = serving.at_rest()
        made.strange += [f"left in the state folder: {name}" for name in batch_client.left_behind(state)]
    return made


async def _load(made: Soak, serving: Serving, words: list[int], clients: int, samples: IO[str] | None) -> None:
    began = time.monotonic()
    end = began + 60 * made.minutes
    here = _Port(int(serving.url.rsplit(":", 1)[1]))

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            await _one(here, rng, words, made.tally, rng.random() < 0.5, 60)
            into = (time.monotonic() - began) % WAVE
            await asyncio.sleep(WAVE - into if into > WAVE - REST else 0)

    async def nuisance() -> None:
        while time.monotonic() < end:
            await _refused(made, here, REFUSALS[random.choice(list(REFUSALS))])
            await asyncio.sleep(0.02)

    async def trickle() -> None:
        number = 0
        while time.monotonic() < end:
            due, number = time.monotonic() + WAVE, number + 1
            await _batch(made, serving, words, cancelled=number % CANCELLED == 0)
            await asyncio.sleep(min(due, end) - time.monotonic())

    async def look() -> None:
        while True:
            at = time.monotonic() - began
            sizes = {"server": own_memory(serving.process.pid), "engine": own_memory(serving.engine)}
            for who, size in sizes.items():
                made.samples[who].append((at, size))
            if samples is not None:
                columns = (at, *sizes.values(), requests(made))
                print(*(f"{column:.10g}" for column in columns), file=samples, flush=True)
            await asyncio.sleep(1.0)

    looking = asyncio.create_task(look())
    await asyncio.gather(nuisance(), trickle(), *(client(number) for number in range(clients)))
    looking.cancel()


async def _batch(made: Soak, serving: Serving, words: list[int], cancelled: bool) -> None:
    """One batch, its client in a thread of its own."""
    asked, path = replace(BATCH, cancelled=cancelled), serving.folder / "lines.jsonl"
    asked.write(path)
    done = await asyncio.to_thread(batch_client.run, serving.url, path, asked, words)
    made.strange += done.faults
    if done.status:
        made.batches[done.status] += 1


async def _refused(made: Soak, here: _Port, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    writer.write(data)
    line = await reader.readline()
    await reader.read()
    await close(writer)
    made.refused[int(line.split()[1]) if line else 0] += 1


@dataclass
class _Port:
    """Of Here, what a request needs."""

    port: int


def requests(made: Soak) -> int:
    return made.tally.whole + sum(made.tally.cut.values()) + made.refused.total()


def report(made: Soak) -> str:
    whole, cut = made.tally.whole, sum(made.tally.cut.values())
    said = ", ".join(made.line(who) for who in made.samples)
    refused, batches = made.refused.total(), f"{made.batches.total()} batches ({made.batches['cancelled']} cancelled)"
    return f"{made.minutes:g} minutes, {whole:,} whole, {cut:,} cut, {refused:,} refused requests, {batches}: {said}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--samples", type=Path, help="file for a line a second")
    asked = parser.parse_args()
    with open(asked.samples or os.devnull, "w") as file:
        made = soak(Path(tempfile.mkdtemp()), asked.minutes, samples=file)
    print(report(made))
    print("\n".join(made.faults()) or "flat")
    sys.exit(bool(made.faults()))

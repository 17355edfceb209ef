"""A service under a mixed load for long: whole answers, streams, cuts, refusals, batches. Its
memory stays flat.

`python tests/harness/soak.py --minutes 60 [--samples FILE]`. What is looked at once a second is
each process's own memory (resident, without pages of files, which come as they are first touched).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import batch_client
from bare_http import CLOSE, request
from batch_client import Asked
from cut_streams import Tally, one_stream
from fake_runner import Orders
from in_loop import close
from service import HANG, Serving, descriptors, make_folder, own_memory, wait_until

MOST_GROWTH = 16  # MB an hour, and in all of a short run
LONG = 1440.0  # seconds of a run whose first half is warm-up
Series = list[tuple[float, float]]  # (seconds, MB)
BATCH = Asked(lines=200, bad=10, ids=20, tokens=30, compared=2)
CANCELLED = 4  # one batch of so many is, half way
# What is refused, by its status: nonsense, another model, a body and a head that are too large.
REFUSALS = {
    400: request({"prompt": [5], "n": "many"}, CLOSE),
    404: request({"prompt": [5], "model": "other"}, CLOSE),
    413: request(b"", CLOSE, "content-length: 99999999999"),
    431: request({"prompt": [5]}, CLOSE, path="/" + "x" * 70_000),
}


class Memory:
    """Own memory of processes, looked at once a second, and what grew of it. requests: how many
    there were so far."""

    def __init__(
        self, pids: dict[str, int], samples: IO[str] | None, requests: Callable[[], int]
    ) -> None:
        self.series: dict[str, Series] = {who: [] for who in pids}
        self._pids, self._samples, self._requests = pids, samples, requests

    async def look(self) -> None:
        began = time.monotonic()
        while True:
            at = time.monotonic() - began
            sizes = {who: own_memory(pid) for who, pid in self._pids.items()}
            for who, size in sizes.items():
                self.series[who].append((at, size))
            if self._samples is not None:
                columns = (at, *sizes.values(), self._requests())
                print(*(f"{column:.10g}" for column in columns), file=self._samples, flush=True)
            await asyncio.sleep(1.0)

    def faults(self) -> list[str]:
        grown = {who: growth(series) for who, series in self.series.items()}
        return [f"{who} grew by {size:.1f} MB" for who, size in grown.items() if size > MOST_GROWTH]

    def line(self) -> str:
        return ", ".join(f"{who} {growth(series):+.1f} MB" for who, series in self.series.items())


def growth(series: Series) -> float:
    """MB between two tenths' medians, the last one and the second; of a long run the sixth, and MB
    an hour."""
    length = series[-1][0] - series[0][0]
    begin, scale = (0.5, 3600 / (0.4 * length)) if length >= LONG else (0.1, 1.0)

    def median(low: float) -> float:
        part = [size for at, size in series if low <= (at - series[0][0]) / length <= low + 0.1]
        return statistics.median(part or [series[-1][1]])

    return scale * (median(0.9) - median(begin))


@dataclass(frozen=True)
class Load:
    """A batch takes what others leave, and these clients leave nothing: they come in waves. From
    one wave to the next, and from one batch's upload where it doesn't take longer, are `wave`
    seconds; in the last `rest` no client asks."""

    clients: int = 40
    wave: float = 10.0
    rest: float = 2.0
    batch: Asked = BATCH


@dataclass
class Soak:
    minutes: float
    tally: Tally = field(default_factory=Tally)
    memory: Memory = field(default_factory=lambda: Memory({}, None, int))
    descriptors: tuple[int, int] = (0, 0)  # of the server, before and after
    at_rest: bool = False
    refused: Counter[int] = field(default_factory=Counter)  # by status
    batches: Counter[str] = field(default_factory=Counter)  # by the status that they ended in
    strange: list[str] = field(default_factory=list)  # about batches and their files

    def faults(self) -> list[str]:
        found = self.memory.faults() + ([] if self.at_rest else ["not at rest afterwards"])
        if self.descriptors[1] > self.descriptors[0]:
            found.append(f"descriptors: {self.descriptors[0]} before, {self.descriptors[1]} after")
        if set(self.refused) - set(REFUSALS):
            found.append(f"refusals: {dict(self.refused)}")
        found += [] if self.batches else ["no batch came to its end"]
        return found + self.strange + self.tally.faults()

    def line(self) -> str:
        whole, cut, refused = self.tally.whole, sum(self.tally.cut.values()), self.refused.total()
        batches = f"{self.batches.total()} batches ({self.batches['cancelled']} cancelled)"
        counts = f"{whole:,} whole, {cut:,} cut, {refused:,} refused requests, {batches}"
        return f"{self.minutes:g} minutes, {counts}: {self.memory.line()}"

    def requests(self) -> int:
        return self.tally.whole + sum(self.tally.cut.values()) + self.refused.total()


def soak(
    folder: Path, minutes: float, load: Load | None = None, samples: IO[str] | None = None
) -> Soak:
    """samples: where a line a second goes: seconds, MB of the server, MB of the engine, requests so
    far."""
    words = make_folder(
        folder, Orders(step_seconds=0.004), rows=32, num_blocks=256, longest=256, batched_tokens=512
    )
    made, state = Soak(minutes), folder / "state"
    knobs, limits = {"steps_ahead": 2, "preempt_every": 50}, {"max_num_queued_reqs": 1_000}
    with Serving(folder, knobs=knobs, limits=limits, state_dir=str(state)) as serving:
        before = descriptors(serving.process.pid)
        made.memory = Memory(
            {"server": serving.process.pid, "engine": serving.engine}, samples, made.requests
        )
        asyncio.run(_load(made, serving, words, load or Load()))
        wait_until(lambda: descriptors(serving.process.pid) <= before and serving.at_rest(), HANG)
        made.descriptors = before, descriptors(serving.process.pid)
        made.at_rest = serving.at_rest()
        made.strange += [
            f"left in the state folder: {name}" for name in batch_client.left_behind(state)
        ]
    return made


async def _load(made: Soak, serving: Serving, words: list[int], load: Load) -> None:
    began = time.monotonic()
    end, port = began + 60 * made.minutes, int(serving.url.rsplit(":", 1)[1])

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            await one_stream(port, rng, words, made.tally, rng.random() < 0.5, 60)
            into = (time.monotonic() - began) % load.wave
            await asyncio.sleep(load.wave - into if into > load.wave - load.rest else 0)

    async def nuisance() -> None:
        while time.monotonic() < end:
            await _refused(made, port, REFUSALS[random.choice(list(REFUSALS))])
            await asyncio.sleep(0.02)

    async def trickle() -> None:
        number = 0
        while time.monotonic() < end:
            due, number = time.monotonic() + load.wave, number + 1
            await _batch(
                made, serving, words, replace(load.batch, cancelled=number % CANCELLED == 0)
            )
            await asyncio.sleep(min(due, end) - time.monotonic())

    looking = asyncio.create_task(made.memory.look())
    await asyncio.gather(nuisance(), trickle(), *(client(number) for number in range(load.clients)))
    looking.cancel()


async def _batch(made: Soak, serving: Serving, words: list[int], asked: Asked) -> None:
    """One batch, its client in a thread of its own."""
    path = serving.folder / "lines.jsonl"
    asked.write(path)
    done = await asyncio.to_thread(batch_client.run, serving.url, path, asked, words)
    made.strange += done.faults
    if done.status:
        made.batches[done.status] += 1


async def _refused(made: Soak, port: int, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    line = await reader.readline()
    await reader.read()
    await close(writer)
    made.refused[int(line.split()[1]) if line else 0] += 1


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--samples", type=Path, default=os.devnull, help="file for a line a second")
    return parser


def tell(line: str, faults: list[str]) -> int:
    print(line)
    print("\n".join(faults) or "flat")
    return int(bool(faults))


if __name__ == "__main__":
    asked = arguments().parse_args()
    with open(asked.samples, "w") as file:
        made = soak(Path(tempfile.mkdtemp()), asked.minutes, samples=file)
    sys.exit(tell(made.line(), made.faults()))

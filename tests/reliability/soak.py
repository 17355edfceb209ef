"""A service under a mixed load for long: whole answers, streams, cuts, refusals. Its memory stays flat.

`python tests/reliability/soak.py --minutes 60`. What is kept for ever shows as a slope: the least-squares line through
the server's and the engine's resident memory, the first tenth left out.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from cut_streams import Tally, _one
from fake_runner import Orders
from service import Serving, descriptors, make_folder, memory

MOST_GROWTH = 16 << 20  # bytes an hour


@dataclass
class Soak:
    minutes: float
    tally: Tally
    samples: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # process -> (seconds, bytes)
    descriptors: tuple[int, int] = (0, 0)  # of the server, after the first minute's tenth and at the end
    at_rest: bool = False

    def growth(self, process: str) -> float:
        """Bytes an hour, by the line through all but the first tenth."""
        every = self.samples[process]
        kept = every[len(every) // 10 :]
        middle = sum(at for at, _ in kept) / len(kept)
        spread = sum((at - middle) ** 2 for at, _ in kept)
        return 3600 * sum((at - middle) * size for at, size in kept) / spread if spread else 0.0

    def faults(self) -> list[str]:
        found = [f"{who} grows by {self.growth(who) / 2**20:.0f} MB an hour" for who in self._growing()]
        found += [] if self.at_rest else ["not at rest afterwards"]
        if self.descriptors[1] > self.descriptors[0]:
            found.append(f"descriptors: {self.descriptors[0]} before, {self.descriptors[1]} after")
        return found + self.tally.faults()

    def _growing(self) -> list[str]:
        # Within minutes an allocator's first rounds look like a slope: what counts is what it comes to.
        return [who for who in self.samples if self.growth(who) * self.minutes / 60 > MOST_GROWTH]


def soak(folder: Path, minutes: float, clients: int = 40) -> Soak:
    words = make_folder(folder, Orders(step_seconds=0.004), rows=32, num_blocks=256, longest=256, batched_tokens=512)
    made = Soak(minutes, Tally(), {"server": [], "engine": []})
    knobs = {"steps_ahead": 2, "preempt_every": 50}
    with Serving(folder, knobs=knobs, limits={"max_num_queued_reqs": 1_000}) as serving:
        before = descriptors(serving.process.pid)
        asyncio.run(_load(made, serving, words, clients))
        time.sleep(2.0)
        made.descriptors = before, descriptors(serving.process.pid)
        made.at_rest = serving.at_rest()
    return made


async def _load(made: Soak, serving: Serving, words: list[int], clients: int) -> None:
    end = time.monotonic() + 60 * made.minutes
    here = _Port(int(serving.url.rsplit(":", 1)[1]))

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            await _one(here, rng, words, made.tally, rng.random() < 0.5, 60)

    async def look() -> None:
        while True:
            at = time.monotonic()
            made.samples["server"].append((at, memory(serving.process.pid)))
            made.samples["engine"].append((at, memory(serving.engine)))
            await asyncio.sleep(1.0)

    looking = asyncio.create_task(look())
    await asyncio.gather(*(client(number) for number in range(clients)))
    looking.cancel()


@dataclass
class _Port:
    """Of Here, what a request needs."""

    port: int


def report(made: Soak) -> str:
    share = made.minutes / 60 / 2**20
    who = ", ".join(f"{name} {made.growth(name) * share:+.1f} MB" for name in made.samples)
    whole, cut = made.tally.whole, sum(made.tally.cut.values())
    return f"{made.minutes:g} minutes, {whole:,} whole and {cut:,} cut requests: {who}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    made = soak(Path(tempfile.mkdtemp()), parser.parse_args().minutes)
    print(report(made))
    print("\n".join(made.faults()) or "flat")
    sys.exit(bool(made.faults()))

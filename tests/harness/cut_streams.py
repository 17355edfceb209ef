"""Connections cut at random states, under preemption and a cache that is too small: everything
comes back, exactly.

What is not cut is compared with what each sample gives alone: no token of another request, none
lost, none twice. It knows the server in this loop and the fake's arithmetic.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bare_http import CLOSE, request
from fake_runner import Orders, expected
from in_loop import Events, close, post, serving_here
from service import HANG, make_folder

# what prompts begin with: shared blocks
HEADERS = [[3 + 5 * k + i % 90 for i in range(64)] for k in range(4)]


@dataclass
class Tally:
    """What became of the requests, and of what they held."""

    cut: dict[str, int] = field(default_factory=dict)  # by the state in which the client left
    whole: int = 0
    tokens: int = 0  # compared
    foreign: int = 0  # of them, others than the sample gives alone
    strange: list[str] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    preempted: float = 0.0

    def faults(self) -> list[str]:
        held = [f"{what} left: {count:g}" for what, count in self.left.items() if count]
        return self.strange + held + ([f"{self.foreign} foreign tokens"] if self.foreign else [])

    def line(self) -> str:
        left, cut = sum(self.left.values()), sum(self.cut.values())
        said = (
            f"{cut:,} cut, {self.whole:,} whole, {self.preempted:,.0f} preemptions; {left:g} rows,"
            " blocks, tasks, "
        )
        return f"{said}descriptors left; {self.tokens:,} tokens compared, {self.foreign} foreign"


def run(
    folder: Path,
    streams: int,
    *,
    at_once: int = 200,
    seed: int = 0,
    cuts: bool = True,
    longest: int = 60,
) -> Tally:
    """So many requests, `at_once` of them at a time; with `cuts` most are cut,
    else one in eight."""
    words = make_folder(
        folder, Orders(step_seconds=0.002), rows=24, num_blocks=200, longest=256, batched_tokens=256
    )
    return asyncio.run(_run(folder, words, streams, at_once, random.Random(seed), cuts, longest))


async def _run(
    folder: Path,
    words: list[int],
    streams: int,
    at_once: int,
    rng: random.Random,
    cuts: bool,
    longest: int,
) -> Tally:
    tally, gate = Tally(), asyncio.Semaphore(at_once)
    async with serving_here(folder, steps_ahead=2, preempt_every=5) as here:

        async def one(number: int) -> None:
            async with gate:
                await one_stream(
                    here.port, random.Random(rng.random() + number), words, tally, cuts, longest
                )

        await asyncio.gather(*(one(number) for number in range(streams)))
        tally.left = await here.rest(HANG)
        tally.preempted = here.client.stats()["preemptions"]
    return tally


def _body(rng: random.Random, longest: int) -> dict[str, Any]:
    prompt = rng.choice(HEADERS)[: rng.choice([0, 16, 33, 64])] + [
        rng.randrange(250) for _ in range(rng.randrange(1, 60))
    ]
    return {
        "prompt": prompt,
        "max_tokens": rng.randrange(1, longest),
        "n": rng.choice([1, 1, 2, 5]),
        "stream": True,
        "seed": rng.randrange(10**6),
        "temperature": rng.choice([0, 1]),
        "return_token_ids": True,
    }


async def one_stream(
    port: int, rng: random.Random, words: list[int], tally: Tally, cuts: bool, longest: int
) -> None:
    body = _body(rng, longest)
    body["stream"] = stream = rng.random() < 0.8
    state = rng.choice(
        ["in its body", "sent", "soon", "later", "in its stream"]
        if cuts
        else ["none"] * 7 + ["later"]
    )
    if rng.random() < 0.1:
        state = "none"
    if state == "in its body":
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        data = request(body, CLOSE)
        writer.write(data[: rng.randrange(len(data))])
        await asyncio.sleep(rng.random() * 0.01)
    else:
        reader, writer = await post(port, body)
        if state == "sent":
            await asyncio.sleep(0)
        elif state in ("soon", "later"):
            await asyncio.sleep(rng.random() * (0.02 if state == "soon" else 0.3))
        elif state == "in its stream" and stream:
            await Events(reader).read(rng, 0.1)
        elif stream:
            await _compare(reader, body, words, tally)
        else:
            await reader.read()
            tally.whole += 1
    await close(writer)
    if state != "none":
        tally.cut[state] = tally.cut.get(state, 0) + 1


async def _compare(
    reader: asyncio.StreamReader, body: dict[str, Any], words: list[int], tally: Tally
) -> None:
    events = Events(reader)
    await events.read()
    if not events.whole:
        tally.strange.append(f"a stream ended with {events.error}")
        return
    tally.whole += 1
    for sample in range(body["n"]):
        want = expected(
            body["prompt"], body["max_tokens"], words, body["seed"], sample, body["temperature"]
        )
        got = events.ids.get(sample, [])
        tally.tokens += len(want)
        tally.foreign += sum(a != b for a, b in zip(want, got, strict=False)) + abs(
            len(want) - len(got)
        )

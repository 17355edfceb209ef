"""Bodies of /v1/bulk by the dozen at once, most of them cut at a random state, read slowly, or with
broken lines among good ones: each whole answer has every line once with the tokens that it gives
alone, and nothing is left behind.

It knows the server in this loop and the fake's arithmetic.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from bare_http import CLOSE, request
from fake_runner import Orders, expected
from in_loop import close, serving_here
from service import make_folder

PATH = "/v1/bulk"
STATES = ("none", "slow", "in its body", "soon", "in its answer")
BROKEN = (
    b"{",
    b"[1]",
    b'{"prompt": []}',
    b'{"prompt": [9999]}',
    b'{"prompt": [1], "n": 0}',
    b'{"prompt": "\xff"}',
)


@dataclass
class BulkTally:
    """What became of the bodies, and of what they held."""

    states: dict[str, int] = field(default_factory=dict)
    lines: int = 0  # of whole answers
    errors: int = 0  # of them
    foreign: int = 0  # samples with other tokens than they give alone
    strange: list[str] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)

    def faults(self) -> list[str]:
        held = [f"{what} left: {count:g}" for what, count in self.left.items() if count]
        return (
            self.strange[:3] + held + ([f"{self.foreign} foreign samples"] if self.foreign else [])
        )

    def line(self) -> str:
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))
        answered = (
            f"{self.lines:,} lines answered, {self.errors:,} of them broken, {self.foreign} foreign"
            " samples"
        )
        return (
            f"{states}; {answered}; {sum(self.left.values()):g} rows, blocks, tasks, descriptors"
            " left"
        )


def run(
    folder: Path, bodies: int, *, at_once: int = 24, lines: int = 200, seed: int = 0
) -> BulkTally:
    """So many bodies of up to `lines` lines, `at_once` of them at a time."""
    words = make_folder(
        folder, Orders(step_seconds=0.001), rows=48, num_blocks=400, longest=256, batched_tokens=512
    )
    return asyncio.run(_run(folder, words, bodies, at_once, lines, seed))


async def _run(
    folder: Path, words: list[int], bodies: int, at_once: int, lines: int, seed: int
) -> BulkTally:
    tally, gate = BulkTally(), asyncio.Semaphore(at_once)
    async with serving_here(folder, steps_ahead=2, preempt_every=5) as here:

        async def one(number: int) -> None:
            async with gate:
                rng = random.Random(seed * 100_003 + number)
                state = rng.choice(STATES)
                tally.states[state] = tally.states.get(state, 0) + 1
                await _one_body(here.port, rng, state, words, tally, rng.randrange(1, lines))

        await asyncio.gather(*(one(number) for number in range(bodies)))
        tally.left = await here.rest(3.0)
    return tally


def _line(rng: random.Random, number: int) -> dict[str, Any]:
    prompt = [3 + i % 90 for i in range(rng.choice([0, 16, 48]))] + [
        rng.randrange(250) for _ in range(5)
    ]
    shown = rng.choice([{"packed": True}, {"return_token_ids": True}])
    return {
        "custom_id": f"r{number}",
        "prompt": prompt,
        "max_tokens": rng.randrange(1, 24),
        "n": rng.choice([1, 1, 3]),
        "seed": rng.randrange(10**6),
        "temperature": rng.choice([0, 1]),
        **shown,
    }


async def _one_body(
    port: int, rng: random.Random, state: str, words: list[int], tally: BulkTally, lines: int
) -> None:
    asked = {n: _line(rng, n) if rng.random() < 0.95 else None for n in range(1, lines + 1)}
    rows = [
        rng.choice(BROKEN) if row is None else json.dumps(row).encode() for row in asked.values()
    ]
    body = b"\n".join(rows) + b"\n"
    if state == "in its body":
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        data = request(body, CLOSE, path=PATH)
        writer.write(data[: rng.randrange(len(data))])
        await asyncio.sleep(rng.random() * 0.01)
        await close(writer)
        return
    found: list[bytes] = []
    url = f"http://127.0.0.1:{port}{PATH}"
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", url, content=body) as answer,
    ):
        if state == "soon":
            return
        async for line in answer.aiter_lines():
            found.append(line.encode())
            if state == "in its answer" and rng.random() < 0.05:
                return
            if state == "slow" and rng.random() < 0.02:
                await asyncio.sleep(0.05)
    _compare(asked, [json.loads(line) for line in found], words, tally)


def _compare(
    asked: dict[int, Any], told: list[dict[str, Any]], words: list[int], tally: BulkTally
) -> None:
    by_number = {line.get("line"): line for line in told}
    if by_number.keys() != asked.keys() or len(told) != len(asked):
        tally.strange.append(
            f"{len(told)} lines answer {len(asked)}, {len(asked.keys() - by_number.keys())} missing"
        )
        return
    tally.lines += len(told)
    for number, row in asked.items():
        line = by_number[number]
        if (row is None) != ("error" in line):
            tally.strange.append(f"line {number} of {row} got {str(line)[:200]}")
            continue
        if row is None:
            tally.errors += 1
            continue
        for choice in line["choices"]:
            want = expected(
                row["prompt"],
                row["max_tokens"],
                words,
                row["seed"],
                choice["index"],
                row["temperature"],
            )
            tally.foreign += _ids(choice["token_ids"]) != want
        if line["custom_id"] != row["custom_id"] or len(line["choices"]) != row["n"]:
            tally.strange.append(
                f"line {number} is {line['custom_id']}, of {len(line['choices'])} choices"
            )


def _ids(told: Any) -> list[int]:
    if isinstance(told, str):  # packed
        found: list[int] = np.frombuffer(base64.b64decode(told), "<i4").tolist()
        return found
    return list(told)

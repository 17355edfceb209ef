"""Measures first tokens of online requests, alone and beside a batch: the cost of a batch to
others.

    python benchmarks/batch_beside.py [--rows N] [--seconds S] [--rate R]

The whole service runs over tests/harness's fake runner, whose step takes 2 ms and 5 us a token
(about an H200's, for a model of 1B): a batch that fills the rows makes steps longer, as a real one
does. Online requests come at random times (128 tokens in, 32 out, streamed); the batch's lines have
256 in and 256 out, more of them than there are rows. Time is from just before a request is sent to
its first event. Knows the service by HTTP alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "harness"))
from fake_runner import Orders
from service import COMPLETIONS, Serving, make_folder, wait_until

from penstock.jobs.remote import Remote
from penstock.jobs.remote_batch import submit

LINE = {"model": "fake", "max_tokens": 256, "ignore_eos": True}
ONLINE = {"model": "fake", "max_tokens": 32, "ignore_eos": True, "stream": True}


async def online(url: str, rate: float, seconds: float, seed: int) -> list[float]:
    """Returns the seconds to the first event of requests that come at random times."""
    draw, waits = random.Random(seed), []

    async def one(client: httpx.AsyncClient) -> None:
        body = {**ONLINE, "prompt": [draw.randrange(250) for _ in range(128)]}
        began, first = time.perf_counter(), 0.0
        async with client.stream("POST", url + COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_raw():
                first = first or time.perf_counter() - began
        waits.append(first)

    async with httpx.AsyncClient(
        timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False
    ) as client:
        tasks, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            tasks.append(asyncio.create_task(one(client)))
            await asyncio.sleep(draw.expovariate(rate))
        await asyncio.gather(*tasks)
    return waits


def say(name: str, waits: list[float]) -> None:
    quantiles = np.quantile(np.array(waits) * 1000, (0.5, 0.95, 0.99))
    figures = ", ".join(f"p{q} {ms:.1f}" for q, ms in zip((50, 95, 99), quantiles, strict=True))
    print(f"{name}: first token, ms: {figures} ({len(waits)} requests)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of the three runs")
    parser.add_argument("--rate", type=float, default=10.0, help="online requests a second")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        orders = Orders(step_seconds=0.002, token_seconds=5e-6)
        make_folder(
            folder,
            orders,
            rows=asked.rows,
            num_blocks=asked.rows * 40,
            longest=1024,
            batched_tokens=8192,
        )
        with (folder / "in.jsonl").open("w") as file:
            for number in range(50_000):
                body = {**LINE, "prompt": [number % 250, number // 250] * 128}
                row = {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
                file.write(json.dumps(row) + "\n")
        with Serving(folder, state_dir=str(folder / "state")) as serving:
            say("alone", asyncio.run(online(serving.url, asked.rate, asked.seconds, 1)))
            remote = Remote(serving.url)
            batch_id = submit(remote, folder / "in.jsonl", None)
            full = asked.rows - asked.rows // 8
            wait_until(
                lambda: serving.metrics().get("penstock:num_requests_running", 0) >= full, 60
            )
            before, began = serving.metrics()["penstock:generation_tokens_total"], time.monotonic()
            say("beside a batch", asyncio.run(online(serving.url, asked.rate, asked.seconds, 2)))
            made = serving.metrics()["penstock:generation_tokens_total"] - before
            print(f"the batch meanwhile: {made / (time.monotonic() - began):,.0f} tokens/s")
            remote.cancel(batch_id)
            wait_until(serving.at_rest, 60)
            say("alone again", asyncio.run(online(serving.url, asked.rate, asked.seconds, 3)))


if __name__ == "__main__":
    main()

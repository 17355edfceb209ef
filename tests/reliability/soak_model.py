"""A service with the model in the package under mixed load for long: its memory stays flat once its KV pool is filled.

`python tests/reliability/soak_model.py --minutes 60 [--samples FILE] [--kv-cache-tokens N]`. `soak.py` loads a server
whose engine computes nothing; here kernels, sampler and the real runner are under test. Pages of the KV pool become
resident when their blocks are first handed out, so the pool is a small one, full before the first tenth is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

import httpx
import trend
from service import commands, own_memory, parent_of

from penstock.demo import problems_file

CLIENTS = 12
MOST_GROWTH = 16  # MB an hour
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def asked(rng: random.Random, questions: list[str]) -> tuple[str, dict[str, Any], int]:
    """A path, a body, and after how many events its client goes away (0: it stays)."""
    text = "\n".join(rng.choices(questions, k=rng.choice((1, 1, 2, 5, 40))))
    body: dict[str, Any] = {"model": "demo", "max_tokens": rng.choice((1, 4, 16, 64)), "temperature": rng.random()}
    knobs: list[dict[str, Any]] = [
        {"n": 4}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {"seed": rng.getrandbits(32)},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5}, {"repetition_penalty": 1.3}, {"stop": ["\n", "####"]},
        {"logit_bias": {"5": -3.5}}, {"min_tokens": 1}, {"ignore_eos": True},
    ]  # fmt: skip
    for knob in rng.sample(knobs, rng.randrange(4)):
        body |= knob
    if rng.random() < 0.5:
        body |= {"stream": True}
    if rng.random() < 0.5:
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": rng.random() < 0.3}
        return CHAT, body, rng.choice((0, 1, 5)) if "stream" in body else 0
    body |= {"prompt": text} | rng.choice(({}, {"logprobs": 3}, {"echo": True}))
    return COMPLETIONS, body, rng.choice((0, 1, 5)) if "stream" in body else 0


async def client(number: int, http: httpx.AsyncClient, end: float, questions: list[str], ends: Counter[str]) -> None:
    rng = random.Random(number)
    while time.monotonic() < end:
        path, body, cut = asked(rng, questions)
        async with http.stream("POST", path, json=body) as answer:
            events = 0
            async for _ in answer.aiter_lines():
                events += 1
                if events == 2 * cut:  # an empty line is between any two
                    break
        ends[f"{answer.status_code}{' cut' if cut else ''}"] += 1


async def load(url: str, processes: dict[str, int], minutes: float, samples: IO[str]) -> tuple[Counter[str], Any]:
    """What requests came to, and each process's memory, looked at once a second."""
    questions = [json.loads(row)["question"] for row in problems_file().read_text().splitlines()]
    series: dict[str, list[tuple[float, float]]] = {who: [] for who in processes}
    ends: Counter[str] = Counter()
    began = time.monotonic()

    async def look() -> None:
        while True:
            at = time.monotonic() - began
            for who, pid in processes.items():
                series[who].append((at, own_memory(pid)))
            print(
                f"{at:.1f}", *(f"{each[-1][1]:.2f}" for each in series.values()), ends.total(), file=samples, flush=True
            )
            await asyncio.sleep(1.0)

    looking = asyncio.create_task(look())
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        end = began + 60 * minutes
        await asyncio.gather(*(client(number, http, end, questions, ends) for number in range(CLIENTS)))
    looking.cancel()
    return ends, series


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--samples", type=Path, help="file for a line a second")
    parser.add_argument("--kv-cache-tokens", type=int, default=16_384)
    given = parser.parse_args()
    more = ["--kv-cache-tokens", str(given.kv_cache_tokens)] if given.kv_cache_tokens else []
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        "demo",
        "--port",
        "0",
        "--state-dir",
        tempfile.mkdtemp(),
        *more,
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1].removesuffix("/v1")
        httpx.post(url + CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, timeout=60)
        children = {pid: words for pid, words in commands().items() if parent_of(pid) == server.pid}
        (engine,) = (pid for pid, words in children.items() if "engine.process" in words)
        with open(given.samples or os.devnull, "w") as samples:
            processes = {"server": server.pid, "engine": engine}
            ends, series = asyncio.run(load(url, processes, given.minutes, samples))
    finally:
        server.terminate()
        server.wait(60)
    print(f"{given.minutes:g} minutes: {dict(sorted(ends.items()))}")
    failed = bool(set(ends) - {"200", "200 cut"})
    for who, each in series.items():
        if trend.long_enough(each):
            now, said = trend.late(each), trend.verdict(each, MOST_GROWTH)
            print(f"{who} {now.slope:+.1f} MB an hour [{now.low:+.1f}, {now.high:+.1f}]: {said}")
            failed |= said != trend.FLAT
        else:
            print(f"{who} {trend.rise(each):+.1f} MB")
            failed |= trend.rise(each) > MOST_GROWTH
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

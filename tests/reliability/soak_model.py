"""A service with the model in the package under mixed load for long: its memory stays flat once its KV pool is filled.

`python tests/reliability/soak_model.py --minutes 60 [--samples FILE] [--kv-cache-tokens N]`. `soak.py` loads a server
whose engine computes nothing; here kernels, sampler and the real runner are under test. Pages of the KV pool become
resident when their blocks are first handed out, so the pool is a small one, full before the first tenth is over.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import IO, Any

import httpx
from bare_http import CHAT, COMPLETIONS
from service import commands, parent_of
from soak import Memory, arguments, tell

from penstock.demo import problems_file

CLIENTS = 12


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


async def load(url: str, processes: dict[str, int], minutes: float, samples: IO[str]) -> tuple[Counter[str], Memory]:
    """What requests came to, and each process's memory."""
    questions = [json.loads(row)["question"] for row in problems_file().read_text().splitlines()]
    ends: Counter[str] = Counter()
    memory = Memory(processes, samples, ends.total)
    looking, end = asyncio.create_task(memory.look()), time.monotonic() + 60 * minutes
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        await asyncio.gather(*(client(number, http, end, questions, ends) for number in range(CLIENTS)))
    looking.cancel()
    return ends, memory


def main() -> int:
    parser = arguments()
    parser.add_argument("--kv-cache-tokens", type=int, default=16_384)
    given = parser.parse_args()
    command = [sys.executable, "-m", "penstock", "serve", "demo", "--port", "0", "--state-dir", tempfile.mkdtemp()]
    command += ["--kv-cache-tokens", str(given.kv_cache_tokens)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1].removesuffix("/v1")
        httpx.post(url + CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, timeout=60)
        children = {pid: words for pid, words in commands().items() if parent_of(pid) == server.pid}
        (engine,) = (pid for pid, words in children.items() if "engine.process" in words)
        with open(given.samples, "w") as samples:
            processes = {"server": server.pid, "engine": engine}
            ends, memory = asyncio.run(load(url, processes, given.minutes, samples))
    finally:
        server.terminate()
        server.wait(60)
    bad = [f"{count} x {how}" for how, count in ends.items() if how not in ("200", "200 cut")]
    return tell(f"{given.minutes:g} minutes: {dict(sorted(ends.items()))}: {memory.line()}", bad + memory.faults())


if __name__ == "__main__":
    sys.exit(main())

"""A service with the model in the package under mixed load for long: its memory stays flat once its
KV pool is filled.

`python tests/reliability/soak_model.py --minutes 60 [--samples FILE] [--kv-cache-tokens N]
[--replicas N]`. `soak.py` loads a server whose engine computes nothing; here kernels, sampler,
masks and the real runner are under test. Pages of the KV pool become resident when their blocks are
first handed out, so the pool is a small one, full before the first tenth is over.
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
from pathlib import Path
from typing import IO, Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from bare_http import CHAT, COMPLETIONS
from service import commands, parent_of
from soak import Memory, arguments, tell

from penstock.demo import problems_file

CLIENTS = 12
FORMS = {"response_format", "structured_outputs", "tools"}


def schema(rng: random.Random) -> dict[str, Any]:
    """One of endlessly many: each is compiled, and few are met again."""
    names = rng.sample(("name", "age", "city", "tags", "price"), rng.randrange(1, 4))
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": rng.randrange(1000)},
        {"type": "boolean"},
        {"type": "string", "maxLength": rng.randrange(1, 30)},
        {"enum": rng.sample(["red", "green", "blue", "grey"], 2)},
    ]
    found = {name: rng.choice(kinds) for name in names}
    return {"type": "object", "properties": found, "required": names, "additionalProperties": False}


def form(rng: random.Random, chat: bool) -> dict[str, Any]:
    """What holds an answer to a form: a schema, a pattern, a choice, or a tool's call."""
    strict = {"name": "it", "strict": True, "schema": schema(rng)}
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": strict}},
        {"structured_outputs": {"regex": f"[a-z]{{1,{rng.randrange(1, 20)}}} [0-9]+"}},
        {"structured_outputs": {"choice": rng.sample(["yes", "no", "perhaps", "never"], 2)}},
    ]
    if chat:
        tool = {"name": f"tool_{rng.randrange(50)}", "parameters": schema(rng)}
        forms.append({"tools": [{"type": "function", "function": tool}], "tool_choice": "required"})
    return rng.choice(forms)


def asked(rng: random.Random, questions: list[str]) -> tuple[str, dict[str, Any], int]:
    """A path, a body, and after how many events its client goes away (0: it stays)."""
    text = "\n".join(rng.choices(questions, k=rng.choice((1, 1, 2, 5, 40))))
    body: dict[str, Any] = {
        "model": "demo",
        "max_tokens": rng.choice((1, 4, 16, 64)),
        "temperature": rng.random(),
    }
    knobs: list[dict[str, Any]] = [
        {"n": 4},
        {"top_p": 0.9},
        {"top_k": 7},
        {"min_p": 0.05},
        {"seed": rng.getrandbits(32)},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"stop": ["\n", "####"]},
        {"logit_bias": {"5": -3.5}},
        {"min_tokens": 1},
        {"ignore_eos": True},
    ]
    for knob in rng.sample(knobs, rng.randrange(4)):
        body |= knob
    if rng.random() < 0.5:
        body |= {"stream": True}
    if rng.random() < 0.5:
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": rng.random() < 0.3}
        path, held = CHAT, form(rng, chat=True) if rng.random() < 0.4 else {}
    else:
        held = rng.choice(({}, {"logprobs": 3}, {"echo": True}, form(rng, chat=False)))
        path, body = COMPLETIONS, body | {"prompt": text}
    if FORMS & held.keys():
        body.pop("ignore_eos", None)  # a form needs its end
    return path, body | held, rng.choice((0, 1, 5)) if "stream" in body else 0


async def client(
    number: int, http: httpx.AsyncClient, end: float, questions: list[str], ends: Counter[str]
) -> None:
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


async def load(
    url: str, processes: dict[str, int], minutes: float, samples: IO[str]
) -> tuple[Counter[str], Memory]:
    """What requests came to, and each process's memory."""
    questions = [json.loads(row)["question"] for row in problems_file().read_text().splitlines()]
    ends: Counter[str] = Counter()
    memory = Memory(processes, samples, ends.total)
    looking, end = asyncio.create_task(memory.look()), time.monotonic() + 60 * minutes
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        await asyncio.gather(
            *(client(number, http, end, questions, ends) for number in range(CLIENTS))
        )
    looking.cancel()
    return ends, memory


def main() -> int:
    parser = arguments()
    parser.add_argument("--kv-cache-tokens", type=int, default=16_384)
    parser.add_argument("--replicas", type=int, default=1)
    given = parser.parse_args()
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
    ]
    command += [
        "--kv-cache-tokens",
        str(given.kv_cache_tokens),
        "--data-parallel-size",
        str(given.replicas),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1].removesuffix("/v1")
        httpx.post(
            url + CHAT,
            json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
            timeout=60,
        )
        children = {pid: words for pid, words in commands().items() if parent_of(pid) == server.pid}
        engines = [pid for pid, words in children.items() if "engine.process" in words]
        with open(given.samples, "w") as samples:
            processes = {"server": server.pid} | {
                f"engine {at}": pid for at, pid in enumerate(engines)
            }
            ends, memory = asyncio.run(load(url, processes, given.minutes, samples))
    finally:
        server.terminate()
        server.wait(60)
    bad = [f"{count} x {how}" for how, count in ends.items() if how not in ("200", "200 cut")]
    return tell(
        f"{given.minutes:g} minutes: {dict(sorted(ends.items()))}: {memory.line()}",
        bad + memory.faults(),
    )


if __name__ == "__main__":
    sys.exit(main())

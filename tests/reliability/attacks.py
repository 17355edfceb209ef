"""Small requests that could hold everybody, and what a bystander of the same service waits
meanwhile.

    python tests/reliability/attacks.py [--seconds 15] [--only WORD ...]

The service is the demo model's, with its real engine and what makes its masks. Attackers are a
process of their own, which asks again as soon as it is answered; the bystander is another client,
whose four kinds of requests are timed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from bare_http import CHAT, COMPLETIONS
from fake_runner import Orders
from service import Serving, commands, make_folder, own_memory, parent_of

# at p99, on two cores that nobody else has
MOST_SECONDS = {
    "health": 0.1,
    "plain": 1.0,
    "form": 3.0,
    "chat": 3.0,
}
MOST_MB = 256
AFTER = 5.0  # seconds in which memory comes back
# between two of the bystander's requests
PAUSES = {
    "health": 0.02,
    "plain": 0.2,
    "form": 0.2,
    "chat": 0.2,
}
REFUSED = {400, 413, 429, 503}
ASK = {"prompt": "x", "max_tokens": 20}
NAMES = [f"p{number}" for number in range(5000)]

Body = dict[str, Any]


@dataclass(frozen=True)
class Attack:
    """clients: how many ask at once.   body: of the n-th request.   answered: whether 200 is an
    answer too, where the work is bounded and not refused."""

    name: str
    path: str
    clients: int
    body: Callable[[int], Body]
    answered: bool = False


def _form(schema: dict[str, Any]) -> Body:
    return ASK | {"structured_outputs": {"json": schema}}


def _tags(number: int) -> Body:
    tags = [
        {"begin": f"<t{number}_{at}>", "schema": {"type": "object"}, "end": f"</t{at}>"}
        for at in range(500)
    ]
    form = {
        "type": "structural_tag",
        "structures": tags,
        "triggers": [f"<t{number}_{at}" for at in range(500)],
    }
    return {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 20,
        "response_format": form,
    }


ATTACKS = (
    Attack(
        "verbose pattern",
        COMPLETIONS,
        12,
        lambda n: ASK | {"stop_when": {"pattern": "(?x)a{4 0 0 0 0 0 0}b"}},
    ),
    Attack(
        "searches",
        COMPLETIONS,
        2,
        lambda n: (
            ASK
            | {
                "stop_when": {"pattern": r"(?:.+.+.+.+)+(?=\A)"},
                "n": 32,
                "max_tokens": 60,
                "temperature": 1,
            }
        ),
        answered=True,
    ),
    Attack(
        "multipleOf",
        COMPLETIONS,
        12,
        lambda n: _form({"type": "integer", "multipleOf": 999_983 - n % 900_000}),
    ),
    Attack(
        "5,000 properties",
        COMPLETIONS,
        12,
        lambda n: _form(
            {"type": "object", "properties": {f"{name}_{n}": {"type": "integer"} for name in NAMES}}
        ),
    ),
    Attack("500 tags", CHAT, 12, _tags),
    Attack("detokenize", "/detokenize", 4, lambda n: {"tokens": [n % 100 + 8] * 8_000_000}),
    Attack(
        "tokenize",
        "/tokenize",
        24,
        lambda n: {"prompt": f"word{n} " * 125_000, "return_token_strs": True},
        answered=True,
    ),
)


# --- the attacker's process


def attacking(url: str, name: str, seconds: float) -> tuple[dict[int, int], dict[str, int]]:
    """Asks until so many seconds are over -> how often each status,
    and each message of a refusal."""
    attack = next(each for each in ATTACKS if each.name == name)
    statuses, messages, numbers = Counter[int](), Counter[str](), itertools.count()

    async def client(http: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            answer = await http.post(attack.path, json=attack.body(next(numbers)))
            statuses[answer.status_code] += 1
            if answer.status_code != 200:
                messages[answer.json()["error"]["message"][:100]] += 1

    async def all_of_them() -> None:
        async with httpx.AsyncClient(
            base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)
        ) as http:
            await asyncio.gather(*(client(http) for _ in range(attack.clients)))

    end = time.monotonic() + seconds
    asyncio.run(all_of_them())
    return dict(statuses), dict(messages)


# --- the bystander


@dataclass
class Seen:
    """What an attack came to. waits: seconds of the bystander's requests, by kind; late: by how
    much a sleeper of its loop wakes too late, the machine's crowd. base, peak, left: MB of all
    processes of the service."""

    name: str
    waits: dict[str, list[float]] = field(
        default_factory=lambda: {kind: [] for kind in MOST_SECONDS}
    )
    late: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    base: float = 0.0
    peak: float = 0.0
    left: float = 0.0

    def line(self) -> str:
        waits = " ".join(f"{_p99(self.waits[kind]) * 1000:.0f}" for kind in MOST_SECONDS)
        codes = ", ".join(
            f"{count:,} x {status}" for status, count in sorted(self.statuses.items())
        )
        return f"{self.name}: {waits} ms, +{self.peak - self.base:.0f} MB, {codes or 'nobody'}"

    def faults(self, answered: bool) -> list[str]:
        """What is past its bound; the bystander's loop's own lateness isn't the service's."""
        found = [
            f"{self.name}: {kind} p99 {_p99(waits):.2f} s"
            for kind, waits in self.waits.items()
            if _p99(waits) - _p99(self.late) > MOST_SECONDS[kind]
        ]
        if self.peak - self.base > MOST_MB:
            found.append(f"{self.name}: memory rose by {self.peak - self.base:.0f} MB")
        if strange := set(self.statuses) - REFUSED - ({200} if answered else set()):
            found.append(f"{self.name}: answered with {strange}")
        return found + self.wrong


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.99))] if seconds else 0.0


def _asks(http: httpx.AsyncClient, kind: str) -> Iterator[Awaitable[httpx.Response]]:
    """Yields the bystander's requests of a kind; forms are new each time."""
    for number in itertools.count():
        if kind == "health":
            yield http.get("/health/live")
        elif kind == "plain":
            yield http.post(COMPLETIONS, json={"prompt": "Is 7", "max_tokens": 8})
        elif kind == "form":
            named = {f"a{number}_{time.monotonic_ns()}": {"enum": ["x", "y"]}}
            schema = {
                "type": "object",
                "properties": named,
                "required": list(named),
                "additionalProperties": False,
            }
            yield http.post(
                COMPLETIONS,
                json={"max_tokens": 60, "prompt": "x", "structured_outputs": {"json": schema}},
            )
        else:
            yield http.post(
                CHAT,
                json={"messages": [{"role": "user", "content": f"hi {number}"}], "max_tokens": 8},
            )


async def _stand_by(url: str, root: int, end: float, seen: Seen) -> None:
    async def probe(http: httpx.AsyncClient, kind: str) -> None:
        for asked in _asks(http, kind):
            if time.monotonic() > end:
                asked.close()  # type: ignore[attr-defined]  # a coroutine that nobody awaits
                return
            begun = time.monotonic()
            answer = await asked
            seen.waits[kind].append(time.monotonic() - begun)
            if answer.status_code != 200:
                seen.wrong.append(
                    f"{seen.name}: {kind} got {answer.status_code}: {answer.text[:100]}"
                )
            await asyncio.sleep(PAUSES[kind])

    async def look() -> None:
        while time.monotonic() < end:
            seen.peak = max(seen.peak, _megabytes(root))
            due = time.monotonic() + 0.05
            await asyncio.sleep(0.05)
            seen.late.append(max(0.0, time.monotonic() - due))

    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        await asyncio.gather(look(), *(probe(http, kind) for kind in MOST_SECONDS))


def _megabytes(root: int) -> float:
    """Own memory of a process and all below it."""
    mine = {root}
    listed = list(commands())
    while more := {pid for pid in listed if pid not in mine and parent_of(pid) in mine}:
        mine |= more
    total = 0.0
    for pid in mine:
        try:
            total += own_memory(pid)
        except (OSError, ValueError):
            continue  # it went meanwhile
    return total


# --- all of it


@dataclass
class Attacks:
    seen: list[Seen] = field(default_factory=list)

    def line(self) -> str:
        return "; ".join(each.line() for each in self.seen)

    def faults(self) -> list[str]:
        answered = {attack.name: attack.answered for attack in ATTACKS}
        return [fault for each in self.seen for fault in each.faults(answered.get(each.name, True))]


def run(folder: Path, seconds: float, only: list[str] | None = None) -> Attacks:
    """A bystander alone, then beside each attack for so many seconds."""
    make_folder(folder, Orders())
    chosen = [each.name for each in ATTACKS if not only or any(word in each.name for word in only)]
    made = Attacks()
    with (
        Serving(folder, model="demo", knobs={"kv_cache_tokens": 65_536}) as serving,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as attacker,
    ):
        root = serving.process.pid
        asyncio.run(_stand_by(serving.url, root, time.monotonic() + 3, Seen("warm")))
        for name in ["no attack", *chosen]:
            seen = Seen(name, base=_megabytes(root))
            attack = (
                None
                if name == "no attack"
                else attacker.submit(attacking, serving.url, name, seconds)
            )
            asyncio.run(_stand_by(serving.url, root, time.monotonic() + seconds, seen))
            if attack is not None:
                seen.statuses, seen.messages = attack.result()
            time.sleep(AFTER if attack is not None else 0.0)
            seen.left = _megabytes(root)
            made.seen.append(seen)
    return made


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack")
    parser.add_argument("--only", nargs="*", help="attacks whose name has one of these words")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = run(Path(folder), asked.seconds, asked.only)
    for seen in made.seen:
        print(
            f"{seen.line()}; {seen.left - seen.base:+.0f} MB afterwards; the loop"
            f" {_p99(seen.late) * 1000:.0f} ms late"
        )
        for message, count in seen.messages.items():
            print(f"    {count} x {json.dumps(message)}")
    for fault in made.faults():
        print("fault:", fault)
    return bool(made.faults())


if __name__ == "__main__":
    sys.exit(main())

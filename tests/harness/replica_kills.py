"""A service of two replicas behind two servers, under load of whole answers and streams: replicas
are killed and stopped at random moments, and restarted in turn. Whole answers are all right; a
stream is right or told of a death; the server keeps no memory, no descriptor and no shared file of
a dead one.

It knows a service and its waiters; `run` is a part of `make reliability`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from deaths import SHM
from fake_runner import Orders, expected
from service import (
    COMPLETIONS,
    HANG,
    Serving,
    alive,
    descriptors,
    make_folder,
    own_memory,
    wait_until,
)

TWO = {"data_parallel_size": 2}
TOKENS = 20
KEPT = 32.0  # MB that a server may grow by meanwhile
BACK_WITHIN = 30.0  # seconds from a death until all are ready


class Load:
    """Requests, some at a time, from a thread of its own until told to stop. streams: every second
    of those at once reads events."""

    def __init__(
        self, url: str, words: list[int], at_once: int = 6, *, streams: bool = False
    ) -> None:
        self.answered = self.told = 0
        self.wrong = list[str]()
        self._url, self._words, self._streams, self._going = url, words, streams, True
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all(at_once)), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._going = False
        self._thread.join(HANG)
        assert not self._thread.is_alive()

    async def _all(self, at_once: int) -> None:
        async with httpx.AsyncClient(timeout=HANG, trust_env=False) as client:
            await asyncio.gather(*(self._some(client, first) for first in range(at_once)))

    async def _some(self, client: httpx.AsyncClient, number: int) -> None:
        stream = self._streams and number % 2 == 1
        while self._going:
            number += 10
            samples, prompt = 1 + number % 3, [number % 250] * 20
            body = {
                "prompt": prompt,
                "max_tokens": TOKENS,
                "n": samples,
                "seed": number,
                "return_token_ids": True,
            }
            answer = await client.post(self._url + COMPLETIONS, json={**body, "stream": stream})
            right = [
                expected(prompt, TOKENS, self._words, number, sample) for sample in range(samples)
            ]
            found = (
                _ids(answer.text, samples)
                if stream
                else [c["token_ids"] for c in answer.json().get("choices", ())]
            )
            if found == right:
                self.answered += 1
            elif stream and '"replica_died"' in answer.text:
                self.told += 1
            else:
                self.wrong.append(f"{answer.status_code}: {answer.text[:200]}")


def _ids(page: str, samples: int) -> list[list[int]]:
    """Token ids of a stream's events, a list a sample; none where it has no end."""
    found: list[list[int]] = [[] for _ in range(samples)]
    events = [line[6:] for line in page.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return []
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            found[choice["index"]] += choice["token_ids"] or []
    return found


def health(serving: Serving) -> dict[str, Any]:
    answer = httpx.get(serving.url + "/health", timeout=HANG)
    found: dict[str, Any] = answer.json()
    assert answer.status_code == (200 if found["ready"] else 503)
    return found


def both_ready(serving: Serving) -> bool:
    """Whether each server says so: connections spread over them."""
    return all(
        health(serving) == {"ready": True, "replicas": 2, "replicas_ready": 2} for _ in range(6)
    )


@dataclass
class Kills:
    """What came of it."""

    deaths: int
    answered: int = 0
    told: int = 0
    slowest: float = 0.0  # seconds from a death until both were ready
    grown: float = 0.0  # MB, of the server that grew the most
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        return (
            f"{self.deaths} deaths: {self.answered:,} answers right, {self.told} streams told of"
            f" one, both ready again within {self.slowest:.1f} s; servers {self.grown:+.0f} MB at"
            " most"
        )

    def faults(self) -> list[str]:
        return self.wrong[:5]


def run(folder: Path, kills: int, restarts: int, seed: int = 7) -> Kills:
    """So many deaths by SIGKILL, as many by SIGSTOP between them, and rolling restarts."""
    words, draw = make_folder(folder, Orders(step_seconds=0.004), longest=512), random.Random(seed)
    made, before = Kills(2 * kills), set(SHM.iterdir())
    with Serving(
        folder, servers=2, knobs=TWO, limits={"step_timeout": 1.0}, short_pauses=True
    ) as serving:
        assert both_ready(serving)
        kept = {
            pid: (own_memory(pid), descriptors(pid))
            for pid in (serving.process.pid, *serving.workers)
        }
        load, children = Load(serving.url, words, 12, streams=True), set(serving.children)
        for number in range(2 * kills):
            time.sleep(draw.random() * 0.5)
            engines = serving.engines
            os.kill(draw.choice(engines), signal.SIGSTOP if number % 2 else signal.SIGKILL)
            if wait_until(lambda known=engines: serving.engines != known, BACK_WITHIN) is None:  # type: ignore[misc]
                made.wrong.append(f"death {number}: it was not seen")
            back = wait_until(lambda: both_ready(serving), BACK_WITHIN)
            made.slowest = max(made.slowest, BACK_WITHIN if back is None else back)
            if back is None:
                made.wrong.append(f"death {number}: it did not come back")
            children |= set(serving.children)
        for number in range(restarts):
            httpx.post(serving.url + "/admin/restart")
            said = wait_until(
                lambda n=number: serving.stderr().count("all replicas were restarted") > n, 60
            )  # type: ignore[misc]
            made.wrong += [] if said is not None else [f"restart {number}: it did not end"]
        load.stop()
        made.answered, made.told = load.answered, load.told
        made.wrong += load.wrong
        made.wrong += (
            [] if wait_until(serving.at_rest, 10) is not None else ["rows or blocks were left"]
        )
        made.grown = max(own_memory(pid) - memory for pid, (memory, _) in kept.items())
        made.wrong += [] if made.grown < KEPT else [f"a server grew by {made.grown:.0f} MB"]
        if (
            wait_until(
                lambda: all(descriptors(pid) <= known for pid, (_, known) in kept.items()), 10
            )
            is None
        ):
            made.wrong.append(
                "descriptors were left:"
                f" {[descriptors(pid) - known for pid, (_, known) in kept.items()]}"
            )
        children |= set(serving.children)
    left = [pid for pid in children if alive(pid)]
    made.wrong += [f"{len(left)} processes were left"] if left else []
    files = set(SHM.iterdir()) - before
    made.wrong += [f"{len(files)} files were left in {SHM}"] if files else []
    return made

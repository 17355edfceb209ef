"""What a death leaves on a GPU: nothing. An engine that is killed, one that is stopped, and one
whose server is killed, each under load behind `penstock serve`: waiters hear of it, the process
ends with an error, the memory is back.

The three services run beside each other from the start and are broken one after the other. What is
looked at is the whole GPU's free memory, and other tests run beside this one: each engine holds far
more than they come and go with.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

for needed in (
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "typer",
    "prometheus_client",
    "httpx",
    "tokenizers",
):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"the server needs {needed}", allow_module_level=True)

from service import alive, commands, parent_of, wait_until  # noqa: E402

TOKEN_BYTES = 8 * 2 * 2 * 64 * 2  # K and V of a token of the demo model in bfloat16
MOST_TOKENS = 4_000_000  # of each cache: 16 GB
SHARE = 0.15  # of what is free, on a smaller GPU
STEP_TIMEOUT = 1.5
TOLD_WITHIN, ENDED_WITHIN, FREE_WITHIN = 2.0, 5.0, 5.0  # seconds
WAITERS = 4
ASKED = json.dumps(
    {
        "prompt": [5, 6, 7],
        "max_tokens": 2_000,
        "n": 3,
        "ignore_eos": True,
        "stream": True,
        "temperature": 1,
    }
)


class Served:
    """A service with its engine on the GPU, and clients that ask again and again until something
    ends them."""

    def __init__(self, folder: Path, name: str, tokens: int) -> None:
        self._err = folder / name
        command = [
            sys.executable,
            "-m",
            "penstock",
            "serve",
            "demo",
            "--device",
            "cuda",
            "--dtype",
            "bfloat16",
        ]
        command += [
            "--port",
            "0",
            "--kv-cache-tokens",
            str(tokens),
            "--step-timeout",
            str(STEP_TIMEOUT),
        ]
        command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "2048"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=err, text=True, env=env
            )
        self.engine = 0
        self.begun = threading.Semaphore(0)  # once for each answer that has begun
        self.ends: list[tuple[str, float]] = []
        self._port = 0
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(WAITERS)]

    def run(self, deadline: float) -> None:
        """Waits until it serves, and loads it."""
        assert self.process.stdout is not None
        ready, _, _ = select.select(
            [self.process.stdout], [], [], max(0.0, deadline - time.monotonic())
        )
        line = self.process.stdout.readline() if ready else ""
        assert line.startswith("penstock serves demo at "), (line, self.said())
        self._port = int(line.split()[-1].removesuffix("/v1").rsplit(":", 1)[1])
        children = {
            pid: words for pid, words in commands().items() if parent_of(pid) == self.process.pid
        }
        (self.engine,) = (pid for pid, words in children.items() if "engine.process" in words)
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self.begun.acquire(timeout=600), self.said()

    def told(self, known: float) -> float:
        """Seconds from `known` until the last client had its end."""
        for thread in self._threads:
            thread.join(STEP_TIMEOUT + 20)
        assert len(self.ends) == WAITERS, (
            f"{WAITERS - len(self.ends)} clients still wait: {self.said()}"
        )
        return max(at for _, at in self.ends) - known

    def said(self) -> str:
        return self._err.read_text()

    def clear(self) -> None:
        for pid in (self.process.pid, self.engine):
            if pid and alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _ask_on(self) -> None:
        how = "answered"
        while how == "answered":
            how = self._ask()
        self.ends.append((how, time.monotonic()))

    def _ask(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        fresh = True
        try:
            connection.request(
                "POST", "/v1/completions", ASKED, {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != 200:
                return "error" if b'"engine_dead"' in answer.read() else f"status {answer.status}"
            for line in answer:
                if b'"error"' in line:
                    return "error" if b'"engine_dead"' in line else line.decode()
                if fresh and line.startswith(b"data: {"):
                    fresh = False
                    self.begun.release()
            return "answered"
        except (OSError, http.client.HTTPException):
            return "torn"
        finally:
            connection.close()


def _free() -> int:
    """Bytes that are free on the GPU, whoever has the rest."""
    return int(torch.cuda.mem_get_info()[0])


@pytest.fixture
def tokens() -> int:
    """Of each engine's cache. The first look makes this process's own context, which takes memory
    too."""
    return min(MOST_TOKENS, int(SHARE * _free()) // TOKEN_BYTES)


@pytest.fixture
def services(tmp_path: Path, tokens: int) -> Iterator[dict[str, Served]]:
    """Under load, by what is to become of them; all three load at once."""
    made = {
        how: Served(tmp_path, how, tokens)
        for how in ("engine killed", "engine stopped", "server killed")
    }
    try:
        deadline = time.monotonic() + 120
        for each in made.values():
            each.run(deadline)
        yield made
    finally:
        for each in made.values():
            each.clear()


def test_a_death_leaves_no_memory_behind(services: dict[str, Served], tokens: int) -> None:
    for how, served in services.items():
        before, at = _free(), time.monotonic()
        victim = served.process.pid if how == "server killed" else served.engine
        os.kill(victim, signal.SIGSTOP if how == "engine stopped" else signal.SIGKILL)
        # A hang can be known once a step is overdue: what counts is from there on.
        known = at + (STEP_TIMEOUT if how == "engine stopped" else 0.0)
        told = served.told(known)
        code = served.process.wait(600)
        ended = time.monotonic() - known
        most = 0.75 * tokens * TOKEN_BYTES  # tests beside this one may take some of it at once
        back = wait_until(lambda before=before, most=most: _free() - before > most, FREE_WITHIN)
        print(f"{how}: told {told:.2f} s, ended {ended:.2f} s, code {code}")
        ends = {"torn"} if how == "server killed" else {"error"}
        assert {kind for kind, _ in served.ends} == ends, served.ends
        assert told < TOLD_WITHIN and ended < ENDED_WITHIN, (how, told, ended)
        assert (
            wait_until(lambda served=served: not alive(served.engine), FREE_WITHIN) is not None
        ), f"{how}: it lives"
        assert back is not None, f"{how}: {(_free() - before) / 1e9:.1f} GB came back"
        if how == "server killed":
            assert code == -signal.SIGKILL
        else:
            assert code > 0 and "the engine died while serving" in served.said(), (
                code,
                served.said(),
            )

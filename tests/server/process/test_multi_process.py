"""`serve` with two server processes over one engine: the real scheduler and channel, a runner that keeps a pace.

The runner is the benchmarks' (streams_engine.py): step k gives every row the token of letter k, so a stream that got
another one's tokens, or missed some, would not count on through the alphabet.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from server_fake import make_tokenizer

from penstock.errors import CapacityError, UsageError
from penstock.server.process.multi_process import share_port

pytestmark = pytest.mark.torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COMPLETIONS = "/v1/completions"
SERVERS = 2
SERVE = """
import sys
from penstock.config import Config
from penstock.engine.launch import ENGINE
from penstock.errors import PenstockError
from penstock.server.process.serve import serve
engine = (sys.executable, sys.argv[2]) if len(sys.argv) > 2 else ENGINE
try:
    serve(Config.of(model=sys.argv[1]), port=0, served_model_name="fake", api_server_count=2, engine=engine)
except PenstockError as error:
    print("error:", error, flush=True)
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("fake")
    words = make_tokenizer(found).encode(LETTERS)
    pace = {"rate": 100, "rows": 64, "longest": 2000, "vocab_size": 256, "words": words, "log": str(found / "steps")}
    (found / "pace.json").write_text(json.dumps(pace))
    np.zeros(1_000_000).tofile(found / "steps")
    return found


TOLD = "penstock: lets running requests end, for 30 s at most; a second signal ends it at once\n"


class Serving:
    """A service of two servers and its processes."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", SERVE, str(folder), str(BENCHMARKS / "streams_engine.py")]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said.startswith("penstock serves fake at http://127.0.0.1:"), said
        self.url = said.split()[-1].removesuffix("/v1")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        named = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        (self.engine,) = (pid for pid, words in named.items() if "streams_engine" in words)
        self.workers = [pid for pid, words in named.items() if "server.process.worker" in words]
        assert len(self.workers) == SERVERS and len(named) == SERVERS + 1

    def end(self, number: int | None = None) -> tuple[int, str, str]:
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err

    @property
    def alive(self) -> list[int]:
        """Its processes that have not gone."""
        return [pid for pid in (self.process.pid, self.engine, *self.workers) if runs(pid)]


def runs(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def connections(pid: int) -> int:
    with os.scandir(f"/proc/{pid}/fd") as found:
        return sum(os.readlink(each.path).startswith("socket:") for each in found)


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Serving]:
    made = Serving(folder)
    try:
        yield made
    finally:
        ended = made.end(signal.SIGTERM)
    assert ended == (0, "", TOLD)
    assert not made.alive


@pytest.fixture
def doomed(folder: Path) -> Iterator[Serving]:
    """A service that the test ends."""
    made = Serving(folder)
    yield made
    made.process.kill()
    made.process.communicate(timeout=120)
    wait_until(lambda: not made.alive)


def wait_until(condition: Any) -> None:
    while not condition():
        time.sleep(0.02)


def metric(url: str, name: str) -> float:
    """The metric of one answer, on a connection of its own: of whichever server takes it."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"penstock:{name}{{"))


class Reader(threading.Thread):
    """A stream on a connection of its own, read to its end."""

    def __init__(self, url: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.tokens = url, tokens
        self.text, self.done, self.error, self.left = "", False, "", False
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        body = {"prompt": "x", "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", self.url + COMPLETIONS, json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    self.take(line)
                    self.begun.set()
                    if self.left:
                        return
        except httpx.HTTPError as error:
            self.error = type(error).__name__
        self.begun.set()

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line:
            event = json.loads(line.removeprefix("data: "))
            self.error = event.get("error", {}).get("code", "")
            self.text += "".join(choice["text"] for choice in event.get("choices", ()))

    @property
    def whole(self) -> bool:
        at = LETTERS.index(self.text[0]) if self.text else 0
        counted = "".join(LETTERS[(at + k) % 26] for k in range(self.tokens))
        return self.done and self.text == counted and not self.error


def readers_of_both(serving: Serving, tokens: int) -> list[Reader]:
    """Running streams: some on each server."""
    before = [connections(pid) for pid in serving.workers]
    found: list[Reader] = []
    while min(connections(pid) - was for pid, was in zip(serving.workers, before, strict=True)) < 3:
        found.append(Reader(serving.url, tokens))
        assert found[-1].begun.wait(60)
    return found


def test_every_stream_gets_its_own_tokens_whichever_server_has_it(serving: Serving) -> None:
    with ThreadPoolExecutor(24) as pool:
        readers = list(pool.map(lambda at: Reader(serving.url, 5 + at), range(48)))
        for reader in readers:
            reader.join(60)
    assert all(reader.whole for reader in readers), [(r.text, r.tokens, r.error) for r in readers if not r.whole]


def test_connections_spread_and_readers_that_leave_free_their_rows_on_either_server(serving: Serving) -> None:
    readers = readers_of_both(serving, 1900)
    wait_until(lambda: metric(serving.url, "num_requests_running") == len(readers))  # it comes up every 0.1 s
    for reader in readers[1:]:
        reader.left = True
    wait_until(lambda: metric(serving.url, "num_requests_running") == 1)
    readers[0].left = True
    wait_until(lambda: metric(serving.url, "num_requests_running") == 0)
    assert metric(serving.url, "kv_cache_usage_perc") == 0


def test_each_server_tells_the_sums_of_all(serving: Serving) -> None:
    count = metric(serving.url, "e2e_request_latency_seconds_count")
    made = metric(serving.url, "request_generation_tokens_sum")
    for _ in range(20):
        assert httpx.post(serving.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 3}).status_code == 200

    def sums() -> set[tuple[float, ...]]:
        names = ("e2e_request_latency_seconds_count", "request_generation_tokens_sum", "request_success_total")
        return {tuple(metric(serving.url, name) for name in names) for _ in range(8)}

    wait_until(lambda: len(sums()) == 1)  # within a tenth of a second
    ((ended, tokens, successes),) = sums()
    assert (ended - count, tokens - made) == (20, 60) and successes >= 20
    answers = {httpx.get(serving.url + "/health").status_code for _ in range(8)}
    assert answers == {200}


def test_a_signal_lets_running_streams_of_all_servers_end(doomed: Serving) -> None:
    readers = readers_of_both(doomed, 150)
    for pid in (doomed.engine, *doomed.workers):
        os.kill(pid, signal.SIGHUP)  # as a service manager or a terminal does; they wait for their parent's word
    assert doomed.end(signal.SIGHUP) == (0, "", TOLD)
    for reader in readers:
        reader.join(60)
    assert all(reader.whole for reader in readers)
    assert not doomed.alive


def test_an_engine_that_is_killed_while_streams_end_is_no_clean_end(doomed: Serving) -> None:
    readers = readers_of_both(doomed, 1900)
    doomed.process.send_signal(signal.SIGTERM)
    wait_until(lambda: refuses(doomed.url))
    os.kill(doomed.engine, signal.SIGKILL)
    status, out, err = doomed.end()
    assert (status, err) == (1, TOLD) and out.startswith("error: the engine died") and out.count("\n") == 1
    for reader in readers:
        reader.join(60)
    assert {reader.error for reader in readers} == {"engine_dead"}
    assert not doomed.alive


def refuses(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_killed_server_ends_the_service_and_the_others_streams_first(doomed: Serving) -> None:
    readers = readers_of_both(doomed, 400)
    os.kill(doomed.workers[0], signal.SIGKILL)
    status, out, err = doomed.end()
    assert (status, err) == (1, "")
    assert out == "error: API server 0 of 2 ended with code -9 while serving, and the service with it: start it again\n"
    for reader in readers:
        reader.join(60)
    cut = [reader for reader in readers if not reader.whole]
    assert len(cut) >= 3 and len(readers) - len(cut) >= 3  # those of the other server got all of their tokens
    assert all(reader.error.endswith("Error") for reader in cut)
    assert not doomed.alive


def test_what_fails_at_the_start_is_one_line(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", SERVE, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stdout.startswith("error: ") and ended.stdout.count("\n") == 1
    assert ended.stderr == ""


def test_a_shared_port_is_shared_with_nobody_else() -> None:
    with share_port("127.0.0.1", 0, 3) as listeners:
        (address,) = {listener.getsockname() for listener in listeners}
        for state in ("bound", "listening"):
            if state == "listening":
                listeners[0].listen()
            with pytest.raises(CapacityError, match=f"port {address[1]}"), share_port("127.0.0.1", address[1], 2):
                pass
    with share_port("127.0.0.1", address[1], 2):
        pass


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_count_that_cannot_be_is_refused(count: int) -> None:
    from penstock.config import Config
    from penstock.server.process.serve import serve

    with pytest.raises(UsageError, match="api_server_count"):
        serve(Config.of(), port=0, api_server_count=count)

"""A server in its own process group. It is started by a command and polled until it serves. If the
bench is killed, a guard process ends the server. Its log is kept. Knows a command, a port and
HTTP's GET; not the engine.
"""

from __future__ import annotations

import errno
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.children.spawn import how_ended
from penstock.errors import EngineError

HOST = "127.0.0.1"
# seconds to wait until the server answers; seconds between two polls
LOAD_PATIENCE, BETWEEN = (600.0, 0.1)
STOP_PATIENCE = 15.0
LOG_TAIL = 4000  # characters kept of the end of a server's log
LONGEST_BODY = 16 << 20  # most bytes of a server's answer to a GET


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def tail_of(log: Path) -> str:
    """Returns the last characters of a log; empty where there is none."""
    if not log.exists():
        return ""
    with log.open("rb") as data:
        data.seek(0, os.SEEK_END)
        data.seek(max(0, data.tell() - 4 * LOG_TAIL))
        return data.read().decode(errors="replace")[-LOG_TAIL:]


@dataclass
class ServerProcess:
    """A running server; leaving the context ends it. log: the file of its output. ready: a path
    that answers 200 once it serves. stop: the signal that asks it to end. cores: cores to run on;
    empty: any.
    """

    command: list[str]
    port: int
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    ready: str = "/health"
    stop: signal.Signals = signal.SIGTERM
    cores: Sequence[int] = ()

    def __enter__(self) -> ServerProcess:
        until = time.monotonic() + LOAD_PATIENCE
        cores = ",".join(map(str, self.cores)) or "all"
        guarded = [sys.executable, "-m", "penstock.bench.process_guard", cores, *self.command]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                guarded,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        try:
            while not self._answers():
                if self.ended(BETWEEN):
                    last = (self.tail().strip().splitlines() or ["it said nothing"])[-1]
                    code = self._process.returncode
                    raise EngineError(
                        f"the server {how_ended(code)}: {last[:300]} (all in {self.log})"
                    )
                if time.monotonic() > until:
                    raise EngineError(
                        f"the server was not ready after {LOAD_PATIENCE:.0f} s: see {self.log}"
                    )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Asks the server to end, then kills its whole process group."""
        for number in (self.stop, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            self.ended(STOP_PATIENCE)
        if self._process.stdin is not None:
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self, patience: float) -> bool:
        """Returns True if the process has ended, or ends within `patience` seconds."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tail(self) -> str:
        """Returns the end of the server's log."""
        return tail_of(self.log)

    def get(self, path: str) -> str:
        """Returns the body of a GET. Raises OSError (urllib's errors included) unless the answer is
        a 200 with at most LONGEST_BODY bytes of UTF-8."""
        # ignore the machine's proxy settings
        straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with straight.open(f"http://{HOST}:{self.port}{path}", timeout=20) as answer:
            body: bytes = answer.read(LONGEST_BODY + 1)
        if len(body) > LONGEST_BODY:
            raise OSError(errno.EFBIG, f"{path} is answered with more than {LONGEST_BODY} bytes")
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            raise OSError(errno.EILSEQ, f"{path} is answered with what is no text") from error

    def _answers(self) -> bool:
        try:
            self.get(self.ready)
        except (OSError, http.client.HTTPException):
            return False
        return True

"""A whole service over the fake engine, in processes of its own: started, watched, broken and ended
by a test.

It knows the command line of a server, /proc and HTTP; what is tried on the service is its callers'.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec
from fake_runner import SHAPE, Orders, Shape, write_orders
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

HERE = Path(__file__).parent
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COMPLETIONS = "/v1/completions"
HANG = 600.0  # seconds
SERVE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from fake_process import COMMAND
from penstock.config import Config
from penstock.engine.launch import ENGINE
from penstock.errors import PenstockError
from penstock.server.openai.http_limits import HttpLimits
from penstock.server.api_server.serve import serve
said = json.loads(sys.argv[2])
if said["short_pauses"]:
    from penstock.replicas import supervisor
    supervisor.FIRST_PAUSE, supervisor.LONGEST_PAUSE = 0.1, 0.5
try:
    config = Config.of(model=said["model"] or said["folder"], **said["knobs"])
    limits = HttpLimits(**said["limits"])
    engine = ENGINE if said["model"] else COMMAND
    serve(config, port=said["port"], served_model_name="fake", engine=engine, limits=limits, **said["more"])
except PenstockError as error:
    print("error:", error, flush=True)
    sys.exit(error.exit_code)
"""


def make_folder(folder: Path, orders: Orders | None = None, **shape: Any) -> list[int]:
    """A tokenizer of one token a byte, the fake's shape and its first orders -> the ids of the
    letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.save(str(folder / "tokenizer.json"))
    words = [alphabet.index(letter) for letter in LETTERS]
    (folder / SHAPE).write_bytes(msgspec.json.encode(Shape(words=words, **shape)))
    write_orders(folder, orders or Orders())
    return words


class Serving:
    """A service that serves; its processes by their roles. Leaving the block ends it, and says what
    was left behind."""

    def __init__(
        self,
        folder: Path,
        *,
        servers: int = 1,
        limits: dict[str, Any] | None = None,
        knobs: dict[str, Any] | None = None,
        port: int = 0,
        short_pauses: bool = False,
        model: str | None = None,
        **more: Any,
    ) -> None:
        """short_pauses: before a replica that ended is started again.   model: a real one, with the
        real engine."""
        self.folder = folder
        self._serial = msgspec.json.decode(
            (folder / "orders.json").read_bytes(), type=Orders
        ).serial
        more["api_server_count"] = servers
        if not more.keys() & {"api_key", "api_key_file"} and "PENSTOCK_API_KEY" not in os.environ:
            more.setdefault("allow_admin_without_key", True)
        said = {
            "folder": str(folder),
            "limits": limits or {},
            "knobs": knobs or {},
            "port": port,
            "more": more,
            "short_pauses": short_pauses,
            "model": model,
        }
        command = [sys.executable, "-c", SERVE, str(HERE), msgspec.json.encode(said).decode()]
        self.err = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.err, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("penstock serves fake at "):
            self.process.kill()
            raise AssertionError(f"the service said {line!r} and {self.stderr()!r}")
        self.url = line.split()[-1].removesuffix("/v1")
        named = self._named()
        self.engine, *others = self.engines
        self.workers = [pid for pid, words in named.items() if "server.api_server.worker" in words]
        assert len(self.workers) == (servers if servers > 1 else 0)
        assert len(others) + 1 == (knobs or {}).get("data_parallel_size", 1)
        assert len(named) == len(self.workers) + 1 + len(others)

    def _named(self) -> dict[int, str]:
        return {
            pid: words
            for pid, words in commands().items()
            if parent_of(pid) == self.process.pid and "sandbox.sandbox_process" not in words
        }

    @property
    def engines(self) -> list[int]:
        """Those that run now."""
        named = self._named().items()
        return sorted(
            pid for pid, words in named if "fake_process" in words or "engine.process" in words
        )

    @property
    def ranks(self) -> list[int]:
        """Those that run now of ranks other than 0, which are the engines."""
        engines = self.engines
        return sorted(
            p
            for p, words in commands().items()
            if "rank_process" in words and parent_of(p) in engines
        )

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            time.sleep(0.05)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.err.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def children(self) -> list[int]:
        return [*self.engines, *self.ranks, *self.workers]

    def order(self, **orders: Any) -> None:
        """New orders; a fault gets a serial of its own."""
        self._serial += bool(orders.get("fault"))
        write_orders(self.folder, Orders(serial=self._serial, **orders))

    def stderr(self) -> str:
        self.err.flush()
        return (self.folder / "stderr").read_text()

    def ended(self, timeout: float = HANG) -> tuple[int, str]:
        """Waits for the end of the service's own process: its code, and what it said."""
        out, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, out

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels, the model's left out."""
        return read_metrics(httpx.get(self.url + "/metrics", timeout=HANG).text)

    def at_rest(self) -> bool:
        """The engines' own numbers say that nothing runs or waits and that all blocks are free."""
        said = self.metrics()
        names = tuple(
            f"penstock:{n}"
            for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )
        found = [value for name, value in said.items() if name.startswith(names)]
        return len(found) == len(names) * len(self.engines) and not any(found)


def read_metrics(page: str) -> dict[str, float]:
    found = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.replace('model_name="fake"', "").replace("{}", "").replace(",}", "}")] = (
                float(value)
            )
    return found


def commands() -> dict[int, str]:
    """The command line of every process of ours that is no zombie."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_text()
            except OSError:
                continue  # it went meanwhile
    return {pid: words for pid, words in found.items() if words}


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def alive(pid: int) -> bool:
    """A zombie is dead: it waits for its parent to look, and holds neither memory nor files."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> float | None:
    """Seconds until it held, or None where it didn't in that time."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if condition():
            return time.monotonic() - began
        time.sleep(0.01)
    return None


def until(condition: Callable[[], bool]) -> None:
    """Waits until it holds. The limit ends a test that would never end;
    no sound run comes near it."""
    assert wait_until(condition, HANG) is not None, f"not so after {HANG:.0f} s"


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory(pid: int) -> int:
    """Bytes that are resident."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def own_memory(pid: int) -> float:
    """MB that are resident and no file's."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20

"""Measures streams at full rate without a GPU: the delay of events behind the engine, and their
cost.

    python benchmarks/streams.py --streams 1000 --rate 50 --api-server-count 1

Everything is real but the runner: sockets, uvicorn, routes, text, the channel, the engine's loop
and the scheduler. The runner keeps a pace (streams_engine.py) and records when each step was ready;
clients (streams_client.py) record when each event arrived; all processes of a machine share the
monotonic clock, and a token's text names its step. A token's delay runs from its step's readiness
to its event's arrival, so it includes the commit, both processes, the sockets and the client's own
wake-up. A stream that is behind gets several tokens in one event; each of them counts. Figures are
of a window that begins a second after the last stream's first token.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from random_tokenizer import write_tokenizer
from streams_engine import MAX_STEPS

from penstock.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
PROMPT = 32  # tokens
WORDS = 1024  # steps until a token comes again: a delay up to WORDS / rate seconds is told rightly
LETTERS = 4  # of a word
VOCABULARY = 128_256
SETTLE = 1.0  # seconds after the last stream's first token
TICK = 1.0 / os.sysconf("SC_CLK_TCK")
SERVE = """
import json, sys
from penstock.config import Config
from penstock.server.api_server.serve import serve
folder, engine, more = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
serve(Config.of(model=folder), port=0, served_model_name="fake", engine=(sys.executable, engine), **more)
"""


def write_folder(folder: Path, args: argparse.Namespace) -> list[str]:
    """Writes a tokenizer, a pace and an empty log of steps; returns the texts of the tokens."""
    write_tokenizer(folder, args.detokenize, VOCABULARY)
    texts = {
        i: piece.decode("ascii", "replace")
        for i, piece in enumerate(Tokenizer.load(folder).token_bytes)
    }
    words = {
        text: i
        for i, text in texts.items()
        if len(text) == LETTERS and text.isascii() and text.isalpha()
    }
    chosen = sorted(word for word in words if word.islower())[:: max(1, len(words) // WORDS // 2)][
        :WORDS
    ]
    if len(chosen) < WORDS // 2:
        raise SystemExit(
            f"the tokenizer has only {len(chosen)} tokens of {LETTERS} letters: give another"
            " --detokenize"
        )
    log = folder / "steps"
    np.zeros(MAX_STEPS).tofile(log)
    pace = {
        "rate": args.rate,
        "rows": args.streams,
        "longest": PROMPT + tokens_of(args) + 1,
        "vocab_size": VOCABULARY,
        "words": [words[word] for word in chosen],
        "log": str(log),
    }
    (folder / "pace.json").write_text(json.dumps(pace))
    return chosen


def tokens_of(args: argparse.Namespace) -> int:
    """Returns a stream's tokens: enough that all streams still run at the window's end."""
    return int(args.rate * (args.seconds + SETTLE + 2.0))


class CpuLog(threading.Thread):
    """Samples CPU seconds of the server's processes by role."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root, self.rows, self.over = root, [], threading.Event()  # type: ignore[var-annotated]

    def run(self) -> None:
        while not self.over.wait(0.2):
            try:
                self.rows.append((time.monotonic(), _cpu_of(self.root)))
            except OSError:  # a process ended while it was read
                continue

    def between(self, begin: float, end: float) -> dict[str, list[float]]:
        """Returns the number of cores that each process used in the window, by role."""
        inside = [row for row in self.rows if begin <= row[0] <= end]
        (t0, first), (t1, last) = inside[0], inside[-1]
        out: dict[str, list[float]] = {}
        for pid, (role, cpu) in last.items():
            out.setdefault(role, []).append((cpu - first[pid][1]) / (t1 - t0))
        return out


def _cpu_of(pid: int) -> dict[int, tuple[str, float]]:
    """Returns pid -> (role, CPU seconds) of a process and all its descendants."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    role = "engine" if words[1].endswith("streams_engine.py") else "server"
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    found = {pid: (role, (int(fields[11]) + int(fields[12])) * TICK)}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= _cpu_of(int(child))
    return found


def start_server(folder: Path, args: argparse.Namespace) -> tuple[subprocess.Popen[str], int]:
    more = {} if args.api_server_count == 1 else {"api_server_count": args.api_server_count}
    command = [
        sys.executable,
        "-c",
        SERVE,
        str(folder),
        str(HERE / "streams_engine.py"),
        json.dumps(more),
    ]
    server = subprocess.Popen([*args.under, *command], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = next((line for line in server.stdout if line.startswith("penstock serves")), None)
    if line is None:
        raise SystemExit("the server did not start: its last words are above")
    return server, int(line.rsplit(":", 1)[1].split("/")[0])


def drive(
    port: int, folder: Path, words: list[str], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Runs all streams through k client processes; returns their columns."""
    body = {
        "model": "fake",
        "prompt": list(range(300, 300 + PROMPT)),
        "max_tokens": tokens_of(args),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
    }
    counts = [len(range(at, args.streams, args.clients)) for at in range(args.clients)]
    longest = 3 * args.seconds + 60
    clients = []
    for at, count in enumerate(counts):
        client = subprocess.Popen(
            [sys.executable, str(HERE / "streams_client.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        out = str(folder / f"client{at}.npz")
        spec = {
            "port": port,
            "count": count,
            "body": body,
            "words": words,
            "seconds": longest,
            "out": out,
        }
        _tell(client, json.dumps(spec))
        clients.append(client)
    try:
        for wanted in ("ready", "done"):
            for client in clients:
                assert client.stdout is not None
                if client.stdout.readline().strip() != wanted:
                    raise SystemExit("a client failed; its last words are above")
            if wanted == "ready":
                for client in clients:
                    _tell(client, "go")
    finally:
        for client in clients:
            client.kill()
            client.wait()
    return [dict(np.load(folder / f"client{at}.npz")) for at in range(args.clients)]


def _tell(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line + "\n")
    client.stdin.flush()


def token_steps(part: dict[str, Any], log: Any, words: int) -> tuple[Any, Any, Any]:
    """Returns for each token its step, its arrival and its stream. Raises SystemExit if a stream
    differs from what the engine drew."""
    stream = np.repeat(part["stream"], part["count"])
    arrival = np.repeat(part["arrival"], part["count"])
    residue = part["tokens"].astype(np.int64)
    gap = np.diff(residue, prepend=0) % words
    first = np.flatnonzero(np.diff(stream, prepend=-1))
    # the last step that was ready when it arrived
    known = np.searchsorted(log, arrival[first], "right") - 1
    gap[first] = known - (known - residue[first]) % words
    steps = np.cumsum(gap)
    before = np.zeros(len(first), np.int64)
    before[1:] = steps[first[1:] - 1]
    steps -= np.repeat(before, np.diff(first, append=len(stream)))
    if (np.diff(steps)[np.diff(stream) == 0] != 1).any():
        raise SystemExit("a stream misses a step, or has one twice")
    return steps, arrival, stream


def figures(
    parts: list[dict[str, Any]], log: Any, cpu: CpuLog, args: argparse.Namespace
) -> dict[str, Any]:
    found = [token_steps(part, log, WORDS) for part in parts]
    short = sum(int((np.bincount(stream) != tokens_of(args)).sum()) for _, _, stream in found)
    if short or not all(part["whole"].all() for part in parts):
        raise SystemExit(f"{short} streams have not got all of their tokens")
    firsts, waits, lasts = [], [], []
    for part, (_, arrival, stream) in zip(parts, found, strict=True):
        at = np.flatnonzero(np.diff(stream, prepend=-1))
        firsts.append(arrival[at])
        waits.append(arrival[at] - part["posted"])
        lasts.append(arrival[np.append(at[1:], len(stream)) - 1])
    begin = float(np.concatenate(firsts).max()) + SETTLE
    end = min(begin + args.seconds, float(np.concatenate(lasts).min()))
    delay = np.concatenate([(a - log[s])[(a >= begin) & (a < end)] for s, a, _ in found]) * 1e3
    sizes = np.concatenate(
        [p["count"][(p["arrival"] >= begin) & (p["arrival"] < end)] for p in parts]
    )
    wait = np.concatenate(waits) * 1e3
    cores = cpu.between(begin, end)
    rate = len(sizes) / (end - begin)
    return {
        "streams": args.streams,
        "api_server_count": args.api_server_count,
        "seconds": round(end - begin, 2),
        "steps_per_second": round(float(((log >= begin) & (log < end)).sum() / (end - begin)), 2),
        "events_per_second": round(rate),
        "tokens_per_second": round(len(delay) / (end - begin)),
        "delay_ms": {
            name: round(float(np.percentile(delay, q)), 2) for name, q in PERCENTILES.items()
        },
        "events_of_more_tokens_percent": round(100.0 * float((sizes > 1).mean()), 3),
        "server_cores": [round(c, 3) for c in cores["server"]],
        "engine_cores": round(sum(cores["engine"]), 3),
        "server_us_per_event": round(1e6 * sum(cores["server"]) / rate, 2),
        "engine_us_per_event": round(1e6 * sum(cores["engine"]) / rate, 2),
        "first_token_ms": {
            name: round(float(np.percentile(wait, q)), 1) for name, q in PERCENTILES.items()
        },
    }


PERCENTILES = {"p50": 50, "p99": 99, "max": 100}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = write_folder(folder, args)
        server, port = start_server(folder, args)
        cpu = CpuLog(server.pid)
        try:
            cpu.start()
            parts = drive(port, folder, words, args)
        finally:
            cpu.over.set()
            server.terminate()
            server.wait(30)
        log = np.fromfile(folder / "steps")
        return figures(parts, log[log > 0], cpu, args)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument(
        "--rate", type=float, default=50.0, help="steps a second; an event a stream and step"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="of the window that is measured")
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument(
        "--clients", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="processes"
    )
    parser.add_argument(
        "--detokenize",
        type=Path,
        help="a tokenizer.json (.gz too). Left out: the demo's, filled up",
    )
    parser.add_argument(
        "--under",
        type=shlex.split,
        default=[],
        help="words before the server's command: a profiler",
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args)
    if args.json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:>32}  {value}")


if __name__ == "__main__":
    main()

"""Measures the cost of Ray: a service against `penstock serve`, and a job against plain runs.

    python benchmarks/on_ray.py [--turns 3] [--only serve jobs] [--json]

A service under Ray Serve runs against `penstock serve`; a job on two workers against two plain runs
of half the file each; by turns, medians, the demo model on this machine's CPU. It also times the
first answer from zero replicas.

A burst is --streams streams at once, of --tokens tokens each; its rate runs from the first byte
sent to the last one received. Both services are up, bursts alternate between them, and all of Ray's
processes are stopped while the plain one works: with separate runs, drift of the machine's pace
exceeded Ray's cost. Each engine has one thread, so that both sides have equally many; the client
has the remaining cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from streams_client import Stream

PATH = "/v1/completions"
CORES = 2  # of which a worker, or a plain run, has half
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
}
PENSTOCK = (sys.executable, "-m", "penstock")
KINDS = ("plain", "ray")
PAUSE = 0.1  # seconds


@contextmanager
def service(*words: str) -> Iterator[None]:
    """Runs a server from the line that says that it serves until its end."""
    process = subprocess.Popen(
        [*PENSTOCK, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    assert process.stdout is not None
    try:
        if not any(line.startswith(b"penstock serves") for line in process.stdout):
            raise SystemExit(f"penstock {' '.join(words)} did not start")
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def body(tokens: int, seed: int) -> bytes:
    asked = {
        "model": "demo",
        "prompt": f"Question: {seed} pebbles?\nAnswer:",
        "max_tokens": tokens,
        "seed": seed,
    }
    return json.dumps({**asked, "ignore_eos": True, "stream": True}).encode()


async def burst(port: int, streams: int, tokens: int) -> tuple[float, float]:
    """Returns the output tokens a second of a burst, and its median first-token time in ms."""
    loop = asyncio.get_running_loop()
    made = [Stream(loop.create_future()) for _ in range(streams)]
    for stream in made:
        await loop.create_connection(partial(_itself, stream), "127.0.0.1", port)
    began = time.monotonic()
    for seed, stream in enumerate(made):
        data = body(tokens, seed)
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
        stream.post(head.encode() + data)
    await asyncio.gather(*(stream.done for stream in made))
    for stream in made:
        assert stream.transport is not None
        stream.transport.close()
        whole = b"".join(stream.pieces)
        if b"data: [DONE]" not in whole:
            raise SystemExit(f"a stream was not whole: {whole[-200:]!r}")
    firsts = [
        next(t for t, p in zip(s.times, s.pieces, strict=True) if b'"text"' in p) - s.posted
        for s in made
    ]
    seconds = max(stream.times[-1] for stream in made) - began
    return streams * tokens / seconds, statistics.median(firsts) * 1e3


def _itself(stream: Stream) -> Stream:
    return stream


def serve_turn(args: argparse.Namespace) -> dict[str, Any]:
    """Runs bursts of both services by turns. Returns (rate, first token) of each, and the seconds
    to the first answer from zero replicas."""
    ports = {kind: free_port() for kind in KINDS}
    deploy = ("deploy", "ray", "--model", "demo", "--min-replicas", "0", "--max-replicas", "1")
    with service("serve", "demo", "--port", str(ports["plain"])):
        _ask(ports["plain"])
        here = processes()
        with service(*deploy, "--port", str(ports["ray"])):
            from_zero = _ask(ports["ray"])
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for number in range(args.bursts + 1):
                for kind in reversed(KINDS) if number % 2 else KINDS:
                    with stopped(processes() - here if kind == "plain" else set()):
                        found[kind].append(
                            asyncio.run(burst(ports[kind], args.streams, args.tokens))
                        )
    return {kind: bursts[1:] for kind, bursts in found.items()} | {"from_zero_s": from_zero}


def _ask(port: int) -> float:
    """Returns the seconds until a short answer is complete."""
    began = time.monotonic()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{PATH}", body(4, 1), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        answer.read()
    return time.monotonic() - began


def processes() -> set[int]:
    return {int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()}


@contextmanager
def stopped(numbers: set[int]) -> Iterator[None]:
    """Suspends processes inside, and gives them a moment to resume after."""
    for number in numbers:
        _signal(number, signal.SIGSTOP)
    try:
        yield
    finally:
        for number in numbers:
            _signal(number, signal.SIGCONT)
        time.sleep(PAUSE)


def _signal(number: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # a short one, gone meanwhile
        os.kill(number, what)


def jobs_turn(kind: str, args: argparse.Namespace) -> float:
    """Returns the output tokens a second of a file on two workers, or of its halves in two
    concurrent plain runs."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        rows = [
            {
                "id": i,
                "prompt": f"Question: {i} pebbles?\nAnswer:",
                "max_tokens": 64,
                "ignore_eos": True,
            }
            for i in range(args.rows)
        ]
        parts = [rows] if kind == "ray" else [rows[0::CORES], rows[1::CORES]]
        more = ["--on", "ray", "--workers", str(CORES)] if kind == "ray" else []
        running = []
        for number, part in enumerate(parts):
            source = folder / f"{number}.jsonl"
            source.write_text("".join(json.dumps(row) + "\n" for row in part))
            words = [*PENSTOCK, "run", str(source), str(folder / f"{number}.out.jsonl"), *more]
            running.append(
                subprocess.Popen(
                    [*words, "--max-num-seqs", "64"],
                    stderr=subprocess.PIPE,
                    env=ENVIRONMENT,
                    text=True,
                )
            )
        told = [process.communicate()[1] for process in running]
    rates = [re.search(r"([\d,]+) output tok/s", said) for said in told]
    if not all(rates):
        raise SystemExit(f"a run failed: {told}")
    # The slower half decides when the file is done: two halves at that pace.
    return min(float(rate[1].replace(",", "")) for rate in rates if rate) * len(parts)


def figures(args: argparse.Namespace) -> dict[str, Any]:
    told: dict[str, Any] = {"turns": args.turns, "cores": len(os.sched_getaffinity(0))}
    if "serve" in args.only:
        turns = [serve_turn(args) for _ in range(args.turns)]
        pairs = [
            pair for turn in turns for pair in zip(*(turn[kind] for kind in KINDS), strict=True)
        ]
        for place, kind in enumerate(KINDS):
            rates, firsts = zip(*(pair[place] for pair in pairs), strict=True)
            told[kind] = {
                "tok_s": round(statistics.median(rates)),
                "first_ms": round(statistics.median(firsts), 2),
            }
        told["from_zero_s"] = round(statistics.median(turn["from_zero_s"] for turn in turns), 3)
        told["ray_over_plain"] = round(
            statistics.median(ray[0] / plain[0] for plain, ray in pairs), 3
        )
        told["first_ms_more"] = round(
            statistics.median(ray[1] - plain[1] for plain, ray in pairs), 2
        )
    if "jobs" in args.only:
        rates = [{kind: jobs_turn(kind, args) for kind in KINDS} for _ in range(args.turns)]
        told["jobs"] = {
            kind: round(statistics.median(turn[kind] for turn in rates)) for kind in KINDS
        }
        told["jobs"]["ray_over_plain"] = round(
            statistics.median(turn["ray"] / turn["plain"] for turn in rates), 3
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["serve", "jobs"], choices=["serve", "jobs"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--bursts", type=int, default=30, help="of each service in a turn")
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    told = figures(args)
    print(json.dumps(told) if args.json else json.dumps(told, indent=2))


if __name__ == "__main__":
    main()

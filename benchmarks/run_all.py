"""`make bench`: runs the benchmarks one after the other, prints one table, and writes
build/bench.json.

Each benchmark is a script that prints one JSON object with --json and asserts nothing; it runs in
its own process, so that none sees another's threads and memory. The aims beside the figures are
issue 2's; a missed aim is no failure. A benchmark that dies is: its figures are null, its last
output is shown, and the exit code is 1.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "build" / "bench.json"


@dataclass(frozen=True)
class Figure:
    """A row of the table. `path` leads to the figure in its script's JSON."""

    key: str
    says: str
    unit: str
    aim: str
    path: tuple[str, ...]


@dataclass(frozen=True)
class Benchmark:
    command: tuple[str, ...]
    figures: tuple[Figure, ...]


def _figure(key: str, says: str, unit: str, aim: str, *path: str) -> Figure:
    return Figure(key, says, unit, aim, path or (key,))


BENCHMARKS = (
    Benchmark(
        ("start_up.py",),
        (
            _figure("help_s", "penstock --help", "s", "< 0.3"),
            _figure("demo_first_sample_s", "penstock demo, start to first sample", "s", "< 10"),
        ),
    ),
    Benchmark(
        ("host_step.py", "--rows", "8192", "--context", "1000"),
        (
            _figure("host_step_ms", "host, a step at 8,192 rows", "ms", "<= 1.0"),
            _figure("host_admit_group_ms", "host, admitting a group of 1,024", "ms", "<= 3"),
            _figure("host_finish_ms", "host, finishing 1,000 rows", "ms", "<= 3"),
        ),
    ),
    Benchmark(
        ("answers.py",),
        (
            _figure("text_core_percent", "text and stop strings at 150k tok/s", "%core", "< 10"),
            _figure("answer_us", "an answer over HTTP, a token", "us", ""),
            _figure("answer_logprobs_us", "  with the chosen token's logprob", "us", "< 0.5"),
            _figure("event_us", "an event of a stream", "us", ""),
            _figure("event_logprobs_us", "  with the chosen token's logprob", "us", ""),
            _figure("burst_block_ms", "1 M tokens that end at once, longest block", "ms", "< 20"),
        ),
    ),
    Benchmark(
        ("against_transformers.py", "--case", "demo"),
        (
            _figure(
                "demo_vs_transformers",
                "demo model, against transformers",
                "x",
                ">= 10",
                "demo",
                "times",
            ),
            _figure("demo_tok_s", "  output", "tok/s", "", "demo", "penstock_tok_s"),
            _figure(
                "demo_percent",
                "  of the products alone",
                "%",
                "",
                "demo",
                "penstock_percent_of_products",
            ),
        ),
    ),
    Benchmark(
        ("against_transformers.py", "--case", "qwen"),
        (
            _figure(
                "qwen_vs_transformers",
                "Qwen2.5-0.5B's shape, against transformers",
                "x",
                ">= 1.5",
                "qwen",
                "times",
            ),
            _figure("qwen_tok_s", "  output", "tok/s", "", "qwen", "penstock_tok_s"),
            _figure(
                "qwen_percent",
                "  of the products alone",
                "%",
                "",
                "qwen",
                "penstock_percent_of_products",
            ),
        ),
    ),
)


def run(benchmark: Benchmark) -> tuple[dict[str, Any] | None, str]:
    """Returns the script's JSON and "", or None and the error."""
    script, *arguments = benchmark.command
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments, "--json"],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return None, f"{script} ended with {done.returncode}: {last}"
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def take(result: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = result
    for step in path:
        value = value[step]
    return float(value)


def machine() -> dict[str, Any]:
    import torch

    from penstock.bench.machine_probe import processor

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "when": time.strftime("%Y-%m-%d %H:%M"),
    }


def line(says: str, measured: str, unit: str, aim: str) -> str:
    return f"{says:44} {measured:>10} {unit:6} {aim:>8}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def main() -> int:
    where = machine()
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {"machine": where}
    faults: list[str] = []
    print(
        f"{where['processor']}, {where['cores']} cores, torch {where['torch']}; load before:"
        f" {where['load']:.1f}\n"
    )
    print(line("what", "measured", "", "aim"))
    for benchmark in BENCHMARKS:
        result, fault = run(benchmark)
        details[" ".join(benchmark.command)] = result if result is not None else fault
        if fault:
            faults.append(fault)
        for figure in benchmark.figures:
            value = figures[figure.key] = None if result is None else take(result, figure.path)
            print(
                line(figure.says, "-" if value is None else number(value), figure.unit, figure.aim),
                flush=True,
            )
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({**figures, "details": details}, indent=2) + "\n")
    print(f"\nall of it: {OUT.relative_to(HERE.parent)}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

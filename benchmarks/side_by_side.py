"""Penstock and vLLM side by side: one machine, one run, one model folder, one client, both over HTTP.

    python benchmarks/side_by_side.py --out DIR --vllm-site vllm_site --tokenizer bpe128k --problems test.jsonl.gz \
        --shots train.jsonl.gz

Writes the model (`--shape`, random weights drawn by each engine, or --weights), serves it with one engine after the
other, runs the works (monkeys and 128-1024) against each, and prints a table with versions and commands. vLLM's
settings are those that it ran best with here; `--vllm-options` and `--penstock-options` add to them or, said again,
change them.
`--engines penstock` runs one alone. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.bench.serving import HOST, Server, free_port
from penstock.errors import PenstockError
from penstock.jobs.shapes import gpu_name
from penstock.jobs.shapes_http import penstock_command, run_http
from penstock.jobs.shapes_model import Shape, load_format, write_model
from penstock.jobs.shapes_tokenizer import rare_pair
from penstock.jobs.shapes_works import STOP_SHARE, Family, Work, chosen, family
from penstock.text.tokenizer import Tokenizer

GRAPHS = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 1025, 64), *range(1280, 8193, 256)]
FIGURES = (
    ("out tok/s", "output_tokens_per_second"),
    ("all tok/s", "total_tokens_per_second"),
    ("req/s", "requests_per_second"),
    ("first token ms", "first_token_ms_p50"),
    ("GPU busy %", "busy_percent"),
    ("peak MiB", "peak_memory_mib"),
)


def main() -> int:
    options = arguments()
    known = family(options.shape)
    works = chosen(known.works, options.work.split(","))
    folder = options.out / "models" / known.shape.name
    write_model(known.shape, folder, options.tokenizer, weights=options.weights)
    stop = rare_pair(Tokenizer.load(folder).token_bytes, STOP_SHARE)
    report: dict[str, Any] = {"shape": known.shape.name, "gpu": gpu_name(), "cores": os.cpu_count(), "engines": {}}
    for engine in options.engines.split(","):
        report["engines"][engine] = told = measure(engine, options, known, works, folder, stop)
        (options.out / "side_by_side.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"{engine}: {told.get('failed') or 'done'}", flush=True)
    print_table(report, works)
    return 1 if any("failed" in told for told in report["engines"].values()) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, logs and side_by_side.json")
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--work", default="monkeys,128-1024", help="names, with commas between")
    parser.add_argument("--engines", default="vllm,penstock", help="in the order in which they run")
    parser.add_argument("--seconds", type=float, default=120.0, help="a work's longest; it is cut then")
    parser.add_argument("--tokenizer", type=Path, help="left out: the demo's, filled up")
    parser.add_argument("--problems")
    parser.add_argument("--shots")
    parser.add_argument("--weights", action="store_true", help="write safetensors; else each engine draws its own")
    parser.add_argument("--vllm-site", type=Path, help="a folder of packages that holds vLLM, for PYTHONPATH")
    parser.add_argument("--vllm-options", default="", help="more words for its server, in one text")
    parser.add_argument("--penstock-options", default="", help="more words for `penstock serve`, in one text")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def measure(
    engine: str, options: argparse.Namespace, known: Family, works: list[Work], folder: Path, stop: str
) -> dict[str, Any]:
    """Serves with one engine and runs the works; what came of it, and of which version by which command."""
    port = free_port()
    environment = {}
    if engine == "vllm":
        command = vllm_command(known.shape, folder, port, shlex.split(options.vllm_options))
        if options.vllm_site is not None:
            paths = [str(options.vllm_site.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        command = penstock_command(penstock_knobs(known.shape, folder), port, shlex.split(options.penstock_options))
    told: dict[str, Any] = {"version": version_of(engine, environment), "command": shlex.join(command), "works": {}}
    try:
        with Server(command, port, str(folder), options.out / f"{engine}.log", environment) as server:
            told["ready_seconds"] = server.ready_seconds
            for work in works:
                told["works"][work.name] = run_http(
                    server, work, known.shape, stop=stop, problems=options.problems, shots=options.shots,
                    seconds=options.seconds,
                )  # fmt: skip
    except PenstockError as error:
        told["failed"] = str(error)
    time.sleep(2)  # the GPU's memory is given back a moment after the process has ended
    return told


def penstock_knobs(shape: Shape, folder: Path) -> dict[str, Any]:
    return {"model": str(folder), "load_format": load_format(folder), "max_model_len": shape.max_model_len}


def vllm_command(shape: Shape, folder: Path, port: int, more: list[str]) -> list[str]:
    """8,192 sequences, 32,768 tokens a step, CUDA graphs to 8,192, FlashAttention 3 (its own choice on Hopper), memory
    0.75: at 0.9 its sampler ran out of memory."""
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    words += ["--served-model-name", str(folder), "--host", HOST, "--port", str(port)]
    words += ["--load-format", load_format(folder), "--dtype", "bfloat16", "--max-model-len", str(shape.max_model_len)]
    words += ["--max-num-seqs", "8192", "--max-num-batched-tokens", "32768", "--gpu-memory-utilization", "0.75"]
    words += ["--async-scheduling", "--compilation-config", json.dumps({"cudagraph_capture_sizes": GRAPHS})]
    return words + more


def version_of(engine: str, environment: dict[str, str]) -> str:
    if engine != "vllm":
        return __version__
    asked = [sys.executable, "-c", "from importlib.metadata import version; print(version('vllm'))"]
    done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, **environment})
    return done.stdout.strip() or "not found"


def print_table(report: dict[str, Any], works: list[Work]) -> None:
    print(f"\n{report['shape']} on {report['gpu'] or 'a CPU'}, {report['cores']} cores, over HTTP")
    print(f"{'work':14}{'engine':18}" + "".join(f"{title:>16}" for title, _ in FIGURES))
    for work in works:
        for engine, told in report["engines"].items():
            row = told["works"].get(work.name)
            if row is None:
                continue
            cells = "".join(f"{'-' if row.get(key) is None else format(row[key], ',.1f'):>16}" for _, key in FIGURES)
            print(f"{work.name:14}{engine + ' ' + told['version']:18}{cells}{' cut' if row['cut'] else ''}")
    for engine, told in report["engines"].items():
        ready = f"ready after {told['ready_seconds']:.1f} s" if "ready_seconds" in told else told["failed"]
        print(f"\n{engine} {told['version']}, {ready}\n  {told['command']}")


if __name__ == "__main__":
    sys.exit(main())

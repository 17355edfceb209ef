"""Measures start-up times: of `penstock --help`, of the demo's first sample, and of an engine's
stages.

    help_s               wall time of `penstock --help` as a process; median of 5
    demo_first_sample_s  time from the start of `penstock demo` until its samples.jsonl holds a
                         finished sample: interpreter, torch, model, prompts and the sample itself.
                         Median of 3; each run is then ended by SIGTERM.

    python benchmarks/start_up.py [--json]
    python benchmarks/start_up.py --stages MODEL [--repeats N] [KNOB=VALUE ...]

The first form uses only the command line, as a user does. The second opens `LLM(MODEL, ...)` in its
own processes and prints the seconds of each stage, the median of the repeats, from the process's
start to its first token; stages inside another are indented, and concurrent ones are marked `|`.
The first start, whose caches may be cold, is shown separately.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from knobs import read_knob

PENSTOCK = [sys.executable, "-m", "penstock"]
PATIENCE = 120.0  # seconds until a demo without a first sample is given up


def help_seconds() -> float:
    begin = time.perf_counter()
    subprocess.run([*PENSTOCK, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def first_sample_seconds() -> float:
    """Starts the demo in its own folder and watches the folder; ends the demo after the first
    sample. Returns the seconds to that sample."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        begin = time.perf_counter()
        demo = subprocess.Popen([*PENSTOCK, "demo", "--out", str(out)], stdout=subprocess.DEVNULL)
        try:
            while not _has_sample(out):
                if demo.poll() is not None or time.perf_counter() - begin > PATIENCE:
                    raise SystemExit(f"penstock demo gave no sample (exit {demo.poll()})")
                time.sleep(0.02)
            return time.perf_counter() - begin
        finally:
            demo.send_signal(signal.SIGTERM)
            demo.wait()


def _has_sample(out: Path) -> bool:
    samples = out / "samples.jsonl"
    return samples.is_file() and samples.stat().st_size > 0


# --- stage by stage

# (place, name of a function, what it is called, whether it runs beside others)
STAGES = (
    ("penstock.engine.build_engine", "fit", "artifact: read, held against this machine", False),
    ("penstock.execute.open_runner", "find_device", "device found", False),
    ("penstock.execute.open_runner", "choose", "kernels chosen, Triton imported", False),
    ("penstock.execute.open_runner", "load_model", "model loaded", False),
    ("penstock.weights.load", "find_weights", "  headers read and checked", False),
    ("penstock.weights.load", "load_weights", "  weights read", False),
    ("penstock.models.decoder.Decoder", "prepare", "  weights arranged", False),
    ("penstock.execute.open_runner", "settle_kv", "form of K and V settled", False),
    ("penstock.execute.open_runner", "run_worst_steps", "worst steps", False),
    (
        "penstock.execute.warm",
        "_compile_small_steps",
        "  small steps: kernels compiled or loaded",
        False,
    ),
    ("penstock.execute.runner.TorchRunner", "__init__", "KV and rows allocated", False),
    ("penstock.execute.runner.TorchRunner", "capture", "graphs captured", False),
    ("penstock.llm", "_read_tokenizer", "tokenizer", True),
    ("penstock.engine.fitted", "verify_files", "checksums verified", True),
)


def run_stages(begun: float, model: str, knobs: dict[str, Any]) -> dict[str, float]:
    """Opens the model in a process that began at `begun` by the wall clock; returns seconds by
    stage."""
    seconds: dict[str, float] = {"interpreter": time.time() - begun}

    def timed(name: str, call: Callable[..., Any]) -> Any:
        at = time.perf_counter()
        try:
            return call()
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - at

    # as LLM does it
    import_module("penstock.execute.wake_gpu").wake_gpu(knobs.get("device", "auto"))
    with import_module("penstock.execute.unswept").unswept():  # the same
        timed("torch imported", lambda: import_module("torch"))
        timed(
            "penstock imported",
            lambda: [import_module(m) for m in ("penstock.llm", "penstock.ranks.rank_runner")],
        )
    for place, function, name, beside in STAGES:
        module, _, owner = (
            place.rpartition(".") if place[place.rfind(".") + 1].isupper() else (place, "", "")
        )
        held = getattr(import_module(module), owner) if owner else import_module(module)
        plain, told = getattr(held, function), "| " * beside + name
        setattr(held, function, lambda *a, _p=plain, _n=told, **k: timed(_n, lambda: _p(*a, **k)))
    llm = timed("LLM opened", lambda: import_module("penstock.llm").LLM(model, **knobs))
    from penstock import SamplingParams

    first = SamplingParams(max_tokens=1, ignore_eos=True)
    timed("first token", lambda: llm.generate([[5, 6, 7, 8]], first, use_tqdm=False))
    seconds["all of it"] = time.time() - begun
    seconds |= {f"({name})": llm.stats()[name] for name in ("jit_compiles", "jit_loads")}
    llm.close()
    return seconds


def print_stages(model: str, repeats: int, knobs: dict[str, Any]) -> None:
    """Runs `repeats` starts, and one before them."""
    runs: list[dict[str, float]] = []
    for number in range(repeats + 1):
        child = (
            f"import json, start_up; print(json.dumps(start_up.run_stages({time.time()!r},"
            f" {model!r}, {knobs!r})))"
        )
        done = subprocess.run(
            [sys.executable, "-c", child], cwd=Path(__file__).parent, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"the start failed: {done.stderr.strip().splitlines()[-1]}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        if not number:
            print(f"the first start: {runs[0]['all of it']:.2f} s")
    for name in runs[-1]:
        each = [run.get(name, 0.0) for run in runs[1:] or runs]
        print(f"{name:52} {statistics.median(each):7.3f} s   ({min(each):.3f} to {max(each):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.add_argument(
        "--stages", metavar="MODEL", help="a folder, a hub id, or `demo`: print its stages instead"
    )
    parser.add_argument("--repeats", type=int, default=3, help="starts behind the first one")
    parser.add_argument(
        "knobs", nargs="*", type=read_knob, metavar="KNOB=VALUE", help="of LLM, with --stages"
    )
    options = parser.parse_args()
    if options.stages is not None:
        return print_stages(options.stages, options.repeats, dict(options.knobs))
    result = {
        "help_s": statistics.median(help_seconds() for _ in range(5)),
        "demo_first_sample_s": statistics.median(first_sample_seconds() for _ in range(3)),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:22} {seconds:6.2f} s" for name, seconds in result.items()))


if __name__ == "__main__":
    main()

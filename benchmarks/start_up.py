"""How long one waits: for `penstock --help`, and for the demo's first sample.

help_s               wall time of `penstock --help`, a process of its own; median of 5.
demo_first_sample_s  from the start of `penstock demo`'s process until its samples.jsonl holds a finished sample: the
                     interpreter, torch, the model, the prompts, and the sample itself. Median of 3; the run is ended
                     by SIGTERM then.

    python benchmarks/start_up.py [--json]

It knows the command line alone: what a user would see.
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
from pathlib import Path

PENSTOCK = [sys.executable, "-m", "penstock"]
PATIENCE = 120.0  # seconds until a demo without a first sample is given up


def help_seconds() -> float:
    begin = time.perf_counter()
    subprocess.run([*PENSTOCK, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def first_sample_seconds() -> float:
    """Starts the demo in a folder of its own and watches that folder; ends it after the first sample."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
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

"""Compares this tree's step benchmark with another tree's, by turns, on one machine.

    git archive COMMIT src benchmarks | tar x -C .other       # a folder that git ignores
    python benchmarks/by_turns.py .other [--turns 3] -- --rows 1 --max-rows 8 --alone 256

The words after `--` go to each tree's own benchmarks/step_gpu.py. Each turn is its own process, and
the order alternates (here, there; there, here), so that a machine that warms up or slows down
favours neither. Prints for each case the least milliseconds of both and their ratio. A case is
identified by the fields of a line of JSON other than its times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
SCRIPT = Path("benchmarks") / "step_gpu.py"
TIME, CASE = "ms", ("rows", "groups")


def measured(tree: Path, words: list[str]) -> dict[str, float]:
    """Returns case -> milliseconds of one run. Exits if the run failed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tree / "src"), os.environ.get("PYTHONPATH", ""))),
    }
    command = [sys.executable, str(tree / SCRIPT), *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{tree / SCRIPT} failed: its words are above")
    return dict(filter(None, map(_timed, done.stdout.splitlines())))


def _timed(line: str) -> tuple[str, float] | None:
    try:
        told: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(told, dict) or TIME not in told:
        return None
    return ", ".join(f"{name} {told[name]}" for name in CASE if name in told), float(told[TIME])


def compared(
    here: dict[str, list[float]], there: dict[str, list[float]]
) -> list[tuple[str, float, float, float]]:
    """Returns for each common case: its name, its least times there and here, and the percent by
    which here is slower."""
    rows = []
    for case in here:
        if case in there:
            new, old = min(here[case]), min(there[case])
            rows.append((case, old, new, 100.0 * (new / old - 1.0)))
    return rows


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "other", type=Path, help="a folder with the other tree's src and benchmarks"
    )
    parser.add_argument("--turns", type=int, default=3)
    words = sys.argv[1:] if words is None else words
    cut = words.index("--") if "--" in words else len(words)
    options, told = parser.parse_args(words[:cut]), words[cut + 1 :]
    found: dict[Path, dict[str, list[float]]] = {
        HERE: defaultdict(list),
        options.other: defaultdict(list),
    }
    for turn in range(options.turns):
        for tree in [*found] if turn % 2 else [*reversed(found)]:
            for case, ms in measured(tree, told).items():
                found[tree][case].append(ms)
    print(f"{'case':24}{'there':>10}{'here':>10}  ms, the least of {options.turns} turns")
    for case, old, new, slower in compared(found[HERE], found[options.other]):
        print(f"{case:24}{old:10.3f}{new:10.3f}  {slower:+.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())

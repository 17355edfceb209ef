"""kill -9 of a job on Ray at random moments, of a worker or of its driver, gone on with each time:
whether each id is in the output once, and says what it says without a kill.

It knows a job by ray_job.py and its journal; `python tests/reliability/ray_kills.py [KILLS]` prints
a line of figures.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ray_head import SLOW, job_cluster

JOB = Path(__file__).parents[1] / "harness" / "ray_job.py"
ROWS = 2500
PAUSE = 1.5  # seconds of work between two kills, at most


@dataclass
class RayKills:
    """kills: of each kind. sittings: how often the job was started. wrong: what was not as it
    should be."""

    rows: int = ROWS
    kills: Counter[str] = field(default_factory=Counter)
    sittings: int = 0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        at = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kills.items()))
        return f"{self.kills.total()} kills ({at}), {self.rows:,} rows in {self.sittings} sittings"

    def faults(self) -> list[str]:
        return self.wrong


def run(folder: Path, kills: int, seed: int = 7) -> RayKills:
    """Kills a job so often on its way; what is left of the file then runs to its end."""
    told, draw = RayKills(), random.Random(seed)
    source, out, right = folder / "in.jsonl", folder / "out.jsonl", folder / "right.jsonl"
    rows = [{"id": f"row-{i}", "prompt": f"prompt {i}", "n": 1 + i % 3} for i in range(ROWS)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with job_cluster(4) as (address, place, given):
        environment = {**os.environ, **given}
        subprocess.run(
            [sys.executable, str(JOB), "here", str(source), str(right)], env=environment, check=True
        )
        words = [sys.executable, str(JOB), address, str(source), str(out)]
        _drive(words, environment, out, place / "engines", kills, draw, told)
    if _rows(out) != _rows(right):
        told.wrong.append("rows are lost, doubled or others than without a kill")
    return told


def _drive(
    words: list[str],
    environment: dict[str, str],
    out: Path,
    engines: Path,
    kills: int,
    draw: random.Random,
    told: RayKills,
) -> None:
    driver: subprocess.Popen[str] | None = None
    (engines / SLOW).touch()
    while True:
        if told.kills.total() >= kills:
            (engines / SLOW).unlink(missing_ok=True)
        if driver is None:
            driver = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
            told.sittings += 1
        before = _size(out)
        while _size(out) == before and driver.poll() is None:
            time.sleep(0.02)
        if told.kills.total() < kills:
            time.sleep(draw.random() * PAUSE)
        if told.kills.total() >= kills or driver.poll() is not None:
            said = driver.communicate()[1]
            if driver.returncode:
                told.wrong.append(said.strip().splitlines()[-1][:300])
            if told.kills.total() < kills:
                told.wrong.append(f"the job was over after {told.kills.total()} kills")
            return
        if draw.random() < 0.5:
            driver.kill()
            driver.communicate()
            driver = None
            told.kills["driver"] += 1
        else:
            told.kills["worker"] += _kill_newest(engines)


def _kill_newest(engines: Path) -> int:
    """Kills the worker that opened its engine last, if it is alive; how many that were."""
    newest = max(
        (path for path in engines.iterdir() if path.name.isdigit()),
        key=lambda path: path.stat().st_mtime_ns,
    )
    try:
        os.kill(int(newest.name), signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _rows(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        made = run(Path(where), int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    print(made.line())
    print("\n".join(made.wrong))
    sys.exit(bool(made.wrong))

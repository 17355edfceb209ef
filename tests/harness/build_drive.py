"""Builds of the demo model by the command line, killed where a test wants it. It knows processes
and lines."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

STAGES = ("fetch", "work", "weights", "tune", "compile", "check", "pack")
SMALL = (
    "--device",
    "cpu",
    "--shape",
    "24x12:4",
    "--quantization",
    "int8",
    "--tune-minutes",
    "0.01",
)
SMALL += ("--max-model-len", "96")


def command(out: Path, told: tuple[str, ...] = SMALL) -> list[str]:
    return [sys.executable, "-m", "penstock", "build", "demo", "--out", str(out), *told]


def build(out: Path, *more: str, told: tuple[str, ...] = SMALL) -> subprocess.CompletedProcess[str]:
    """Runs a build to its end."""
    return subprocess.run([*command(out, told), *more], capture_output=True, text=True, timeout=300)


@dataclass(slots=True)
class Killed:
    """What a killed build had said, by its lines, and whether it was killed amid its work."""

    lines: list[str]
    in_time: bool


def kill_at(out: Path, stage: str, delay: float) -> Killed:
    """Starts a build and kills it so many seconds after the first line of this stage."""
    process = subprocess.Popen(
        command(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if f"/7 {stage}: " in line:
            break
    time.sleep(delay)
    in_time = process.poll() is None
    process.kill()
    process.communicate()
    return Killed(lines, in_time)

"""kill -9 of a build at random points of each of its stages, gone on with each time: whether all
end in one artifact.

It knows builds by the command line (build_drive.py); `python tests/reliability/build_kills.py
[KILLS]` prints one line of figures. KILLS are of each stage.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from build_drive import STAGES, build, kill_at

from penstock.artifact.checksums import verify_files
from penstock.artifact.manifest import STATE, Manifest, read_manifest
from penstock.errors import PenstockError

# seconds
LONGEST = {
    "fetch": 0.3,
    "work": 0.3,
    "weights": 0.5,
    "tune": 6.0,
    "compile": 0.2,
    "check": 5.0,
    "pack": 0.2,
}


@dataclass
class BuildKills:
    """kills: those that came amid work. wrong: what was not as it should be."""

    kills: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        at = ", ".join(f"{stage} {count}" for stage, count in self.kills.items())
        return f"{sum(self.kills.values())} kills ({at}), each build gone on with to the same files"

    def faults(self) -> list[str]:
        return self.wrong


def run(folder: Path, kills: int, seed: int = 5) -> BuildKills:
    """Kills so many builds at each stage, each twice on its way."""
    told, draw = BuildKills(), random.Random(seed)
    whole = folder / "whole"
    done = build(whole)
    assert done.returncode == 0, done.stderr
    expected = read_manifest(whole)
    for stage in STAGES:
        for number in range(kills):
            out = folder / f"{stage}{number}"
            for at in sorted([stage, draw.choice(STAGES)], key=STAGES.index):
                killed = kill_at(out, at, draw.random() * LONGEST[at])
                told.kills[at] = told.kills.get(at, 0) + killed.in_time
            told.wrong += _wrong(out, expected, f"{stage}, {number}")
    return told


def _wrong(out: Path, expected: Manifest, which: str) -> list[str]:
    """Goes on with a build to its end; what is wrong with what it made."""
    done = build(out)
    if done.returncode and "is built already" not in done.stderr:
        return [f"{which}: {done.stderr.splitlines()[-1]}"]
    try:
        manifest = read_manifest(out)
        verify_files(out, manifest.files)
    except PenstockError as error:
        return [f"{which}: {error}"]
    there = {path.name for path in out.iterdir()} - {"penstock.json"}
    wrong = [f"{which}: {name} is left behind" for name in there - manifest.files.keys()]
    wrong += [f"{which}: {STATE} is left behind"] if STATE in there else []
    return wrong + (
        []
        if manifest.files == expected.files
        else [f"{which}: other files than an unkilled build's"]
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        made = run(Path(where), int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    print(made.line())
    print("\n".join(made.wrong))
    sys.exit(bool(made.wrong))

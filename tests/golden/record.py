"""The golden record: what the engine gave for the corpus at one commit, and how a later one is held
to it.

    python tests/golden/record.py cpu-float32            writes cpu-float32.json.gz anew, here or
    under $OUT
    python tests/golden/record.py --check cpu-float32    replays every way and says what is not as
    it was

On the CPU in float32 every way of running (lags of 0 to 3 flights, preempted, chunked, forked, with
groups or without) gives one and the same record. On a GPU in bfloat16 last bits depend on the way,
so each has a record of its own; steps are planned alike every time, so what is replayed is the same
to the bit as long as kernels and plans are. Where kernels change, samples may part at near-ties:
`differences` counts them and the caller says how many it takes.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corpus import MODELS, VARIANTS, make_model, run

FOLDER = Path(__file__).parent
KINDS = {"cpu-float32": ("cpu", "float32"), "h200-bfloat16": ("cuda", "bfloat16")}
ONE_FOR_ALL = "cpu-float32"  # the kind in which every variant gives the same


@dataclass(slots=True)
class Differences:
    """What of a replay is not as it was recorded."""

    samples: int = 0  # compared
    parted: list[str] = field(default_factory=list)  # other tokens, another end
    scores: int = 0  # logprobs compared, of tokens up to where samples parted
    furthest: float = 0.0  # the largest difference of a logprob
    regrouped: int = (
        0  # places where the chosen token is among the likeliest in one of the two alone
    )


def replay(name: str, variant: str, kind: str, folder: Path) -> Differences:
    """Runs one model's corpus in one way and compares it with the record of `kind`."""
    device, dtype = KINDS[kind]
    want = load(kind)[name]["any" if kind == ONE_FOR_ALL else variant]
    got = run(make_model(name, folder), variant, device=device, dtype=dtype)
    assert got.keys() == want.keys(), (
        "the corpus has changed: record it anew at the commit that it is to hold"
    )
    found = Differences()
    for setting, times in want.items():
        for turn, (old, new) in enumerate(zip(times, got[setting], strict=True)):
            where = f"{name}, {variant}, {setting}, run {turn + 1}"
            _compare(found, where, old, new)
    return found


def _compare(found: Differences, where: str, old: Any, new: Any) -> None:
    _compare_scores(found, old["prompt"], new["prompt"], len(old["prompt"] or ()))
    assert len(old["samples"]) == len(new["samples"]), where
    for index, (was, now) in enumerate(zip(old["samples"], new["samples"], strict=True)):
        found.samples += 1
        same = next(
            (i for i, (a, b) in enumerate(zip(was[0], now[0], strict=False)) if a != b), len(was[0])
        )
        if was[:2] != now[:2]:
            found.parted.append(f"{where}, sample {index} from token {same} on")
        _compare_scores(found, was[2], now[2], same)


def _compare_scores(found: Differences, old: Any, new: Any, count: int) -> None:
    assert (old is None) == (new is None), (
        "logprobs where there were none, or none where there were some"
    )
    for was, now in zip((old or ())[:count], (new or ())[:count], strict=True):
        if len(was) != len(
            now
        ):  # the chosen token has changed places with the last of the likeliest: two near-ties
            found.regrouped += 1
            was, now = was[:1], now[:1]
        found.scores += len(was)
        found.furthest = max([found.furthest, *(abs(a - b) for a, b in zip(was, now, strict=True))])


def load(kind: str) -> Any:
    with gzip.open(FOLDER / f"{kind}.json.gz", "rt") as file:
        return json.load(file)


def record(kind: str, out: Path) -> None:
    """Runs everything and writes what it gave to `out`; in float32 every variant has to give the
    same."""
    device, dtype = KINDS[kind]
    told: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            made, told[name] = make_model(name, Path(folder) / name), {}
            for variant in VARIANTS:
                given = run(made, variant, device=device, dtype=dtype)
                key = "any" if kind == ONE_FOR_ALL else variant
                first = told[name].setdefault(key, given)
                apart = Differences()
                for setting in given:
                    for old, new in zip(first[setting], given[setting], strict=True):
                        _compare(apart, setting, old, new)
                print(
                    f"{name}, {variant}: {apart.samples} samples, apart {apart.parted},"
                    f" {apart.furthest:.1e}"
                )
                if kind == ONE_FOR_ALL and (apart.parted or apart.furthest > 2e-4):
                    raise SystemExit(
                        "the variants differ: that is a fault of the engine, and nothing was"
                        " recorded"
                    )
    with gzip.GzipFile(out, "wb", mtime=0) as file:
        file.write(json.dumps(told, separators=(",", ":")).encode())
    print(f"{out}: {out.stat().st_size:,} bytes")


def check(kind: str) -> bool:
    """Replays every model in every way and prints what differs; whether nothing does."""
    parted = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            for variant in VARIANTS:
                found = replay(name, variant, kind, Path(folder) / name)
                parted += len(found.parted)
                print(
                    f"{name}, {variant}: {found.samples} samples, logprobs within"
                    f" {found.furthest:.4f}",
                    *found.parted,
                )
    return not parted


if __name__ == "__main__":
    *options, kind = sys.argv[1:]
    if "--check" in options:
        sys.exit(not check(kind))
    record(kind, Path(os.environ.get("OUT", FOLDER)) / f"{kind}.json.gz")

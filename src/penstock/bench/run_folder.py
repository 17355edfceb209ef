"""A run's folder: what was asked, the points that are done, and what went wrong. A stopped run goes on from it.

    run.json               what was asked; another run's folder is refused
    points/KEY.parquet     samples of a point on one start of the server; written last, so that it means done
    points/KEY.json        its plan and what the clients saw
    failures.json          what went wrong, with the log's tail
    server-N.log           of each start
    raw.parquet, record.json, report.html, table.txt     made of the above

It knows files; not how a point is measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.almanac.record import Failure, Look
from penstock.almanac.samples import Samples, join, read_parquet, write_parquet
from penstock.bench.method import Found, Plan
from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class Measured:
    """A point on one start: its plan, its samples, what the clients said, and its seconds (arrivals.py, figures.py)."""

    plan: Plan
    samples: Samples
    look: Look
    seconds: float

    def found(self, goals: tuple[float, ...]) -> Found:
        """For the planner: rates and shares of the window's requests; one that failed met no goal."""
        inside = self.samples.of(self.samples.window)
        complete = inside.of(inside.outcome == "ok")
        rate = len(complete) / self.seconds if self.seconds > 0 else 0.0
        waited = np.where(inside.outcome == "ok", inside.first - inside.intended, np.inf)
        met = {goal: float(np.mean(waited <= goal)) if len(inside) else 0.0 for goal in goals}
        return Found(self.plan, rate, met)


class RunFolder:
    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        """Opens or makes it. Raises UsageError when it holds another run."""
        self.path = path
        self.points = path / "points"
        try:
            self.points.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the folder {path} cannot be made: {error}", param="out") from error
        told = path / "run.json"
        words = json.dumps(asked, indent=1, sort_keys=True)
        if told.exists():
            before = json.loads(told.read_text())
            differs = [name for name in sorted({*before, *asked}) if before.get(name) != json.loads(words).get(name)]
            if differs:
                raise UsageError(
                    f"{path} holds another run ({', '.join(differs)} differ): give another --out, or the same options",
                    param="out",
                )
        else:
            _write(told, words)

    def measured(self) -> list[Measured]:
        """Points that are done, in the order in which they were measured."""
        found = []
        for told in self.points.glob("*.json"):
            raw = told.with_suffix(".parquet")
            if not raw.exists():
                continue
            said = json.loads(told.read_text())
            one = Measured(Plan(**said["plan"]), read_parquet(raw), Look(**said["look"]), said["seconds"])
            found.append((said["order"], one))
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    def add(self, one: Measured) -> None:
        order = len(list(self.points.glob("*.parquet")))
        said = {"order": order, "plan": asdict(one.plan), "look": one.look.model_dump(), "seconds": one.seconds}
        _write(self.points / f"{one.plan.key}.json", json.dumps(said))
        write_parquet(one.samples, self.points / f"{one.plan.key}.parquet")

    def failures(self) -> list[Failure]:
        path = self.path / "failures.json"
        return [Failure(**each) for each in json.loads(path.read_text())] if path.exists() else []

    def add_failure(self, failure: Failure) -> None:
        _write(self.path / "failures.json", json.dumps([each.model_dump() for each in [*self.failures(), failure]]))

    def log(self, start: int) -> Path:
        return self.path / f"server-{start}.log"

    def raw(self) -> Path:
        """All samples in one file."""
        path = self.path / "raw.parquet"
        write_parquet(join([one.samples for one in self.measured()]), path)
        return path

    def write(self, name: str, text: str) -> Path:
        _write(self.path / name, text)
        return self.path / name


def _write(path: Path, text: str) -> None:
    """Aside, then renamed: a file of this name is whole."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)

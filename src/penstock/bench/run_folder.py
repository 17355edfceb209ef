"""A run's folder: what was asked, the points that are done, and what went wrong. A stopped run goes on from it.

    run.json               the run's name, when it began, and what was asked: another run's folder is refused
    points/KEY.json        a point's plan, and what the clients saw
    points/KEY.parquet     its samples on one start of the server; written last, so that it means done
    failures.json          what went wrong, with the log's tail
    points/KEY.failed.parquet   the samples of a point that went wrong: raw data of no figure
    server-N.log           of each process of the server
    raw.parquet, record.json, table.txt, report/     made of the above

It knows files; not how a point is measured.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.almanac.intervals import effective, ranks, share_interval
from penstock.almanac.record import ClientHealth, PointFailure
from penstock.almanac.samples import OK, Samples, join, needs_pyarrow, read_parquet, write_parquet
from penstock.almanac.throughput import issued
from penstock.bench.point_planner import PointPlan, PointResult, failed
from penstock.errors import CapacityError, UsageError


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A point on one start: its plan, its samples, what the clients said, and the seconds that its rate is over. took:
    of the shape's time, with what was done for it."""

    plan: PointPlan
    samples: Samples
    look: ClientHealth
    seconds: float
    took: float

    def found(self, goals: tuple[float, ...]) -> PointResult:
        """Returns, for the planner, rates and shares of the window's requests; one that failed met no goal. The shares'
        upper ends are by as many independent requests as these are worth."""
        inside = self.samples.of(self.samples.window)
        ok = inside.outcome == OK
        waited = np.where(ok, inside.first - issued(inside), np.inf)
        met = {goal: float(np.mean(waited <= goal)) if len(inside) else 0.0 for goal in goals}
        worth = effective([ranks(waited)])
        _, ends = share_interval(np.array(list(met.values())) * worth, worth)
        rate = float(ok.sum()) / self.seconds if self.seconds > 0 else 0.0
        after = np.nan_to_num(inside.end[ok] - inside.first[ok])
        loaded = float(after.mean()) if len(after) else 0.0
        return PointResult(
            self.plan, rate, met, dict(zip(met, ends.tolist(), strict=True)), took=self.took, loaded=loaded
        )


@dataclass(frozen=True, slots=True)
class FailedPoint:
    """A point that could not be measured; plan None: no point could. anew: the next run tries it again."""

    plan: PointPlan | None
    failure: PointFailure
    took: float = 0.0
    anew: bool = False


class RunFolder:
    """Open for one process at a time; `close` gives it free."""

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        """Opens or makes it. Raises UsageError when it holds another run, or is open, or pyarrow is missing. What it
        cannot write later is a CapacityError."""
        needs_pyarrow()
        self.path = path
        self._points = path / "points"
        try:
            self._points.mkdir(parents=True, exist_ok=True)
            self._lock = (path / "lock").open("w")
        except OSError as error:
            raise UsageError(f"the folder {path} cannot be used: {error.strerror or error}", param="out") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"another process measures into {path}: wait, or give another --out", param="out"
            ) from error
        self.name, self.when = self._told(asked)
        self._measured = self._read()
        self.opened = self._count()

    def close(self) -> None:
        self._lock.close()

    def _told(self, asked: dict[str, Any]) -> tuple[str, float]:
        """Returns the run's name and when it began."""
        path = self.path / "run.json"
        if not path.exists():
            when = time.time()
            name = hashlib.sha256(f"{asked}{time.time_ns()}".encode()).hexdigest()[:12]
            write_whole(path, json.dumps({"run": name, "when": when, "asked": asked}, indent=1, sort_keys=True))
            return name, when
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            name, when, before = str(told["run"]), float(told["when"]), dict(told["asked"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no run's: give another --out", param="out") from error
        if differs := [each for each in sorted({*before, *asked}) if before.get(each) != asked.get(each)]:
            raise UsageError(
                f"{self.path} holds another run ({', '.join(differs)} differ): give another --out, or the same options",
                param="out",
            )
        return name, when

    def _count(self) -> int:
        """Counts how often it was opened, this time included: prompts differ each time, or a cache would know them."""
        path = self.path / "opened"
        number = int(path.read_text()) + 1 if path.exists() else 1
        write_whole(path, str(number))
        return number

    # --- points

    @property
    def measured(self) -> list[MeasuredPoint]:
        """Points that are done, in the order in which they were measured."""
        return self._measured

    def add(self, one: MeasuredPoint) -> None:
        order = len(self._measured) + len(self.failed())
        said = {
            "order": order,
            "plan": asdict(one.plan),
            "look": one.look.model_dump(),
            "seconds": one.seconds,
            "took": one.took,
        }
        write_whole(self._points / f"{one.plan.key}.json", json.dumps(said))
        with room(self.path):
            write_parquet(one.samples, self._points / f"{one.plan.key}.parquet")
        self._measured.append(one)

    def _read(self) -> list[MeasuredPoint]:
        found = []
        for told in self._points.glob("*.json"):
            raw = told.with_suffix(".parquet")
            if raw.exists():
                said = json.loads(told.read_text())
                one = MeasuredPoint(
                    PointPlan(**said["plan"]),
                    read_parquet(raw),
                    ClientHealth(**said["look"]),
                    said["seconds"],
                    said["took"],
                )
                found.append((said["order"], one))
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]

    # --- failures

    def failed(self) -> list[FailedPoint]:
        path = self.path / "failures.json"
        told = json.loads(path.read_text()) if path.exists() else []
        return [
            FailedPoint(
                PointPlan(**each["plan"]) if each["plan"] else None,
                PointFailure(**each["failure"]),
                each["took"],
                each.get("anew", False),
            )
            for each in told
        ]

    def failed_before(self, plan: PointPlan) -> bool:
        """Returns whether it went wrong on this start once, in this run of the command or in one before."""
        return self._lost(plan).exists()

    def _lost(self, plan: PointPlan) -> Path:
        return self._points / f"{plan.key}.failed.parquet"

    def add_failure(self, one: FailedPoint, samples: Samples | None = None) -> None:
        """samples: of a point; they are kept for who looks into it, and go into no figure."""
        if one.plan is not None and samples is not None and len(samples):
            with room(self.path):
                write_parquet(samples, self._lost(one.plan))
        self._write_failed([*self.failed(), one])

    def forget_starts(self) -> None:
        """Forgets servers that did not start, or took no request: somebody may have mended it; and, once, a point in
        which somebody else's server went away."""
        if kept := [one for one in self.failed() if one.plan is not None and not one.anew]:
            self._write_failed(kept)
        else:
            (self.path / "failures.json").unlink(missing_ok=True)

    def _write_failed(self, all_of_them: list[FailedPoint]) -> None:
        told = [
            {
                "plan": asdict(one.plan) if one.plan else None, "failure": one.failure.model_dump(), "took": one.took,
                "anew": one.anew,
            }
            for one in all_of_them
        ]  # fmt: skip
        write_whole(self.path / "failures.json", json.dumps(told))

    def found(self, goals: tuple[float, ...]) -> list[PointResult]:
        """Returns all that was tried, for the planner."""
        lost = [failed(one.plan, goals, one.took) for one in self.failed() if one.plan is not None]
        return [*(one.found(goals) for one in self._measured), *lost]

    # --- files

    def new_log(self) -> Path:
        """Returns a path for the next process of the server."""
        return self.path / f"server-{len(list(self.path.glob('server-*.log')))}.log"

    def raw(self) -> tuple[Path, Samples]:
        """Returns all samples, also in one file."""
        samples = join([one.samples for one in self._measured])
        path = self.path / "raw.parquet"
        with room(self.path):
            write_parquet(samples, path)
        return path, samples

    def write(self, name: str, text: str) -> Path:
        write_whole(self.path / name, text)
        return self.path / name


def write_whole(path: Path, text: str) -> None:
    """Writes aside, then renames: a file of this name is whole."""
    aside = path.with_name(path.name + ".part")
    with room(path.parent):
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)


@contextmanager
def room(folder: Path) -> Iterator[None]:
    """Raises CapacityError for what cannot be written in it."""
    try:
        yield
    except OSError as error:
        raise CapacityError(
            f"{folder} cannot be written ({error.strerror or error}): make room; the same command goes on from there"
        ) from error

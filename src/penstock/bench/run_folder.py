"""The folder of a run. It has the run's settings, the finished points (load levels) and the
failures. A stopped run continues from it.

    run.json               the run's name, its settings (another run's folder is refused), its
                           load levels and failures
    points/KEY.parquet     a load level's samples on one start of the server; written before
                           run.json names the load level
    points/KEY.failed.parquet   the samples of a failed load level; they count for no figure
    server-N.log           the log of each server process
    raw.parquet, record.json, table.txt, report/     made from the above

Knows files; not how a load level is measured.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from penstock.almanac.board_power import Reading, encoded, read_board
from penstock.almanac.record import ClientHealth, PointFailure
from penstock.almanac.samples import Samples, join, needs_pyarrow, read_parquet, write_parquet
from penstock.bench.point_planner import PointResult
from penstock.errors import CapacityError, UsageError


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A load level measured on one server start: its result for the planner, the client's own
    measurements, and the draft tokens that the engine accepted a step."""

    result: PointResult
    look: ClientHealth
    accepted_drafts: float | None = None


@dataclass(frozen=True, slots=True)
class FailedPoint:
    """A load level that could not be measured. result None:
    no load level at all could be measured."""

    failure: PointFailure
    result: PointResult | None = None


class RunState(BaseModel):
    """The content of run.json. opened: how often the folder was opened, this time included; prompts
    differ each time, so that no cache knows them. points: in the order of measurement. machines:
    server start -> identity of the machine that measured it."""

    run: str
    when: float
    asked: dict[str, Any]
    opened: int = 0
    points: list[MeasuredPoint] = []
    failures: list[FailedPoint] = []
    machines: dict[int, str] = {}

    @property
    def found(self) -> list[PointResult]:
        """Returns the results of all tried load levels, for the planner."""
        lost = [one.result for one in self.failures if one.result is not None]
        return [one.result for one in self.points] + lost


class RunFolder:
    """A run's folder, locked for this process; `close` releases the lock."""

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        """Opens or makes the folder. Raises UsageError when it holds another run, is open
        elsewhere, or pyarrow is missing. Later writes that fail raise CapacityError."""
        needs_pyarrow()
        self.path = path
        try:
            (path / "points").mkdir(parents=True, exist_ok=True)
            self._lock = (path / "lock").open("w")
        except OSError as error:
            raise UsageError(
                f"the folder {path} cannot be used: {error.strerror or error}", param="out"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"another process measures into {path}: wait, or give another --out", param="out"
            ) from error
        self.state = self._begun(asked)
        self.state.opened += 1
        # Forget failures of servers that did not start or answered no request: the cause may be
        # fixed by now.
        self.state.failures = [one for one in self.state.failures if one.result is not None]
        self._save()

    def close(self) -> None:
        self._lock.close()

    def _begun(self, asked: dict[str, Any]) -> RunState:
        path = self.path / "run.json"
        if not path.exists():
            return RunState(
                run=hashlib.sha256(f"{asked}{time.time_ns()}".encode()).hexdigest()[:12],
                when=time.time(),
                asked=asked,
            )
        try:
            state = RunState.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise UsageError(f"{path} is no run's: give another --out", param="out") from error
        before = state.asked
        if differs := [
            each for each in sorted({*before, *asked}) if before.get(each) != asked.get(each)
        ]:
            raise UsageError(
                f"{self.path} holds another run ({', '.join(differs)} differ): give another --out,"
                " or the same options",
                param="out",
            )
        return state

    def _save(self) -> None:
        self.write("run.json", self.state.model_dump_json(indent=1))

    def add(self, one: MeasuredPoint, samples: Samples, board: Sequence[Reading] = ()) -> None:
        with room(self.path):
            write_parquet(samples, self._samples(one), encoded(board))
        self.state.points.append(one)
        self._save()

    def on_machine(self, start: int, identity: str) -> None:
        """Stores which machine measures a server start."""
        if self.state.machines.get(start) != identity:
            self.state.machines[start] = identity
            self._save()

    def _samples(self, one: MeasuredPoint) -> Path:
        return self.path / "points" / f"{one.result.plan.key}.parquet"

    def add_failure(self, one: FailedPoint, samples: Samples | None = None) -> None:
        """Stores a failure. samples: the failed load level's samples, kept for inspection; they
        count for no figure."""
        if one.result is not None and samples is not None and len(samples):
            with room(self.path):
                write_parquet(
                    samples, self.path / "points" / f"{one.result.plan.key}.failed.parquet"
                )
        self.state.failures.append(one)
        self._save()

    def new_log(self) -> Path:
        """Returns the log's path for the next server process."""
        return self.path / f"server-{len(list(self.path.glob('server-*.log')))}.log"

    def raw(self) -> tuple[Path, Samples, list[Reading]]:
        """Returns all samples and readings of power, and the file they were written to."""
        files = [self._samples(one) for one in self.state.points]
        samples = join([read_parquet(file) for file in files])
        board = [each for file in files for each in read_board(file)]
        path = self.path / "raw.parquet"
        with room(self.path):
            write_parquet(samples, path, encoded(board))
        return path, samples, board

    def write(self, name: str, text: str) -> Path:
        write_whole(self.path / name, text)
        return self.path / name


def write_whole(path: Path, text: str) -> None:
    """Writes a draft and renames it, so that a file of this name is always whole."""
    aside = path.with_name(path.name + ".part")
    with room(path.parent):
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)


@contextmanager
def room(folder: Path) -> Iterator[None]:
    """Turns a failed write in the folder into a CapacityError."""
    try:
        yield
    except OSError as error:
        raise CapacityError(
            f"{folder} cannot be written ({error.strerror or error}): make room; the same command"
            " goes on from there"
        ) from error

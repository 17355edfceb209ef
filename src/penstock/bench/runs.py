"""`penstock bench run`: shapes one after the other, each into its folder, with live progress; a table at the end.

It knows the order of things; each is done elsewhere.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.almanac.record import Record
from penstock.bench.live import Live
from penstock.bench.machine import this_machine
from penstock.bench.measure import Ceiling, Subject, asked_of, measure, run_name
from penstock.bench.method import Settings
from penstock.bench.report import print_table, write_report
from penstock.bench.run_folder import RunFolder
from penstock.bench.workload import Workload
from penstock.bench.writing import write_record
from penstock.errors import EngineError


@dataclass(frozen=True)
class Run:
    """What `bench run` was asked for. price: dollars an hour of the machine."""

    subject: Subject
    works: list[Workload]
    settings: Settings
    out: Path
    seed: int
    processes: int
    ceiling: Ceiling
    price: float | None = None
    random_weights: bool = False
    configuration: str = "default"


def run_all(run: Run) -> list[Record]:
    """The records, also written. Raises EngineError at the end if nothing at all could be measured."""
    version = run.subject.peer.version_of(run.subject.python) if run.subject.peer is not None else "unknown"
    machine = this_machine()
    records = []
    for work in run.works:
        folder = RunFolder(run.out / work.name.replace(":", "-"), asked_of(run.subject, work, run.settings, run.seed))
        with Live(work.name, sys.stderr) as live:
            measure(
                run.subject, work, run.settings, folder, seed=run.seed, processes=run.processes, ceiling=run.ceiling,
                tell=live.tell,
            )  # fmt: skip
        name, when = _name(folder)
        records.append(write_record(
            folder, run.subject, work, run.settings, machine=machine, version=version, seed=run.seed,
            processes=run.processes, ceiling=run.ceiling, price=run.price, random_weights=run.random_weights,
            configuration=run.configuration, run=name, when=when,
        ))  # fmt: skip
        write_report(folder, records[-1])
        print_table(records[-1], sys.stdout)
    if not any(record.points for record in records):
        raise EngineError(f"nothing could be measured: {records[0].failures[0].message}")
    return records


def _name(folder: RunFolder) -> tuple[str, float]:
    """The run's name and when it began: given once, kept in its folder."""
    path = folder.path / "name.json"
    if not path.exists():
        folder.write("name.json", json.dumps({"run": run_name({"path": folder.path.name}), "when": time.time()}))
    told = json.loads(path.read_text())
    return told["run"], told["when"]

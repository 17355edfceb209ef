"""`penstock bench run`: measures workload shapes one by one. Each goes into its own folder, with
live progress; a table is printed at the end.

Knows the order of the steps; each step has its own file.
"""

from __future__ import annotations

import re
import sys
from contextlib import closing

from penstock.almanac.record import Record
from penstock.bench.cpu_pinning import away_from
from penstock.bench.live_progress import LiveProgress
from penstock.bench.measure_shape import ShapeRun
from penstock.bench.run_folder import RunFolder
from penstock.bench.run_report import print_table, write_report
from penstock.bench.run_spec import RunSpec, fingerprint
from penstock.bench.workload import Workload
from penstock.bench.write_record import write_record
from penstock.errors import EngineError


def run_all(run: RunSpec) -> list[Record]:
    """Measures the run's workload shapes; writes and returns a benchmark record of each. Raises
    EngineError at the end if nothing could be measured, and at once if a server that somebody else
    started is gone. An interrupt ends the server, keeps the finished load levels, and says how to
    continue.
    """
    try:
        with away_from(list(run.subject.cores)):
            records = [_one(run, work) for work in run.works]
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"stopped: the points that are done are in {run.out}; the same command goes on from"
            " there"
        ) from stop
    if not any(record.points for record in records):
        failure = records[0].failures[0]
        raise EngineError(f"nothing could be measured: {failure.kind}: {failure.message}")
    return records


def _one(run: RunSpec, work: Workload) -> Record:
    place = run.out / re.sub(r"[^A-Za-z0-9._-]+", "-", work.name)
    with closing(RunFolder(place, fingerprint(run, work))) as folder:
        with LiveProgress(work.name, sys.stderr) as live:
            shape = ShapeRun(run, work, folder, live.tell)
            shape.measure()
        record = write_record(run, work, folder)
        report = write_report(folder, record)
        print_table(record, sys.stdout)
        print(f"{report}: the report, open it in a browser", file=sys.stdout)
    if shape.gone:
        raise EngineError(shape.gone)
    return record

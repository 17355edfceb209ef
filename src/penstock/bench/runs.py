"""`penstock bench run`: measures workload shapes one by one, or those of an edition together. Each
goes into its own folder, with live progress; a table is printed at the end.

Knows the order of the steps; each step has its own file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing

from penstock.almanac.record import Record
from penstock.bench.board_sampler import BoardSampler, sampler_of
from penstock.bench.cpu_pinning import away_from
from penstock.bench.live_progress import LiveProgress
from penstock.bench.measure_shape import ShapeRun, measure_together
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
    visible = {**os.environ, **run.subject.environment}.get("CUDA_VISIBLE_DEVICES")
    try:
        with away_from(list(run.subject.cores)), sampler_of(run, visible, _told) as board:
            together = [run.works] if run.settings.edition else [[work] for work in run.works]
            records = [record for works in together for record in _measured(run, works, board)]
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"stopped: the points that are done are in {run.out}; the same command goes on from"
            " there"
        ) from stop
    if not any(record.points for record in records):
        failure = records[0].failures[0]
        raise EngineError(f"nothing could be measured: {failure.kind}: {failure.message}")
    return records


def _told(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr)


def _measured(run: RunSpec, works: Sequence[Workload], board: BoardSampler | None) -> list[Record]:
    """Measures workload shapes on shared starts of the server, and writes a record of each."""
    with ExitStack() as stack:
        folders = [
            stack.enter_context(
                closing(
                    RunFolder(
                        run.out / re.sub(r"[^A-Za-z0-9._-]+", "-", work.name),
                        fingerprint(run, work),
                    )
                )
            )
            for work in works
        ]
        with LiveProgress(works[0].name, sys.stderr) as live:
            shapes = [
                ShapeRun(run, work, folder, live.of(work.name), board)
                for work, folder in zip(works, folders, strict=True)
            ]
            measure_together(run, shapes)
        records = []
        for work, folder in zip(works, folders, strict=True):
            records.append(write_record(run, work, folder))
            report = write_report(folder, records[-1])
            print_table(records[-1], sys.stdout)
            print(f"{report}: the report, open it in a browser", file=sys.stdout)
    for shape in shapes:
        if shape.gone:
            raise EngineError(shape.gone)
    return records

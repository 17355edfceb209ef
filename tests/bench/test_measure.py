"""Runs against an engine that can be killed and led astray: faults by their names, other points
kept, stopped runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import bench_runs
import numpy as np
import pytest
from bench_runs import ENGINE, MACHINE, QUICK, fake_peer, held_run, measured, run_of
from made_samples import samples_of
from service import until

from penstock.almanac.samples import read_parquet
from penstock.almanac.validate import validate
from penstock.bench.measure_shape import fault_of, kind_of
from penstock.bench.point_planner import CLOSED, OPEN, SATURATION, SINGLE, PointPlan
from penstock.bench.run_folder import RunFolder
from penstock.bench.run_spec import RunSpec, ServerSpec, fingerprint
from penstock.bench.server_process import ServerProcess, free_port
from penstock.bench.workload import workload
from penstock.bench.write_record import write_record
from penstock.errors import UsageError


def failures(folder: RunFolder) -> list[tuple[str | None, str]]:
    return [(one.failure.point, one.failure.kind) for one in folder.state.failures]


def kinds(folder: RunFolder) -> set[str]:
    return {one.result.plan.kind for one in folder.state.points}


def test_a_run_measures_its_points_and_its_record_is_believed(tmp_path: Path) -> None:
    run = replace(run_of(tmp_path, settings=replace(QUICK, starts=2)), price=2.0)
    folder = measured(run)
    assert failures(folder) == [] and kinds(folder) == {SATURATION, SINGLE, OPEN}
    assert [
        one.result.plan.start for one in folder.state.points if one.result.plan.kind == SINGLE
    ] == [0, 1]
    assert sorted(path.name for path in folder.path.glob("server-*.log")) == [
        "server-0.log",
        "server-1.log",
    ]
    record = write_record(run, workload("8x4"), folder)
    assert validate(folder.path / "record.json", folder.path / "raw.parquet") == record
    assert record.engine.command.endswith("fake_engine.py 8000") and record.engine.version == "1.2"
    assert (record.method.short, record.method.starts, record.method.price_per_hour) == (
        True,
        2,
        2.0,
    )
    opened = [point for point in record.points if point.kind == "open"]
    assert opened and all(
        point.requests == round((point.rate or 0) * point.seconds) for point in opened
    )
    single = next(point for point in record.points if point.kind == "single")
    assert single.requests == 6 and single.complete == 6 and single.output_tokens == 24


def test_a_point_that_kills_the_server_costs_itself_alone(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    folder = measured(run_of(tmp_path, "dies_above=20", f"count={starts}"))
    assert failures(folder)[0] == (SATURATION, "crashed")
    assert SINGLE in kinds(folder) and OPEN in kinds(folder)
    # a fresh one after each
    assert len(starts.read_text().splitlines()) == 1 + len(failures(folder))
    told = folder.state.failures[0].failure
    assert told.message.startswith("the server ended") and "going down" in told.log
    assert "\x1b" not in told.log and "\x07" not in told.log and "\u200b" not in told.log
    # of no figure, but there to look into
    kept = read_parquet(folder.path / "points" / "saturation.0.failed.parquet")
    assert len(kept) == QUICK.at_once and "cut" in set(kept.outcome)
    run = run_of(tmp_path, "dies_above=20", f"count={starts}")
    record = write_record(run, workload("8x4"), folder)
    assert (
        validate(folder.path / "record.json", folder.path / "raw.parquet").failures
        == record.failures
    )
    assert record.failures[0].point == SATURATION


@pytest.mark.parametrize(
    ("ending", "kind"), [("length", "context too short"), ("stop", "wrong output")]
)
def test_answers_that_are_cut_are_told_by_how_they_ended(
    tmp_path: Path, ending: str, kind: str
) -> None:
    """A server that cuts at its context says `length`, before as much as was asked for; another end
    is a wrong one."""
    folder = measured(run_of(tmp_path, "less=1", f"ending={ending}"))
    assert failures(folder) == [(None, kind)]
    told = folder.state.failures[0].failure.message
    assert "3 tokens out, 4 were asked for" in told
    assert ("11 tokens in and out" if ending == "length" else "ignore_eos is not heeded") in told


@pytest.mark.parametrize(
    ("kind", "outcomes", "fault"),
    [
        (OPEN, ["unfinished"] * 9, None),
        (CLOSED, ["unfinished"] * 9, None),
        (SATURATION, ["unfinished"] * 9, "unfinished"),
        (SINGLE, ["unfinished"], "unfinished"),
        (OPEN, ["unfinished"] * 8 + ["status"], None),
        (OPEN, ["unfinished"] * 4 + ["status"] * 3 + ["cut"] * 2, "status"),
        (SATURATION, ["length"] * 8 + ["ok"], None),
        (SATURATION, ["length"] * 5 + ["cut"], "length"),
        (OPEN, [], "unfinished"),
    ],
)
def test_what_makes_a_point_a_failure(kind: str, outcomes: list[str], fault: str | None) -> None:
    count = len(outcomes)
    samples = samples_of(
        np.arange(count), np.arange(count) + 1.0, [np.zeros(3)] * count, outcome=outcomes
    )
    assert fault_of(PointPlan("p", kind, 0, 9.0), samples) == fault


@pytest.mark.parametrize(
    ("outcome", "message", "kind"),
    [
        (
            "status",
            (
                "status 200, then an error in its place: {'message': 'Context size has been"
                " exceeded.'}"
            ),
            "context too short",
        ),
        (
            "status",
            "status 400: {'message': 'request (2048 tokens) exceeds the available context size'}",
            "context too short",
        ),
        (
            "status",
            "status 400: This model's maximum context length is 2048 tokens",
            "context too short",
        ),
        (
            "status",
            "status 400: a prompt has 4000 tokens and the context 2304, with room for one",
            "context too short",
        ),
        ("status", "status 500: CUDA error in context 3", "wrong output"),
        ("status", "status 400: n is not supported", "refused"),
        ("status", "status 200, then an error in its place: CUDA out of memory", "out of memory"),
        ("status", "status 500: CUDA error: invalid device context", "wrong output"),
        ("length", "5 tokens out, 4 were asked for", "wrong output"),
        ("refused", "no connection", "refused"),
        ("stalled", "no byte for 9 s", "stalled"),
    ],
)
def test_a_failure_is_told_by_its_word(outcome: str, message: str, kind: str) -> None:
    assert kind_of(outcome, message) == kind


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("version: 11434 (abc)", "11434"),
        ("vllm 0.26.0+cu130", "0.26.0+cu130"),
        ("version: 0.6.0-dev (build 11434, commit abc)", "b11434"),
        ("version: 0.6.0-dev (build 0, commit unknown)", "0.6.0"),
    ],
)
def test_an_engines_version_is_read_from_what_it_prints(said: str, version: str) -> None:
    assert (
        fake_peer(version=["{python}", "-c", f"print({said!r})"]).version_of(sys.executable)
        == version
    )


# --- a server that is there


def there(tmp_path: Path, *options: str) -> ServerProcess:
    port = free_port()
    return ServerProcess(
        [sys.executable, str(ENGINE), str(port), *options], port, tmp_path / "there.log"
    )


def by_url(out: Path, port: int) -> RunSpec:
    subject = ServerSpec(
        name="Tiny-1B",
        model="tiny",
        version="7",
        url=f"http://127.0.0.1:{port}",
        engine="other",
        vocabulary=500,
    )
    return RunSpec(subject, [workload("8x4")], QUICK, out, 0, 1, MACHINE)


def test_a_server_that_is_there_is_measured_and_left_alone(tmp_path: Path) -> None:
    with there(tmp_path) as server:
        run = by_url(tmp_path, server.port)
        folder = measured(run)
        assert not server.ended(0)
    assert failures(folder) == [] and OPEN in kinds(folder)
    record = write_record(run, workload("8x4"), folder)
    assert (record.engine.name, record.engine.version) == (
        "other",
        "7",
    ) and "127.0.0.1" in record.engine.command
    assert not list(folder.path.glob("server-*.log"))


# --- stopping and going on

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from bench_runs import held_run
from penstock.bench.run_folder import RunFolder
from penstock.bench.runs import run_all
from penstock.cli.exit_codes import stopped_by_sigterm
out, points, add = Path(sys.argv[2]), int(sys.argv[3]), RunFolder.add
def adds(folder, *point):
    add(folder, *point)
    if len(folder.state.points) == points:
        (out / "hold").touch()
RunFolder.add = adds
stopped_by_sigterm(lambda: run_all(held_run(out)))
"""


def stopped(out: Path, number: signal.Signals, points: int) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own that gets a signal once so many points are done; its server
    answers nothing from then on."""
    command = [sys.executable, "-c", SCRIPT, str(Path(bench_runs.__file__).parent)]
    process = subprocess.Popen(
        [*command, str(out), str(points)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    until(lambda: (out / "hold").exists() or process.poll() is not None)
    time.sleep(0.1)  # the next point has begun, on a quick machine
    process.send_signal(number)
    told = process.wait(600), process.stderr.read() if process.stderr else ""
    (out / "hold").unlink()
    return subprocess.CompletedProcess(command, told[0], "", told[1])


def test_a_stopped_run_and_a_killed_one_end_their_servers_and_go_on(tmp_path: Path) -> None:
    told = stopped(tmp_path, signal.SIGTERM, 1)
    assert told.returncode != 0 and "the same command goes on from there" in told.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "starts").read_text()), 0)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("8x4/points/*.parquet")}
    stopped(tmp_path, signal.SIGKILL, 2)
    server = int((tmp_path / "starts").read_text().split()[-1])
    until(lambda: not Path(f"/proc/{server}").exists())  # it does not outlive its run
    # samples that run.json doesn't name are none
    (tmp_path / "8x4" / "points" / "open-9.0.parquet").write_text("{")
    folder = measured(held_run(tmp_path))
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("8x4/points/*.parquet")}
    assert before and before.items() <= after.items() and len(after) > len(before)
    assert (
        failures(folder) == []
        and kinds(folder) == {SATURATION, SINGLE, OPEN}
        and folder.state.opened == 3
    )
    names = [one.result.plan.key for one in folder.state.points]
    assert len(set(names)) == len(names) and "open-9.0" not in names


def test_another_runs_folder_is_refused_by_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, work = run_of(tmp_path), workload("8x4")
    folder = RunFolder(tmp_path / "f", fingerprint(run, work))
    with pytest.raises(UsageError, match="another process measures"):
        RunFolder(tmp_path / "f", fingerprint(run, work))
    folder.close()
    changes = {
        "version": replace(run, subject=replace(run.subject, version="2.0")),
        "options": replace(run, subject=replace(run.subject, options=("a",))),
        "environment": replace(run, subject=replace(run.subject, environment={"A": "1"})),
        "prompts": replace(run, subject=replace(run.subject, ids=False)),
        "seed": replace(run, seed=1),
        "settings": replace(run, settings=replace(QUICK, window=9.0)),
        "processes": replace(run, processes=2),
        "model": replace(run, subject=replace(run.subject, model="other")),
        "commit": replace(run, commit="0123456789ab"),
        "machine": replace(run, machine=run.machine.model_copy(update={"cores": 64})),
        "python": replace(run, subject=replace(run.subject, python="/other/python")),
    }
    for name, other in changes.items():
        with pytest.raises(UsageError, match=rf"holds another run \({name} differ\)"):
            RunFolder(tmp_path / "f", fingerprint(other, work))
    for more in (
        {"environment": {"A": "1"}},
        {"path": "/x"},
        {"more": {"top_k": 1}},
        {"without": ["seed"]},
    ):
        # an own .toml, edited since
        other = replace(run, subject=replace(run.subject, peer=fake_peer(**more)))
        with pytest.raises(UsageError, match=r"holds another run \(engine differ\)"):
            RunFolder(tmp_path / "f", fingerprint(other, work))
    with (
        monkeypatch.context() as installed,
        pytest.raises(UsageError, match=r"another run \(penstock differ\)"),
    ):
        installed.setattr("penstock.bench.run_spec.__version__", "99.0")
        RunFolder(tmp_path / "f", fingerprint(run, work))
    again = RunFolder(tmp_path / "f", fingerprint(run, work))
    # a refused one has not opened it
    assert (again.state.run, again.state.opened) == (
        folder.state.run,
        2,
    )
    again.close()
    (tmp_path / "f" / "run.json").write_text(json.dumps({"asked": 1}))
    with pytest.raises(UsageError, match="is no run's"):
        RunFolder(tmp_path / "f", fingerprint(run, work))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        RunFolder(tmp_path / "file", fingerprint(run, work))

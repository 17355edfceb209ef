"""`--edition`: its plans, server starts that shapes share, and power read beside the load."""

from __future__ import annotations

import ctypes
import http.client
import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_runs import QUICK, fake_peer, run_of
from made_samples import open_loop
from typer.testing import CliRunner

from penstock.almanac.board_power import read_board
from penstock.almanac.machine_spread import EDITION as TERM
from penstock.almanac.record import Gpu
from penstock.almanac.validate import validate
from penstock.bench import board_sampler
from penstock.bench.board_sampler import Boards, BoardSampler, sampler_of
from penstock.bench.compare import compare, print_comparison
from penstock.bench.point_planner import (
    EDITION,
    OPEN,
    SATURATION,
    SINGLE,
    PointPlan,
    PointResult,
    next_plan,
)
from penstock.bench.runs import run_all
from penstock.bench.workload import workload
from penstock.cli.root import app
from penstock.errors import EngineError, UsageError


def result(plan: PointPlan, most: float, slow: float) -> PointResult:
    """A server of `most` requests a second, whose load levels take `slow` times what is planned."""
    ends = {SINGLE: min(plan.window, 5 / most * 30), SATURATION: min(plan.window, 1000 / most)}
    took = ends.get(plan.kind, slow * (plan.opens + plan.window + plan.drain))
    met = {goal: float((plan.rate or 0) < 0.8 * most) for goal in EDITION.goals}
    return PointResult(plan, most if plan.rate is None else plan.rate, met, met, took=took)


@pytest.mark.parametrize("most", [0.5, 8.0, 60.0, 500.0])
@pytest.mark.parametrize("slow", [0.5, 1.0])
def test_an_edition_measures_both_starts_within_eight_minutes(most: float, slow: float) -> None:
    found: list[PointResult] = []
    while (plan := next_plan(EDITION, found)) is not None:
        found.append(result(plan, most, slow))
    for start in (0, 1):
        kinds = [each.plan.kind for each in found if each.plan.start == start]
        assert kinds[:2] == [SINGLE, SATURATION]
    assert sum(each.took for each in found) <= 480
    assert all(each.plan.requests == 1000 for each in found if each.plan.kind == SATURATION)
    opened = [each.plan for each in found if each.plan.kind == OPEN]
    assert opened or most < 8
    assert all(20.0 <= plan.window <= 40.0 + 1e-9 for plan in opened)


def test_an_edition_counts_the_time_after_a_window_as_long_as_it_may_be() -> None:
    found: list[PointResult] = []
    while (plan := next_plan(EDITION, found)) is not None:
        # requests end 120 s after their first token where others run beside them
        loaded = 30.0 if plan.kind == SINGLE else 120.0
        found.append(replace(result(plan, 60.0, 1.0), loaded=loaded))
    assert sum(each.took for each in found) <= 450


def test_a_number_at_once_that_was_asked_for_stays_and_makes_no_edition() -> None:
    assert EDITION.of_samples(64).at_once == 4096 // 64
    asked = replace(EDITION, at_once=640)
    assert asked.of_samples(64).at_once == 10
    assert EDITION.keeps_edition and not replace(EDITION, at_once=2000).keeps_edition


def test_shapes_share_the_starts_of_an_edition_and_a_stopped_one_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(QUICK, edition=True, starts=2)
    run = replace(run_of(tmp_path, settings=settings), works=[workload("8x4"), workload("6x3")])
    once = run_all(
        replace(run, settings=replace(settings, starts=1))
    )  # another run: other settings
    assert [record.method.starts for record in once] == [1, 1]
    assert len(list(tmp_path.rglob("server-*.log"))) == 1
    again = replace(run, out=tmp_path / "two")
    records = run_all(again)
    assert [record.shape.name for record in records] == ["8x4", "6x3"]
    assert [record.method.starts for record in records] == [2, 2]
    assert len(list((tmp_path / "two").rglob("server-*.log"))) == 2
    assert run_all(again) == records  # all is done: nothing is started, nothing changes
    assert len(list((tmp_path / "two").rglob("server-*.log"))) == 2
    # these windows are below the edition's: the records say no more than that they are short
    assert all(record.method.edition is None and record.method.short for record in records)


def test_a_shape_that_is_refused_costs_the_others_no_start_of_the_server(tmp_path: Path) -> None:
    run = run_of(tmp_path, "most=7", settings=replace(QUICK, edition=True))
    refused, done = run_all(replace(run, works=[workload("8x4"), workload("6x3")]))
    assert [each.kind for each in refused.failures] == ["refused"] and done.failures == []
    assert len(list(tmp_path.rglob("server-*.log"))) == 1


@pytest.mark.parametrize(("window", "term"), [(20.0, TERM), (19.0, None)])
def test_a_record_is_an_edition_only_where_the_method_was_kept(
    tmp_path: Path, window: float, term: Any
) -> None:
    from penstock.bench.run_folder import RunState
    from penstock.bench.write_record import method_of

    settings = replace(EDITION, window=window)
    done = [
        {"result": result(PointPlan(kind, kind, start, 20.0), 8.0, 1.0), "look": None}
        for start in (0, 1)
        for kind in (SINGLE, SATURATION)
    ]
    state = RunState.model_construct(
        run="x", when=0.0, asked={}, points=[_Point(each) for each in done], failures=[]
    )
    made = method_of(run_of(tmp_path, settings=settings), workload("8x4"), state)
    assert made.edition == term and made.short and made.starts == 2
    state.points = state.points[:2]
    assert method_of(run_of(tmp_path, settings=settings), workload("8x4"), state).edition is None


class _Point:
    def __init__(self, told: dict[str, Any]) -> None:
        self.result = told["result"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["http://127.0.0.1:1", "--edition"], "--edition starts the engine twice"),
        (["--engine", "penstock", "--edition", "--minutes", "9"], "no --minutes"),
        (["--engine", "penstock", "--edition", "--short"], "--short and --edition are two things"),
    ],
)
def test_an_edition_with_what_it_cannot_have_is_refused_in_a_line(
    words: list[str], why: str
) -> None:
    told = CliRunner().invoke(
        app, ["bench", "run", *words, "--model", "demo", "--shape", "8x4", "--out", "never-made"]
    )
    assert told.exit_code == 2 and why in " ".join(told.output.split())


# --- power


class Driver:
    """NVML for two boards of 400 and 300 W, 80 and 40 % busy. refuses: a call that fails."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any) -> int:
            if name == self.refuses:
                return 3
            if name == "nvmlDeviceGetCount_v2":
                words[0]._obj.value = 2
            elif name == "nvmlDeviceGetHandleByIndex_v2":
                words[1]._obj.value = 1 + words[0]
            elif name == "nvmlDeviceGetHandleByUUID":
                words[1]._obj.value = int(words[0][-1:])
            elif name == "nvmlDeviceGetPowerUsage":
                words[1]._obj.value = {1: 400_000, 2: 300_000}[words[0].value]
            elif name == "nvmlDeviceGetUtilizationRates":
                words[1]._obj[0] = {1: 80, 2: 40}[words[0].value]
            return 0

        return call


@pytest.mark.parametrize(
    ("visible", "told"),
    [(None, (700.0, 0.6)), ("1", (300.0, 0.4)), ("0,-1", (400.0, 0.8)), ("GPU-2", (300.0, 0.4))],
)
def test_the_boards_that_a_server_sees_are_read(
    visible: str | None, told: tuple[float, float]
) -> None:
    assert Boards(Driver(), visible).read() == pytest.approx(told)


def test_a_driver_that_refuses_is_named_by_its_call() -> None:
    boards = Boards(Driver("nvmlDeviceGetPowerUsage"))
    with pytest.raises(EngineError, match="nvmlDeviceGetPowerUsage returned 3"):
        boards.read()


def test_readings_are_stamped_from_a_load_levels_begin_on() -> None:
    with BoardSampler(lambda: (500.0, 0.9), every=0.01) as sampler:
        time.sleep(0.1)
        begin = time.monotonic()
        while len(found := sampler.since(begin, "open-2", 1)) < 3:
            time.sleep(0.01)
    assert all(each[:2] == ("open-2", 1) and each[3:] == (500.0, 0.9) for each in found)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert found[0].seconds >= 0 and len(sampler.since(0.0, "all", 0)) > len(found)


def test_a_run_with_power_keeps_it_in_record_and_raw_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_sampler, "EVERY", 0.02)
    monkeypatch.setattr(board_sampler, "sampler_of", None)
    monkeypatch.setattr("penstock.bench.runs.sampler_of", lambda *_: _fast())
    (record,) = run_all(run_of(tmp_path, settings=replace(QUICK, window=1.0)))
    boards = {point.kind: point.board for point in record.points}
    assert boards[OPEN] is not None and boards[OPEN].watts == 250.0
    raw = tmp_path / "8x4" / "raw.parquet"
    assert {each.point for each in read_board(raw)} == {point.name for point in record.points}
    assert validate(tmp_path / "8x4" / "record.json", raw) == record
    assert "250" in (tmp_path / "8x4" / "table.txt").read_text()


def _fast() -> BoardSampler:
    return BoardSampler(lambda: (250.0, 1.0), every=0.02)


def test_where_power_cannot_be_read_a_line_says_so_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, told = run_of(tmp_path), []
    monkeypatch.setattr(board_sampler, "identity", lambda: None)
    with sampler_of(run, None, told.append) as none:
        assert none is None
    assert told == []  # no GPU: nothing to say
    gpu = Gpu(name="NVIDIA H200", count=1, memory_mib=1, driver="580")
    run = replace(run, machine=run.machine.model_copy(update={"gpu": gpu}))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    with sampler_of(run, None, told.append) as none:
        assert none is None
    assert told == ["the record has no power: NVML sees 2 of 1 GPUs"]
    with sampler_of(run, "0", told.append) as sampler:
        assert sampler is not None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver("nvmlInit_v2"))
    with sampler_of(run, "0", told.append) as none:
        assert none is None
    assert told[1:] == ["the record has no power: NVML's nvmlInit_v2 returned 3"]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    for elsewhere in (
        on(run, "gpu-another"),
        replace(run, subject=replace(run.subject, peer=None, url="http://far.example:8000")),
    ):
        with sampler_of(elsewhere, "0", told.append) as none:
            assert none is None
        assert told.pop() == "the record has no power: the record's machine is not this one"


def test_samples_of_a_folder_without_power_stay_as_they_were(tmp_path: Path) -> None:
    from penstock.almanac.samples import write_parquet

    write_parquet(open_loop(), tmp_path / "a.parquet")
    write_parquet(open_loop(), tmp_path / "b.parquet", {})
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


# --- drafts


class Metrics:
    def __init__(self, text: str) -> None:
        self.text = text

    def get(self, path: str) -> str:
        assert path == "/metrics"
        return self.text


def test_accepted_drafts_are_the_difference_of_two_counters() -> None:
    from penstock.bench.draft_counters import accepted, read_counters

    names = ["e:accepted_total", "e:drafts_total"]

    def counted(text: str) -> list[float] | None:
        return read_counters(Metrics(text), names)  # type: ignore[arg-type]

    text = '# HELP\ne:accepted_total{m="a"} 3\ne:accepted_total{m="b"} 1.0\ne:drafts_total 2\n'
    before, after = counted(text), counted("e:accepted_total 13\ne:drafts_total 5.0\n")
    assert before == [4.0, 2.0] and accepted(before, after) == 3.0
    assert counted("e:drafts_total 5") is None and read_counters(None, names) is None
    assert accepted(before, before) is None and accepted(None, after) is None
    for text in ("nan", "+Inf", "many"):
        assert counted(f"e:accepted_total 3\ne:drafts_total {text}") is None


@pytest.mark.parametrize("error", [OSError("gone"), http.client.IncompleteRead(b"")])
def test_counters_of_a_server_that_does_not_answer_are_unknown(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from penstock.bench.draft_counters import read_counters

    def fails(self: Metrics, path: str) -> str:
        raise error

    monkeypatch.setattr(Metrics, "get", fails)
    assert read_counters(Metrics(""), ["a", "b"]) is None  # type: ignore[arg-type]


def test_a_server_without_metrics_is_measured_without_drafts(tmp_path: Path) -> None:
    (record,) = run_all(run_of(tmp_path, "metrics=no", peer=fake_peer(drafts=["a", "b"])))
    assert record.points and record.failures == []
    assert all(point.accepted_drafts is None for point in record.points)


# --- machines


def on(run: Any, identity: str | None) -> Any:
    return replace(run, machine=run.machine.model_copy(update={"identity": identity}))


def test_a_run_goes_on_on_another_machine_only_where_its_record_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.bench import measure_shape

    run = run_of(tmp_path, settings=replace(QUICK, edition=True, starts=2))
    whole = measure_shape.next_plan

    def only(start: int) -> Any:
        def told(settings: Any, found: Any) -> PointPlan | None:
            plan = whole(settings, found)
            return plan if plan is not None and plan.start <= start else None

        return told

    monkeypatch.setattr(measure_shape, "next_plan", only(0))
    run_all(on(run, "gpu-one"))
    monkeypatch.setattr(measure_shape, "next_plan", whole)
    with pytest.raises(UsageError, match="was begun on gpu-one, and this machine is one without"):
        run_all(on(run, None))
    (record,) = run_all(on(run, "gpu-two"))
    assert record.machine.identity == "gpu-one"
    assert record.method.machines == ["gpu-one", "gpu-two"]
    assert validate(tmp_path / "8x4" / "record.json", tmp_path / "8x4" / "raw.parquet") == record


def test_a_start_that_another_machine_began_is_not_gone_on_with(tmp_path: Path) -> None:
    from penstock.bench.run_folder import RunFolder
    from penstock.bench.run_spec import fingerprint

    run = run_of(tmp_path)
    folder = RunFolder(tmp_path / "8x4", fingerprint(run, workload("8x4")))
    folder.on_machine(0, "gpu-one")
    folder.close()
    way_out = r"start 0 in .* begun on gpu-one, and this machine is gpu-two: .* or remove (\S+): "
    with pytest.raises(UsageError, match=way_out) as refused:
        run_all(on(run, "gpu-two"))
    assert f"remove {tmp_path / '8x4'}: this shape is then measured anew" in str(refused.value)


def test_a_start_that_a_machine_without_a_name_measured_gets_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.bench import measure_shape

    run = run_of(tmp_path, settings=replace(QUICK, starts=2))
    whole = measure_shape.next_plan
    monkeypatch.setattr(
        measure_shape, "next_plan", lambda settings, found: None if found else whole(settings, [])
    )
    (record,) = run_all(on(run, None))
    assert len(record.points) == 1 and record.machine.identity is None
    (record,) = run_all(on(run, "gpu-two"))  # nothing is left to measure
    assert record.machine.identity is None
    monkeypatch.setattr(measure_shape, "next_plan", whole)
    with pytest.raises(
        UsageError, match=r"begun on one without a name .*, and this machine is gpu"
    ):
        run_all(on(run, "gpu-two"))


def test_a_machines_name_is_a_checksum_of_its_gpus_or_of_its_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.bench import machine_probe

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine_probe, "SYSTEM_ID", tmp_path / "machine-id")
    assert machine_probe.identity() is None
    (tmp_path / "machine-id").write_text("uninitialized\n")
    assert machine_probe.identity() is None
    (tmp_path / "machine-id").write_text(f"{'0123' * 8}\n")
    system = machine_probe.identity()
    assert system is not None and system.startswith("host-") and "0123" not in system
    ids = [f"GPU-{at}1e0a8d4-3c0d-4f6e-9b0a-0123456789ab" for at in range(2)]
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '{ids[1]}\\n{ids[0]}\\n'\n")
    smi.chmod(0o755)
    both = machine_probe.identity()
    smi.write_text(f"#!/bin/sh\nprintf '{ids[0]}\\n{ids[1]}\\n'\n")
    assert both == machine_probe.identity() and both is not None and both.startswith("gpu-")


def test_what_an_installation_lacks_stands_in_the_record(tmp_path: Path) -> None:
    (record,) = run_all(run_of(tmp_path, lacks=("FlashInfer", "DeepGEMM")))
    assert record.engine.lacks == ["FlashInfer", "DeepGEMM"]
    print_comparison(compare(record, record), out := io.StringIO())
    assert "not alike: A's installation lacks FlashInfer, DeepGEMM" in out.getvalue()


def test_variables_of_engines_and_their_kernels_stand_in_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock.cli.bench_subject import _inherited

    heeded = {"SGLANG_X": "1", "FLASHINFER_X": "2", "TRITON_X": "3"}
    for name, value in {**heeded, "SGLANG_API_KEY": "x"}.items():
        monkeypatch.setenv(name, value)
    assert _inherited().items() >= heeded.items() and "SGLANG_API_KEY" not in _inherited()

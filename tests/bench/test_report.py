"""What a run says: table, comparison; and that a record holds neither secrets nor what nobody can
read."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench_runs import run_of
from made_records import made_records

from penstock.almanac.figures import Kept
from penstock.almanac.record import Interval, PointFailure, Record
from penstock.bench.compare import (
    CLIENT_SHORT,
    SAME,
    UNKNOWN,
    UNTRIED,
    compare,
    print_comparison,
    ratio_ends,
    record_at,
)
from penstock.bench.run_folder import FailedPoint, RunFolder
from penstock.bench.run_report import print_table
from penstock.bench.run_spec import fingerprint
from penstock.bench.slo_crossing import crossings
from penstock.bench.workload import workload
from penstock.bench.write_record import (
    command_of,
    option_files,
    without_folders,
    write_record,
)
from penstock.errors import RecordError, UsageError


def record(number: int = 0) -> Record:
    return list(made_records(number + 1))[number]


def test_the_table_has_a_line_a_point_and_tells_failures() -> None:
    found = record(0)
    failed = PointFailure(point=None, kind="refused", message="status 400: too long", log="")
    out = io.StringIO()
    print_table(found.model_copy(update={"failures": [failed]}), out)
    lines = out.getvalue().splitlines()
    for point in found.points:
        assert sum(line.strip().startswith(f"{point.name} ") for line in lines) == 1
    assert "failed: every point: refused: status 400: too long" in lines
    assert sum("first token within" in line for line in lines) == len(found.method.goals)
    price, whole = (
        found.method.price_per_hour,
        next(each for each in found.points if each.kind == "saturation"),
    )
    assert price is not None and whole.figures.request_rate is not None
    thousand = f"${1000 * price / 3600 / whole.figures.request_rate.value:,.4g} a thousand requests"
    assert any(
        line.startswith(f"everything at once, at ${price:g} an hour: {thousand}") for line in lines
    )


# --- crossings


def with_goals(
    *goals: tuple[float, float, float, float], completed: dict[float, Interval] | None = None
) -> Record:
    """Of open points alone: (rate, share, low, high) of each, in a window of 100 s. completed:
    where that is less."""
    found = record()
    points = [point for point in found.points if point.kind == "open"]
    goal = points[0].goals[0]
    made = [
        points[0].model_copy(
            update={
                "name": f"open-{rate:g}",
                "rate": rate,
                "requests": round(100 * rate),
                "seconds": 100.0,
                "figures": points[0].figures.model_copy(
                    update={
                        "request_rate": (completed or {}).get(
                            rate, Interval(value=rate, low=rate, high=rate)
                        )
                    }
                ),
                "goals": [
                    goal.model_copy(
                        update={"seconds": 1.0, "share": share, "low": low, "high": high}
                    )
                ],
            }
        )
        for rate, share, low, high in goals
    ]
    method = found.method.model_copy(update={"goals": [1.0], "quantile": 0.95})
    return found.model_copy(update={"points": made, "method": method})


def test_crossings_are_compared_by_what_is_sure_of_them() -> None:
    """MOVER: the distances in logarithms, as squares. 20 [20, 24] over 5 [4, 8] is 4, from 4 / 1.6
    to 4 x 1.334."""
    slow = with_goals(
        (4.0, 1.0, 0.96, 1.0), (5.0, 0.96, 0.9, 0.99), (6.0, 0.9, 0.8, 0.97), (8.0, 0.5, 0.4, 0.6)
    )
    (crossing,) = crossings(slow)
    assert crossing.kept == Kept(rate=5.0, low=4.0, missed=6.0, high=8.0)
    quick = with_goals((20.0, 1.0, 0.97, 1.0), (24.0, 0.1, 0.0, 0.2))
    unsure = with_goals((6.0, 0.96, 0.5, 1.0), (7.0, 0.9, 0.5, 0.99))
    beyond = with_goals((20.0, 1.0, 0.97, 1.0))
    for other, told in (
        (quick, "B / A 2.50 to 5.34"),
        (slow, f"B / A 0.59 to 1.68: {SAME}"),
        (unsure, f"B / A {UNTRIED}"),
        (beyond, "B / A at least 2.50"),
    ):
        assert compare(slow, other).goals[0].endswith(told)
    assert compare(quick, slow).goals[0].endswith("B / A 0.19 to 0.40")
    assert compare(beyond, slow).goals[0].endswith("B / A at most 0.40")


def of_a_short_client(found: Record, *names: str) -> Record:
    """At the points of these names; at all of them where none is given."""
    points = [
        point.model_copy(
            update={
                "client": point.client.model_copy(
                    update={"short": not names or point.name in names}
                )
            }
        )
        for point in found.points
    ]
    return found.model_copy(update={"points": points})


def test_points_of_a_client_that_was_short_rank_nobody() -> None:
    slow, quick = (
        with_goals((4.0, 1.0, 0.96, 1.0), (8.0, 0.5, 0.4, 0.6)),
        with_goals((20.0, 1.0, 0.97, 1.0)),
    )
    (crossing,) = crossings(of_a_short_client(quick))
    assert crossing.kept == Kept(None, None, None, None)
    assert (
        compare(slow, of_a_short_client(quick))
        .goals[0]
        .endswith("B: no rate that was tried can be ranked")
    )
    found = record()
    for pair in ((found, of_a_short_client(found)), (of_a_short_client(found), found)):
        assert {ratio.verdict for ratio in compare(*pair).ratios} == {CLIENT_SHORT}


def at_once(found: Record, value: float, low: float, high: float) -> Record:
    """With everything at once, that gave so much."""
    point = next(each for each in record().points if each.kind == "saturation")
    rate = Interval(value=value, low=low, high=high)
    whole = point.model_copy(
        update={"figures": point.figures.model_copy(update={"request_rate": rate})}
    )
    return found.model_copy(update={"points": [whole, *found.points]})


def test_no_rate_is_told_that_everything_at_once_did_not_give() -> None:
    """1.575 were offered, and 1.4 [1.1, 1.7] completed: not significantly less. The engine gives
    1.522 at most."""
    served = {1.575: Interval(value=1.4, low=1.1, high=1.7)}
    alone = with_goals((1.575, 1.0, 0.97, 1.0), completed=served)
    capped = at_once(alone, 1.371, 1.219, 1.522)
    (free,), (crossing,) = crossings(alone), crossings(capped)
    assert free.kept == Kept(rate=1.58, low=1.1, missed=None, high=None)  # 158 in 100 s
    assert crossing.kept == Kept(rate=1.522, low=1.1, missed=None, high=None)
    assert "up to 1.52 requests a second" in crossing.words(0.95)
    out = io.StringIO()
    print_table(capped, out)
    assert "up to 1.52 requests a second" in out.getvalue()
    slow = with_goals((0.5, 1.0, 0.97, 1.0), (0.6, 0.1, 0.0, 0.2))
    assert (
        compare(slow, capped)
        .goals[0]
        .endswith("A up to 0.5 requests a second, B up to 1.52; B / A at least 2.10")
    )


# --- comparison


def test_the_interval_of_a_ratio_covers_at_its_rate() -> None:
    """Means of skewed samples with known ratio: 95 % of the intervals hold it, give or take."""
    draw, hits, tries = np.random.default_rng(5), 0, 2000
    for _ in range(tries):
        ends = []
        for mean in (2.0, 3.0):
            sample = draw.exponential(mean, 80)
            log, spread = np.log(sample.mean()), 1.96 * sample.std(ddof=1) / sample.mean() / 80**0.5
            ends.append(
                Interval(value=sample.mean(), low=np.exp(log - spread), high=np.exp(log + spread))
            )
        low, high = ratio_ends(*ends)
        assert low is not None and high is not None
        hits += low <= 1.5 <= high
    assert 0.93 < hits / tries < 0.97


def test_a_run_does_not_differ_from_itself_and_does_from_one_twice_as_fast() -> None:
    found = record()
    same = compare(found, found)
    assert same.ratios and {ratio.verdict for ratio in same.ratios} <= {SAME, UNKNOWN}
    single = next(point for point in found.points if point.kind == "single")

    def times(value: Interval) -> Interval:
        return Interval(
            value=value.value / 4,
            low=value.low and value.low / 4,
            high=value.high and value.high / 4,
        )

    spread = single.figures.first_token
    assert spread is not None and spread.p50.low is not None
    quick = spread.model_copy(update={"p50": times(spread.p50)})
    faster = single.model_copy(
        update={"figures": single.figures.model_copy(update={"first_token": quick})}
    )
    points = [faster if point is single else point for point in found.points]
    made = compare(found, found.model_copy(update={"points": points}))
    verdicts = {(ratio.point, ratio.figure): ratio.verdict for ratio in made.ratios}
    assert verdicts["single", "first token p50"] == "B is better"
    back = compare(found.model_copy(update={"points": points}), found)
    assert {(ratio.point, ratio.figure): ratio.verdict for ratio in back.ratios}[
        "single", "first token p50"
    ] == "A is better"
    out = io.StringIO()
    print_comparison(made, out)
    assert SAME in out.getvalue() and "B is better" in out.getvalue() and "0.25" in out.getvalue()


def test_runs_that_are_not_alike_say_in_what_and_other_shapes_are_refused() -> None:
    found = record()
    other = found.model_copy(
        update={
            "model": found.model.model_copy(update={"dtype": "int8"}),
            "machine": found.machine.model_copy(update={"cpu": "another"}),
            "method": found.method.model_copy(update={"quantile": 0.5}),
        }
    )
    told = " ".join(compare(found, other).differs)
    assert (
        "dtype: A" in told
        and "CPU: A" in told
        and "share of first tokens in time: A 0.95, B 0.5" in told
    )
    shape = found.shape.model_copy(update={"output": found.shape.output + 1})
    with pytest.raises(UsageError, match="cannot be compared"):
        compare(found, found.model_copy(update={"shape": shape}))


def test_records_are_found_by_file_folder_or_run(tmp_path: Path) -> None:
    found = record()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "record.json").write_text(found.model_dump_json(by_alias=True))
    for path in (tmp_path / "a" / "record.json", tmp_path / "a", tmp_path):
        assert record_at(path).run == found.run
    (tmp_path / "b" / "record.json").write_text("{}")
    with pytest.raises(UsageError, match="holds 2 records"):
        record_at(tmp_path)
    with pytest.raises(RecordError, match=r"record\.json"):
        record_at(tmp_path / "b")


# --- words of a record


def test_no_secret_gets_into_a_record() -> None:
    said = command_of(
        [
            "/opt/bin/penstock",
            "bench",
            "run",
            "--api-key",
            "sk-1",
            "--api-key=sk-2",
            "--model",
            "m x",
        ]
    )
    assert said == "penstock bench run --api-key SECRET --api-key=SECRET --model 'm x'"
    run = run_of(Path("out"), api_key="sk-3")
    assert "sk-3" not in json.dumps(fingerprint(run, workload("8x4")))


def test_no_folder_of_the_machine_gets_into_a_record(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    said = command_of(
        [
            "/x/penstock",
            "bench",
            "run",
            "--model",
            f"{tmp_path}/m.gguf",
            f"--folder={tmp_path}/",
            "http://h/v1/x",
        ]
    )
    assert said == f"penstock bench run --model m.gguf --folder={tmp_path.name} http://h/v1/x"
    assert (
        without_folders(f"no CUDA (all in {tmp_path}/server-0.log)")
        == "no CUDA (all in server-0.log)"
    )
    assert (
        without_folders("POST /v1/completions of /nowhere/x")
        == "POST /v1/completions of /nowhere/x"
    )


def test_files_that_options_name_are_in_the_record(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"a": 1}\n')
    (tmp_path / "key.pem").write_text("SECRET")
    (tmp_path / "long.json").write_text("x" * 30_000)
    options = (
        "--plan",
        f"{tmp_path}/plan.json",
        f"--key={tmp_path}/key.pem",
        f"{tmp_path}/long.json",
        "y" * 5000,
    )
    files = option_files(options)
    assert files["plan.json"] == '{"a": 1}\n' and set(files) == {
        "plan.json",
        "key.pem",
        "long.json",
    }
    assert files["key.pem"].startswith("sha256 ") and files["long.json"].endswith(", 30000 bytes")
    run = run_of(tmp_path / "out", *options, files=files)
    folder = RunFolder(tmp_path / "out", fingerprint(run, workload("8x4")))
    folder.add_failure(FailedPoint(PointFailure(point=None, kind="crashed", message="", log="")))
    told = write_record(run, workload("8x4"), folder).engine.configuration
    folder.close()
    assert told.files == files and told.flags[:3] == ["--plan", "plan.json", "--key=key.pem"]
    other = replace(run, subject=replace(run.subject, files={"plan.json": "{}"}))
    with pytest.raises(UsageError, match=r"another run \(files differ\)"):
        RunFolder(tmp_path / "out", fingerprint(other, workload("8x4")))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "plan.json").touch()
    with pytest.raises(UsageError, match=r"two files of --options are called plan\.json"):
        option_files([*options, f"{tmp_path}/b/plan.json"])

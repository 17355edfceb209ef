"""What a run says: table, comparison; and that a record holds neither secrets nor what nobody can read."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench_runs import run_of
from made_records import made_records

from penstock.almanac.record import Interval, PointFailure, Record
from penstock.bench.compare import (
    CLIENT_SHORT,
    CUT,
    SAME,
    UNKNOWN,
    UNTRIED,
    compare,
    print_comparison,
    ratio_ends,
    record_at,
)
from penstock.bench.run_folder import FailedPoint, RunFolder
from penstock.bench.run_report import costs, ordered, print_table
from penstock.bench.run_spec import fingerprint
from penstock.bench.slo_crossing import crossings
from penstock.bench.workload import workload
from penstock.bench.write_record import (
    command_of,
    model_config,
    option_files,
    parameters,
    plain,
    without_folders,
    word,
    write_record,
)  # fmt: skip
from penstock.errors import CheckpointError, RecordError, UsageError


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


def cut_off(found: Record, request: Interval, output: Interval) -> Record:
    """Everything at once alone, cut off by its time limit at these rates."""
    point = next(each for each in found.points if each.kind == "saturation")
    figures = point.figures.model_copy(update={"request_rate": request, "output_rate": output})
    cut = point.model_copy(update={"figures": figures, "opens": None, "outcomes": {"unfinished": 3}})
    return found.model_copy(update={"points": [cut]})


def test_a_rate_that_a_time_limit_cut_off_is_told_as_at_least() -> None:
    made = record(0)
    assert made.machine.gpu is not None
    gpus = made.machine.gpu.model_copy(update={"count": 4})
    told = cut_off(made, Interval(value=0.714, low=0.667, high=None), Interval(value=1234.0, low=1200.0, high=None))
    told = told.model_copy(update={
        "method": made.method.model_copy(update={"price_per_hour": 3.6}),
        "machine": made.machine.model_copy(update={"gpu": gpus}),
    })  # fmt: skip
    out = io.StringIO()
    print_table(told, out)
    assert "≥ 0.71 (from 0.67)" in out.getvalue() and "≥ 1,234 (from 1,200)" in out.getvalue()
    of_gpu, cost = costs(told)
    assert of_gpu.endswith("a GPU: ≥ 308 output tok/s")
    assert cost.count("≤ $") == 3 and f"≤ ${1 / 0.714:,.4g} a thousand requests" in cost
    few = cut_off(made, Interval(value=0.714, low=None, high=None), Interval(value=12.0, low=None, high=None))
    out = io.StringIO()
    print_table(few, out)
    assert "≥ 0.71 " in out.getvalue() and "(from" not in out.getvalue()
    ended = " ".join(costs(made))
    assert "≥" not in ended and "≤" not in ended


# --- crossings


def with_goals(*goals: tuple[float, float, float, float], completed: dict[float, Interval] | None = None) -> Record:
    """Of open points alone: (rate, share, low, high) of each, in a window of 100 s. completed: where that is less."""
    found = record()
    points = [point for point in found.points if point.kind == "open"]
    goal = points[0].goals[0]
    made = [
        points[0].model_copy(update={
            "name": f"open-{rate:g}", "rate": rate, "requests": round(100 * rate), "seconds": 100.0,
            "figures": points[0].figures.model_copy(update={
                "request_rate": (completed or {}).get(rate, Interval(value=rate, low=rate, high=rate))}),
            "goals": [goal.model_copy(update={"seconds": 1.0, "share": share, "low": low, "high": high})],
        })
        for rate, share, low, high in goals
    ]  # fmt: skip
    method = found.method.model_copy(update={"goals": [1.0], "quantile": 0.95})
    return found.model_copy(update={"points": made, "method": method})


def test_what_was_offered_is_what_the_window_issued() -> None:
    """87 requests in 21.2 s of a plan of 4.71 a second: chance had a part in older windows."""
    found = with_goals((4.71, 1.0, 0.97, 1.0), (6.0, 0.1, 0.0, 0.2))
    issued = found.points[0].model_copy(update={"requests": 87, "seconds": 21.2})
    found = found.model_copy(update={"points": [issued, found.points[1]]})
    (crossing,) = crossings(found)
    assert crossing.meets == pytest.approx(87 / 21.2, rel=1e-5) and crossing.fails == 6.0
    assert [point.name for point in ordered([found.points[1], issued])] == ["open-4.71", "open-6"]


def test_crossings_are_compared_by_what_is_sure_of_them() -> None:
    """MOVER: the distances in logarithms, as squares. 20 [20, 24] over 5 [4, 8] is 4, from 4 / 1.6 to 4 x 1.334."""
    slow = with_goals((4.0, 1.0, 0.96, 1.0), (5.0, 0.96, 0.9, 0.99), (6.0, 0.9, 0.8, 0.97), (8.0, 0.5, 0.4, 0.6))
    (crossing,) = crossings(slow)
    assert (crossing.keeps, crossing.meets, crossing.fails, crossing.misses) == (4.0, 5.0, 6.0, 8.0)
    quick = with_goals((20.0, 1.0, 0.97, 1.0), (24.0, 0.1, 0.0, 0.2))
    unsure = with_goals((6.0, 0.96, 0.5, 1.0), (7.0, 0.9, 0.5, 0.99))
    beyond = with_goals((20.0, 1.0, 0.97, 1.0))
    for other, told in (
        (quick, "B / A 2.50 to 5.34"), (slow, f"B / A 0.59 to 1.68: {SAME}"), (unsure, f"B / A {UNTRIED}"),
        (beyond, "B / A at least 2.50"),
    ):  # fmt: skip
        assert compare(slow, other).goals[0].endswith(told)
    assert compare(quick, slow).goals[0].endswith("B / A 0.19 to 0.40")
    assert compare(beyond, slow).goals[0].endswith("B / A at most 0.40")


def of_a_short_client(found: Record, *names: str) -> Record:
    """At the points of these names; at all of them where none is given."""
    points = [
        point.model_copy(update={"client": point.client.model_copy(update={"short": not names or point.name in names})})
        for point in found.points
    ]
    return found.model_copy(update={"points": points})


def test_points_of_a_client_that_was_short_rank_nobody() -> None:
    slow, quick = with_goals((4.0, 1.0, 0.96, 1.0), (8.0, 0.5, 0.4, 0.6)), with_goals((20.0, 1.0, 0.97, 1.0))
    (crossing,) = crossings(of_a_short_client(quick))
    assert (crossing.meets, crossing.fails, crossing.keeps, crossing.misses) == (None, None, None, None)
    assert compare(slow, of_a_short_client(quick)).goals[0].endswith("B: no rate that was tried can be ranked")
    found = record()
    for pair in ((found, of_a_short_client(found)), (of_a_short_client(found), found)):
        assert {ratio.verdict for ratio in compare(*pair).ratios} == {CLIENT_SHORT}


def test_rates_that_were_tried_and_cannot_be_ranked_are_not_told_as_untried() -> None:
    found = with_goals((4.0, 1.0, 0.96, 1.0), (8.0, 0.5, 0.4, 0.6), (9.0, 1.0, 0.97, 1.0))

    def words(*short: str) -> str:
        (crossing,) = crossings(of_a_short_client(found, "none", *short))
        return crossing.words(0.95).split(": ", 1)[1]

    assert words() == "up to 4 requests a second, missed where 8 were offered"
    assert words("open-4") == "up to 9 requests a second, missed at no higher rate that was tried"
    assert words("open-8", "open-9") == (
        "up to 4 requests a second, missed at no higher rate that was tried and can be ranked"
    )
    assert words("open-4", "open-9") == "missed at 8 a second, the lowest rate that was tried and can be ranked"
    assert words("open-4", "open-8", "open-9") == "no rate that was tried can be ranked"
    (fast,) = crossings(with_goals((1230.0, 1.0, 0.96, 1.0), (1460.0, 0.5, 0.4, 0.6)))
    assert fast.words(0.95).endswith("up to 1230 requests a second, missed where 1460 were offered")
    empty = found.model_copy(update={"points": []})
    assert crossings(empty)[0].words(0.95).endswith(": no rate was tried")


def at_once(found: Record, value: float, low: float, high: float) -> Record:
    """With everything at once, that gave so much."""
    point = next(each for each in record().points if each.kind == "saturation")
    rate = Interval(value=value, low=low, high=high)
    whole = point.model_copy(update={"figures": point.figures.model_copy(update={"request_rate": rate})})
    return found.model_copy(update={"points": [whole, *found.points]})


def test_no_rate_is_told_that_everything_at_once_did_not_give() -> None:
    """1.575 were offered, and 1.4 [1.1, 1.7] completed: not significantly less. The engine gives 1.522 at most."""
    served = {1.575: Interval(value=1.4, low=1.1, high=1.7)}
    alone = with_goals((1.575, 1.0, 0.97, 1.0), completed=served)
    capped = at_once(alone, 1.371, 1.219, 1.522)
    (free,), (crossing,) = crossings(alone), crossings(capped)
    assert (free.meets, free.keeps, free.misses) == (1.58, 1.1, None)  # 158 in 100 s
    assert (crossing.meets, crossing.keeps, crossing.fails, crossing.misses) == (1.522, 1.1, None, None)
    assert "up to 1.52 requests a second" in crossing.words(0.95)
    out = io.StringIO()
    print_table(capped, out)
    assert "up to 1.52 requests a second" in out.getvalue()
    slow = with_goals((0.5, 1.0, 0.97, 1.0), (0.6, 0.1, 0.0, 0.2))
    assert compare(slow, capped).goals[0].endswith("A up to 0.5 requests a second, B up to 1.52; B / A at least 2.10")


def test_a_rate_at_which_nothing_was_served_is_not_told_as_untried() -> None:
    none = {5.0: Interval(value=0.0, low=None, high=None), 6.0: Interval(value=0.0, low=None, high=None)}

    def words(*goals: tuple[float, float, float, float]) -> str:
        (crossing,) = crossings(with_goals(*goals, completed=none))
        return crossing.words(0.95).split(": ", 1)[1]

    kept = (6.0, 1.0, 0.9, 1.0), (5.0, 1.0, 0.9, 1.0)
    assert words(*kept) == "tried at 5, 6 a second, and nothing was served in that window"
    assert words(*kept, (4.0, 1.0, 0.9, 1.0)).startswith("up to 4 requests a second")
    assert words(kept[0], (5.0, 0.5, 0.4, 0.6)) == "missed at 5 a second, the lowest rate that was tried"


# --- comparison


def test_the_interval_of_a_ratio_covers_at_its_rate() -> None:
    """Means of skewed samples with known ratio: 95 % of the intervals hold it, give or take."""
    draw, hits, tries = np.random.default_rng(5), 0, 2000
    for _ in range(tries):
        ends = []
        for mean in (2.0, 3.0):
            sample = draw.exponential(mean, 80)
            log, spread = np.log(sample.mean()), 1.96 * sample.std(ddof=1) / sample.mean() / 80**0.5
            ends.append(Interval(value=sample.mean(), low=np.exp(log - spread), high=np.exp(log + spread)))
        low, high = ratio_ends(*ends)
        assert low is not None and high is not None
        hits += low <= 1.5 <= high
    assert 0.93 < hits / tries < 0.97


def test_ratios_of_uneven_and_missing_intervals() -> None:
    even = Interval(value=2.0, low=1.0, high=4.0)
    low, high = ratio_ends(even, even)
    assert low == pytest.approx(2 ** -(2**0.5)) and high == pytest.approx(2 ** (2**0.5))
    assert ratio_ends(Interval(value=2.0, low=0.0, high=4.0), even)[1] == math.inf
    assert ratio_ends(even, Interval(value=2.0, low=0.0, high=4.0))[0] == 0.0
    no_low, no_high = Interval(value=2.0, low=None, high=4.0), Interval(value=2.0, low=1.0, high=None)
    only_low, only_high = (pytest.approx(low), None), (None, pytest.approx(high))
    assert ratio_ends(no_low, even) == only_low and ratio_ends(even, no_low) == only_high
    assert ratio_ends(no_high, even) == only_high and ratio_ends(even, no_high) == only_low
    assert ratio_ends(no_low, no_low) == ratio_ends(no_high, no_high) == (None, None)
    assert ratio_ends(Interval(value=0.0, low=0.0, high=4.0), even) == (None, None)


def test_a_rate_that_was_cut_off_is_better_where_its_low_end_says_so() -> None:
    """5 [4.9, 5.1] against at least 20 (from 19.5): 4, from 4 / exp(hypot(ln 1.0256, ln 1.02))."""
    output = Interval(value=1000.0, low=990.0, high=1010.0)
    rates = {"low": Interval(value=5.0, low=4.9, high=5.1), "high": Interval(value=20.0, low=19.5, high=None),
             "near": Interval(value=5.0, low=4.8, high=None)}  # fmt: skip
    ended = cut_off(record(), rates["low"], output)
    ended = ended.model_copy(update={"points": [ended.points[0].model_copy(update={"outcomes": {}})]})

    def told(a: Record, b: Record) -> tuple[str, str]:
        """The verdict on requests a second, and its line of the table."""
        made, out = compare(a, b), io.StringIO()
        print_comparison(made, out)
        line = next(line for line in out.getvalue().splitlines() if "requests/s" in line)
        return next(ratio.verdict for ratio in made.ratios if ratio.figure == "requests/s"), " ".join(line.split())

    quick, near = (cut_off(record(), rates[name], output) for name in ("high", "near"))
    better = told(ended, quick)
    assert better == ("B is better", "saturation requests/s 5.00 ≥ 20.00 ≥ 4.00 at least 3.87 B is better")
    assert told(quick, ended) == ("A is better", "saturation requests/s ≥ 20.00 5.00 ≤ 0.25 at most 0.26 A is better")
    assert told(ended, near) == (CUT, f"saturation requests/s 5.00 ≥ 5.00 ≥ 1.00 at least 0.96 {CUT}")
    assert told(quick, quick) == (CUT, f"saturation requests/s ≥ 20.00 ≥ 20.00 - - {CUT}")


def test_a_run_does_not_differ_from_itself_and_does_from_one_twice_as_fast() -> None:
    found = record()
    same = compare(found, found)
    assert same.ratios and {ratio.verdict for ratio in same.ratios} <= {SAME, UNKNOWN}
    single = next(point for point in found.points if point.kind == "single")

    def times(value: Interval) -> Interval:
        return Interval(value=value.value / 4, low=value.low and value.low / 4, high=value.high and value.high / 4)

    spread = single.figures.first_token
    assert spread is not None and spread.p50.low is not None
    quick = spread.model_copy(update={"p50": times(spread.p50)})
    faster = single.model_copy(update={"figures": single.figures.model_copy(update={"first_token": quick})})
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
    other = found.model_copy(update={
        "model": found.model.model_copy(update={"dtype": "int8"}),
        "machine": found.machine.model_copy(update={"cpu": "another"}),
        "method": found.method.model_copy(update={"quantile": 0.5}),
    })  # fmt: skip
    told = " ".join(compare(found, other).differs)
    assert "dtype: A" in told and "CPU: A" in told and "share of first tokens in time: A 0.95, B 0.5" in told
    shape = found.shape.model_copy(update={"output": found.shape.output + 1})
    with pytest.raises(UsageError, match="cannot be compared"):
        compare(found, found.model_copy(update={"shape": shape}))


def test_a_run_that_failed_is_compared_by_its_failure() -> None:
    found = record()
    failure = PointFailure(point=None, kind="context too short", message="status 400: too long", log="")
    lost = found.model_copy(update={"points": [], "failures": [failure]})
    out = io.StringIO()
    print_comparison(compare(lost, found), out)
    told = out.getvalue()
    assert "A failed: every point: context too short: status 400: too long\n" in told and "B failed" not in told
    assert "None" not in told and "saturation is in B alone" in told and "B / A  " not in told
    assert "no figure is in both" in told


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
    said = command_of(["/opt/bin/penstock", "bench", "run", "--api-key", "sk-1", "--api-key=sk-2", "--model", "m x"])
    assert said == "penstock bench run --api-key SECRET --api-key=SECRET --model 'm x'"
    run = run_of(Path("out"), api_key="sk-3")
    assert "sk-3" not in json.dumps(fingerprint(run, workload("8x4")))


def test_no_folder_of_the_machine_gets_into_a_record(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    said = command_of(
        ["/x/penstock", "bench", "run", "--model", f"{tmp_path}/m.gguf", f"--folder={tmp_path}/", "http://h/v1/x"]
    )
    assert said == f"penstock bench run --model m.gguf --folder={tmp_path.name} http://h/v1/x"
    assert without_folders(f"no CUDA (all in {tmp_path}/server-0.log)") == "no CUDA (all in server-0.log)"
    assert without_folders("POST /v1/completions of /nowhere/x") == "POST /v1/completions of /nowhere/x"


def test_files_that_options_name_are_in_the_record(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"a": 1}\n')
    (tmp_path / "key.pem").write_text("SECRET")
    (tmp_path / "long.json").write_text("x" * 30_000)
    options = ("--plan", f"{tmp_path}/plan.json", f"--key={tmp_path}/key.pem", f"{tmp_path}/long.json", "y" * 5000)
    files = option_files(options)
    assert files["plan.json"] == '{"a": 1}\n' and set(files) == {"plan.json", "key.pem", "long.json"}
    assert files["key.pem"].startswith("sha256 ") and files["long.json"].endswith(", 30000 bytes")
    run = run_of(tmp_path / "out", *options, files=files)
    folder = RunFolder(tmp_path / "out", fingerprint(run, workload("8x4")))
    folder.add_failure(FailedPoint(None, PointFailure(point=None, kind="crashed", message="", log="")))
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


def test_words_and_logs_are_plain() -> None:
    assert word("  <b>a</b>\u202e\x07 ") == "b-a-/b" and word("") == "unknown" and word("/-") == "unknown"
    assert plain("\x1b[1;31mred\x1b[0m\r\n\ttwo\u200b\u202e\x07") == "red\n\ttwo"


def test_a_models_folder_tells_its_size(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {}, "a": {"shape": [3, 4]}, "b": {"shape": []}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert parameters(tmp_path) == 13 and model_config(tmp_path) == {"vocab_size": 7}
    assert parameters(None) is None and model_config(None) == {} and model_config(tmp_path / "none") == {}
    (tmp_path / "model.safetensors").write_bytes(b"\x05")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no whole"):
        parameters(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json is no config"):
        model_config(tmp_path)


def test_a_run_by_url_is_not_short_for_its_one_start() -> None:
    run = run_of(Path("out"))
    full = replace(run.settings, warm_up=10, window=60, longest=600, enough=1000, at_once=1000, alone=20, bisections=5)
    assert replace(run, settings=full).short
    assert not replace(run, settings=full, subject=replace(run.subject, peer=None, url="http://x")).short

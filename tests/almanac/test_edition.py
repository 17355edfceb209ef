"""The edition's method: its term for another machine, its marks, and power beside the samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_samples import LOOK, open_loop
from page_records import point as paper_point
from page_records import record as paper_record

from penstock.almanac import machine_spread as spread
from penstock.almanac.board_power import KEY, Reading, encoded, read_board
from penstock.almanac.consistency import faults
from penstock.almanac.figures import point_of
from penstock.almanac.record import Interval, Point, Record
from penstock.almanac.samples import Samples, join, write_parquet
from penstock.bench.compare import ratio_ends
from penstock.errors import RecordError


def point(samples: Samples, **more: Any) -> Point:
    usual = {"name": "open", "kind": "open", "rate": 20.0, "concurrency": None, "goals": [0.3]}
    return point_of(samples, **{**usual, "look": LOOK, "marks": [], "opens": 10.0, **more})


def readings(seconds: int, *, watts: float = 500.0, busy: float = 1.0, start: int = 0) -> list[Any]:
    return [Reading("open", start, at + 0.5, watts, busy) for at in range(seconds)]


def test_the_term_is_what_its_figures_give() -> None:
    gpu, host = spread.EDITION.ends
    assert gpu == pytest.approx(2.4469 * 0.017194, rel=1e-3)
    assert host == pytest.approx(2.7764 * 0.178884, rel=1e-3)
    assert spread.apart(None, 1.0) == 0 and spread.apart(spread.EDITION, 0.95) == gpu
    assert spread.apart(spread.EDITION, 0.3) == spread.apart(spread.EDITION, None) == host


def test_ratios_of_two_editions_cover_what_two_machines_differ_by() -> None:
    rng, sure, draws = np.random.default_rng(0), 0, 2000
    deviation = 0.0172
    for _ in range(draws):
        a, b = (
            spread.over(Interval(value=each, low=each * 0.999, high=each * 1.001), 1.96 * deviation)
            for each in 100 * np.exp(rng.normal(0, deviation, 2))
        )
        low, high = ratio_ends(a, b)
        sure += low <= 1 <= high
    assert 0.94 < sure / draws < 0.97


def test_an_unknown_end_and_a_rate_of_nothing_stay_as_they_are() -> None:
    assert spread.over(Interval(value=5.0, low=None, high=6.0), 0.1).low is None
    nothing = Interval(value=0.0, low=0.0, high=1.0)
    assert spread.over(nothing, 0.1) == nothing


def test_two_starts_of_an_edition_say_little_of_starts_so_their_difference_widens_nothing() -> None:
    both = join([open_loop(seed=1, start=0), open_loop(seed=1, start=1, slow=1.2)])
    usual = point(both, seconds=120.0).figures.first_token
    mine = point(both, seconds=120.0, edition=spread.EDITION).figures.first_token
    assert usual is not None and mine is not None
    assert usual.p50.value == mine.p50.value
    assert (usual.p50.high or 0) - usual.p50.value > 4 * ((mine.p50.high or 0) - mine.p50.value)


@pytest.mark.parametrize(("rate", "differ"), [(20.0, False), (50.0, True)])
def test_starts_that_differ_by_more_than_machines_do_are_marked(rate: float, differ: bool) -> None:
    both = join([open_loop(rate=20.0, start=0), open_loop(rate=rate, start=1)])
    made = point(both, seconds=120.0, edition=spread.EDITION)
    assert ("starts differ" in made.marks) is differ
    again = point(both, seconds=120.0, edition=spread.EDITION, marks=made.marks)
    assert again.marks == made.marks  # derived again, a mark stands once
    assert "starts differ" not in point(both, seconds=120.0).marks


def test_power_over_the_windows_of_all_starts_gives_joules_of_a_token() -> None:
    both = join([open_loop(start=0), open_loop(start=1)])
    told = readings(80, watts=400.0) + readings(80, watts=600.0, busy=0.5, start=1)
    made = point(both, seconds=120.0, board=told)
    board, rate = made.board, made.figures.output_rate
    assert board is not None and rate is not None and board.joules_per_token is not None
    assert (board.watts, board.busy, board.readings) == (500.0, 0.75, 120)
    joules = board.joules_per_token
    assert joules.value == pytest.approx(500.0 / rate.value, rel=1e-5)
    assert joules.low == pytest.approx(500.0 / (rate.high or 0), rel=1e-5)


@pytest.mark.parametrize("told", [[], readings(80)[::3], readings(30)])
def test_no_or_few_readings_are_no_power(told: list[Any]) -> None:
    assert point(open_loop(), seconds=60.0, board=told).board is None


def test_readings_lie_beside_the_samples_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "raw.parquet"
    write_parquet(open_loop(), path, encoded(readings(9)))
    assert read_board(path) == readings(9)
    write_parquet(open_loop(), path)
    assert read_board(path) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [(b"{", "Invalid JSON"), (b'[["open",0,1,-5,0]]', "0.3"), (b'[["open",0,1,5,2]]', "0.4")],
)
def test_readings_that_are_none_are_refused(tmp_path: Path, text: bytes, why: str) -> None:
    path = tmp_path / "raw.parquet"
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({KEY: text}), path)
    with pytest.raises(RecordError, match=f"raw.parquet: is no list of readings of power: .*{why}"):
        read_board(path)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"method.starts": 1}, "method.edition: 1 starts"),
        ({"method.window": 10.0}, "method.edition: 2 starts and windows of 10 s"),
        ({"method.short": False, "method.window": 60.0}, "method.short: is false, but an edition"),
    ],
)
def test_an_edition_is_held_to_its_method(changes: dict[str, Any], fault: str | None) -> None:
    usual = {"method.short": True, "method.starts": 2, "method.window": 20.0}
    told = paper_record("edition01", "penstock", [paper_point(5.0, [0.1] * 200)])
    told = paper_record(
        "edition01",
        "penstock",
        told["points"],
        **{**usual, "method.edition": spread.EDITION.model_dump(), **changes},
    )
    found = [each for each in faults(Record.model_validate(told)) if each.startswith("method")]
    assert [each.startswith(fault) for each in found] == [True] if fault else found == []


def test_shown_figures_hold_the_term_and_those_within_the_run_do_not() -> None:
    edition = spread.EDITION.model_dump()
    told = paper_record("edition02", "penstock", [paper_point(5.0, [0.1] * 200)])
    told["method"] = {**told["method"], "short": True, "edition": edition}
    told["points"][0]["board"] = {
        "watts": 500.0,
        "busy": 0.99,
        "joules_per_token": {"value": 0.8, "low": 0.8, "high": 0.8},
        "readings": 30,
    }
    record = Record.model_validate(told)
    (point,) = spread.shown(record)
    rate, within = point.figures.output_rate, record.points[0].figures.output_rate
    assert rate is not None and within is not None and point.board is not None
    assert rate.value == within.value and within.low is not None
    away = math.hypot(math.log(within.low / within.value), edition["gpu"])
    assert rate.low == pytest.approx(within.value * math.exp(-away), rel=1e-5)
    # a token's time is the GPU's, a first token's and a whole answer's also the queue's
    for name, term in (("per_token", "gpu"), ("first_token", "host"), ("end_to_end", "host")):
        told, known = (getattr(each.figures, name).p50 for each in (point, record.points[0]))
        away = math.hypot(math.log(known.high / known.value), edition[term])
        assert told.high == pytest.approx(known.value * math.exp(away), rel=1e-5)
    joules = point.board.joules_per_token
    assert joules is not None
    assert joules.high == pytest.approx(0.8 * math.exp(edition["gpu"]), rel=1e-5)

"""Records as files: hostile and impossible ones are refused by file and field, true ones are
derived again and kept.

The last test is what CI holds the almanac's own records to.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import made_records, write_records
from made_samples import LOOK, open_loop, samples_of

from penstock.almanac import collect
from penstock.almanac.consistency import faults
from penstock.almanac.figures import point_of
from penstock.almanac.parse_record import LARGEST, record_of
from penstock.almanac.record import FULL, Record
from penstock.almanac.samples import join, read_parquet, write_parquet
from penstock.almanac.validate import sense, validate
from penstock.errors import RecordError, UsageError

ALMANAC = Path(__file__).resolve().parents[2] / "almanac" / "records"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a true record: an open loop and everything at once,
    of a queue made up."""
    folder = tmp_path_factory.mktemp("run")
    done = np.arange(1, 301) / 25
    rush = samples_of(np.zeros(300), done - 0.03, [np.full(31, 1e-3)] * 300, name="saturation")
    samples = join([open_loop(30.0, 40.0, name="open 30"), rush])
    samples.cached_tokens[samples.point == "open 30"] = 16
    write_parquet(samples, folder / "raw.parquet")
    common: dict[str, Any] = {"concurrency": None, "goals": [0.1, 0.3], "look": LOOK, "marks": []}
    points = [
        point_of(
            samples, name="open 30", kind="open", rate=30.0, seconds=40.0, opens=10.0, **common
        ),
        point_of(samples, name="saturation", kind="saturation", rate=None, seconds=None, **common),
    ]
    told = next(iter(made_records(1))).model_dump(by_alias=True)
    told["shape"] |= {"name": "128x32", "kind": "exact", "input": 128.0, "output": 32.0}
    told["method"] |= {"starts": 1, "goals": [0.1, 0.3]}
    told["points"] = [point.model_dump() for point in points]
    digest = hashlib.sha256((folder / "raw.parquet").read_bytes()).hexdigest()
    told["raw"] = {"sha256": digest, "rows": len(samples)}
    (folder / "record.json").write_text(json.dumps(told))
    return folder


def told_of(run: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run / "record.json").read_text())
    return told


def refusal(
    told: dict[str, Any] | str | bytes, raw: Path | None = None, *, tmp: Path | None = None
) -> str:
    content = (
        told
        if isinstance(told, bytes)
        else (told if isinstance(told, str) else json.dumps(told)).encode()
    )
    with pytest.raises(RecordError) as refused:
        if raw is None:
            record = record_of(content, "bad.json")
            for fault in faults(record):
                raise RecordError(f"bad.json: {fault}")
        else:
            assert tmp is not None
            (tmp / "bad.json").write_bytes(content)
            validate(tmp / "bad.json", raw)
    line = str(refused.value)
    assert (
        line.startswith(("bad.json: ", "raw.parquet: ")) and line.isprintable() and len(line) < 700
    )
    return line


def changed(told: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """With one field, "points.0.rate", set; a function of the old value makes the new one."""
    told = copy.deepcopy(told)
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = told
    for part in way:
        place = place[part]
    place[last] = value(place[last]) if callable(value) else value
    return told


# --- true ones


def test_a_true_record_is_believed_with_its_raw_data(run: Path) -> None:
    record = validate(run / "record.json", run / "raw.parquet")
    assert [point.name for point in record.points] == ["open 30", "saturation"]
    assert record.points[0].marks == ["cached prompts"]
    assert validate(run / "record.json") == record


def test_a_short_run_is_one_by_the_methods_own_measure() -> None:
    from penstock.bench.point_planner import Settings

    assert {name: getattr(Settings(), name) for name in FULL} == FULL


# --- hostile ones


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe{}", "no UTF-8"),
        (b"[]", "the file: Input should be"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"schema": NaN}', "NaN is no number"),
        (b'{"run": 1, "run": 2}', "'run' stands twice"),
        (b'{"x": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b" " * (LARGEST + 1), "that a record has at most"),
    ],
)
def test_hostile_files(content: bytes, says: str) -> None:
    said = refusal(content)
    assert says in said
    assert len(said) < 500


@pytest.mark.parametrize("escaped", [True, False])
def test_a_log_holds_lines_and_tabs_and_nothing_else_that_is_not_seen(
    run: Path, escaped: bool
) -> None:
    for code in (*range(32), 0x7F, 0x80, 0x9F, 0x200B, 0x202E, 0xFEFF):
        failure = {"point": None, "kind": "crashed", "message": "it did", "log": f"a{chr(code)}b"}
        text = json.dumps({**told_of(run), "failures": [failure]}, ensure_ascii=escaped)
        if chr(code) in "\n\t":
            assert record_of(text.encode(), "good.json").failures[0].log == failure["log"]
        else:
            assert f"U+{code:04X}" in refusal(text)


# --- hostile fields, and impossible ones


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("engine.name", "<script>alert(1)</script>", "engine.name: String should match"),
        ("model.name", "../../etc/passwd", "model.name: String should match"),
        ("engine.command", "serve\x00", "engine.command: String should match"),
        ("engine.command", "a\u202egnp", "engine.command: holds the control character U+202E"),
        ("schema", "penstock-almanac/2", "schema: Input should be 'penstock-almanac/1'"),
        (
            "points.0.figures.output_rate.value",
            1e308,
            "points.0.figures.output_rate.value: Input should be less",
        ),
        (
            "points.0.figures.output_rate.value",
            "12",
            "output_rate.value: Input should be a valid number",
        ),
        (
            "points.0.sample.first",
            [0.0] * 501,
            "points.0.sample.first: List should have at most 500",
        ),
        ("when", "2099-01-01T00:00:00Z", "when: 2099-01-01T00:00:00Z lies in the future"),
        ("when", "2026-02-30T00:00:00Z", "when: 2026-02-30T00:00:00Z is no day"),
        ("raw.rows", 3, "raw.rows: 3, but the points have"),
        ("method.quantile", 1.0, "method.quantile"),
        ("points.1.name", "open 30", "points: open 30 stands there twice"),
        ("points", [], "points: none, and no failure either"),
        ("points.0.complete", lambda old: old + 5, "complete: "),
        ("points.0.opens", None, "opens: is missing: only an import has none"),
        ("points.0.goals", lambda old: old[1:], "goals: [0.3] s, where [0.1, 0.3] are to be told"),
        ("points.0.rate", None, "rate: an open loop has one"),
        ("points.0.effective", 1e6, "effective: 1000000.0, more than"),
        ("points.0.cached_tokens", 10**9, "cached_tokens: "),
        ("points.0.marks", [], "marks: 'cached prompts' is missing"),
        ("points.0.client.short", True, "marks: 'client short' is missing"),
        ("points.0.effective", 99.0, "marks: 'few requests' is missing"),
        (
            "method",
            lambda old: {**old, "short": False, "window": 5.0},
            "method.short: is false, at window 5 where",
        ),
        ("points.0.figures.output_rate.value", lambda old: old * 3, "lies outside of its interval"),
        (
            "points.0.figures.first_token.p95",
            {"value": 0.01, "low": None, "high": None},
            "and don't rise",
        ),
        ("points.0.figures.request_rate", None, "figures.request_rate: is missing"),
        (
            "points.0.sample",
            {"first": [], "per_token": [], "end_to_end": []},
            "sample: columns of [0] rows",
        ),
    ],
)
def test_hostile_and_impossible_fields(run: Path, path: str, value: Any, says: str) -> None:
    assert says in refusal(changed(told_of(run), path, value))


# --- against the raw data


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("raw", None, "raw: names no raw data"),
        ("raw.sha256", "0" * 64, "raw.sha256: is 000000000000…"),
        (
            "points",
            lambda old: old[:1],
            "points: saturation is in raw.parquet, but no point of the record",
        ),
        (
            "points.0.figures.inter_token.p99.value",
            lambda old: old * 1.0001,
            "figures.inter_token.p99.value: ",
        ),
        ("points.0.sample.first", lambda old: [*old[:-1], old[-1] * 1.0005], "sample.first.499: "),
        ("points.0.effective", 500.0, "effective: 500.0, but the raw data gives"),
        ("points.0.opens", 10.5, "opens: a window of 40 s from 10.5 s on, but"),
        ("points.0.marks", ["cached prompts", "client short"], None),
    ],
)
def test_numbers_that_the_raw_data_does_not_give(
    run: Path, tmp_path: Path, path: str, value: Any, says: str | None
) -> None:
    told = changed(told_of(run), path, value)
    if says is None:  # a mark too many is the owner's to set
        (tmp_path / "good.json").write_text(json.dumps(told))
        assert validate(tmp_path / "good.json", run / "raw.parquet").points[0].marks == value
    else:
        assert says in refusal(told, run / "raw.parquet", tmp=tmp_path)


def otherwise(told: dict[str, Any], raw: Path, at: int, **more: Any) -> dict[str, Any]:
    """A record whose point was derived from honest raw data otherwise than it was measured."""
    point = told["points"][at]
    asked = {
        name: point[name] for name in ("name", "kind", "rate", "concurrency", "opens", "marks")
    }
    asked["seconds"] = None if asked["opens"] is None else point["seconds"]
    asked |= {"goals": told["method"]["goals"], "look": LOOK, **more}
    return changed(told, f"points.{at}", point_of(read_parquet(raw), **asked).model_dump())


@pytest.mark.parametrize(
    ("at", "more", "says"),
    [
        (0, {"seconds": 36.0}, "points.0 (open 30).opens: a window of 36 s from 10 s on, but"),
        (
            0,
            {"opens": 9.0, "seconds": 41.0},
            "requests were counted outside of it, or not counted in it",
        ),
        (
            0,
            {"kind": "closed", "rate": None, "concurrency": 20},
            (
                "kind: closed, where requests are sent each when another had ended, but these were"
                " sent by a clock"
            ),
        ),
        (
            0,
            {"kind": "saturation", "rate": None, "seconds": None, "opens": None},
            "kind: saturation, where requests are sent all at once, but these were sent by a clock",
        ),
        (
            1,
            {"kind": "open", "rate": 25.0, "opens": 0.0, "seconds": 12.0},
            "kind: open, where requests are sent by a clock, but these were sent all at once",
        ),
    ],
)
def test_a_point_that_is_derived_otherwise_from_honest_raw_data(
    run: Path, tmp_path: Path, at: int, more: dict[str, Any], says: str
) -> None:
    """Every figure of it comes out again: what was edited is what it is derived by."""
    raw = run / "raw.parquet"
    assert otherwise(told_of(run), raw, at) == told_of(run)
    assert says in refusal(otherwise(told_of(run), raw, at, **more), raw, tmp=tmp_path)


def test_a_raw_file_that_is_none(run: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw.parquet"
    raw.write_text("nothing of the kind")
    told = changed(told_of(run), "raw.sha256", hashlib.sha256(raw.read_bytes()).hexdigest())
    assert "no Parquet file" in refusal(told, raw, tmp=tmp_path)
    with pytest.raises(RecordError, match=r"gone\.parquet: cannot be read"):
        validate(run / "record.json", tmp_path / "gone.parquet")


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("end", 0.0, "end: before the first token"),
        ("first", 0.0, "first: before the request was sent"),
        ("intended", 1e5, "actual: sent before it was planned"),
        ("events", 7, "events: another number than of gaps"),
        ("output_tokens", 31, "output_tokens: not as many as asked, yet ok"),
    ],
)
def test_samples_that_no_request_can_have_made(column: str, value: float, says: str) -> None:
    samples = open_loop(seconds=5.0)
    assert list(sense(samples)) == []
    getattr(samples, column)[5:7] = value
    assert f"row 5: {says} (and 1 more)" in list(sense(samples))


# --- the almanac's folder


def test_a_place_lies_below_the_root_whatever_the_names(run: Path) -> None:
    told = changed(told_of(run), "model.name", "meta-llama/Llama-3.2-1B (x=1)")
    told["machine"]["gpu"] |= {"name": "NVIDIA H200 80GB", "count": 8}
    place = collect.place_of(record_of(json.dumps(told).encode(), "a.json"))
    parts = f"8xNVIDIA-H200-80GB.meta-llama-Llama-3_2-1B-x-1.128x32.tuned.{told['run']}.json"
    assert place == Path("penstock") / told["when"][:10] / parts
    told["machine"]["gpu"] = None
    assert collect.place_of(record_of(json.dumps(told).encode(), "a.json")).name.startswith(
        "cpu.meta"
    )
    assert collect.safe("../..") == "unnamed" and collect.safe("a/../b\\c") == "a-__-b-c"


def test_a_run_is_added_once(run: Path, tmp_path: Path) -> None:
    path = collect.add(run, tmp_path)
    assert validate(path, run / "raw.parquet") == validate(run / "record.json")
    before = path.read_bytes()
    with pytest.raises(RecordError, match="in the almanac already"):
        collect.add(run, tmp_path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1
    records, problems = collect.read_all(tmp_path)
    assert list(records) == [path.relative_to(tmp_path).as_posix()] and problems == {}


def test_a_forged_or_unfinished_run_is_not_added(run: Path, tmp_path: Path) -> None:
    folder, root = tmp_path / "run", tmp_path / "almanac"
    folder.mkdir()
    with pytest.raises(RecordError, match=r"run: holds no record\.json"):
        collect.add(folder, root)
    told = told_of(run)
    (folder / "record.json").write_text(json.dumps(told))
    with pytest.raises(RecordError, match=r"there is no raw\.parquet"):
        collect.add(folder, root)
    (folder / "raw.parquet").write_bytes((run / "raw.parquet").read_bytes())
    forged = changed(told, "points.0.figures.per_token.p50.high", lambda old: old * 1.01)
    (folder / "record.json").write_text(json.dumps(forged))
    with pytest.raises(RecordError, match=r"figures\.per_token\.p50\.high"):
        collect.add(folder, root)
    (folder / "raw.parquet").unlink()
    (folder / "record.json").write_text(json.dumps(changed(told, "raw", None)))
    with pytest.raises(RecordError, match="raw: is missing"):
        collect.add(folder, root)
    assert not root.exists()


def test_one_bad_file_hides_no_good_one(tmp_path: Path) -> None:
    good = {path.relative_to(tmp_path).as_posix() for path in write_records(tmp_path, 12, rows=60)}
    first = sorted(good)[0]
    (tmp_path / "penstock" / "bad.json").write_text("{")
    (tmp_path / "penstock" / "note.txt").write_text("hello")
    (tmp_path / "penstock" / "moved.json").write_bytes((tmp_path / first).read_bytes())
    (tmp_path / "penstock" / "link.json").symlink_to(tmp_path / first)
    bare = next(
        name for name in sorted(good) if json.loads((tmp_path / name).read_text())["points"]
    )
    (tmp_path / bare).write_text(
        json.dumps({**json.loads((tmp_path / bare).read_text()), "raw": None})
    )
    good.remove(bare)
    records, problems = collect.read_all(tmp_path)
    assert set(records) == good and all(isinstance(record, Record) for record in records.values())
    assert {name: line.split(": ")[1][:12] for name, line in problems.items()} == {
        "penstock/bad.json": "Expecting pr",
        "penstock/note.txt": "is no .json ",
        "penstock/link.json": "is no plain ",
        "penstock/moved.json": "belongs at p",
        bare: "raw",
    }
    assert collect.read_all(tmp_path / "nowhere")[1] != {}


def test_the_almanacs_own_records_are_all_believed() -> None:
    """What `penstock almanac validate` says of the repository's records; before the first there is
    no folder."""
    records, problems = collect.read_all(ALMANAC) if ALMANAC.exists() else ({}, {})
    assert problems == {}
    assert all(not record.run.startswith("made") for record in records.values())


def test_parquet_keeps_every_column_and_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = open_loop(seconds=5.0)
    samples.first[3] = np.nan
    write_parquet(samples, tmp_path / "a.parquet")
    again = read_parquet(tmp_path / "a.parquet")
    for name in ("point", "intended", "first", "end", "output_tokens", "window", "outcome"):
        np.testing.assert_array_equal(getattr(again, name), getattr(samples, name))
    np.testing.assert_array_equal(
        np.concatenate(list(again.gaps)), np.concatenate(list(samples.gaps))
    )
    monkeypatch.setattr("penstock.almanac.samples.find_spec", lambda name: None)
    for call in (read_parquet, lambda path: write_parquet(samples, path)):
        with pytest.raises(UsageError, match=r"pip install \"penstock\[parquet\]\""):
            call(tmp_path / "a.parquet")

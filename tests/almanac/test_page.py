"""The page as files: what a build writes, what it refuses, and that nothing is lost on the way. No
browser."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import made_records
from page_records import firsts, point, record
from typer.testing import CliRunner

from penstock.almanac.page import build as building
from penstock.almanac.page.build import build
from penstock.almanac.page.compact import LARGEST, SMALLEST, STEPS, packed, sample_rows
from penstock.almanac.page.page_server import serve
from penstock.almanac.record import Record, Sample
from penstock.bench.workload import MONKEYS_SAMPLES, workload
from penstock.errors import CapacityError, UsageError

HOSTILE = "<img src=x onerror=hacked()></script><script>hacked()</script>\njavascript:hacked()"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    root = tmp_path / "records"
    for made in made_records(12, rows=30):
        path = root / made.engine.name / f"{made.run}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made.model_dump_json(by_alias=True, indent=1))
    return root


def argument(path: Path) -> list[Any]:
    """What a script hands over: [arguments]."""
    text = path.read_text(encoding="ascii")
    match = re.fullmatch(r"ALMANAC\.\w+\((.*)\);\n", text, re.S)
    assert match
    return list(json.loads(f"[{match[1]}]"))


def groups(out: Path) -> Iterator[list[dict[str, Any]]]:
    for path in sorted((out / "data").glob("g*.js")):
        yield argument(path)[1]


def test_a_build_holds_every_record_once(records: Path, tmp_path: Path) -> None:
    out = tmp_path / "page"
    built = build(records, out)
    wanted = sorted(json.loads(path.read_text())["run"] for path in records.rglob("*.json"))
    assert (built.records, built.refused) == (12, [])
    assert sorted(each["run"] for group in groups(out) for each in group) == wanted
    (index,) = argument(out / "data" / "index.js")
    assert sorted(index["records"]["run"]) == wanted
    assert len(index["groups"]) == built.groups == len(list(groups(out)))
    for run, number in zip(index["records"]["run"], index["records"]["group"], strict=True):
        assert run in [each["run"] for each in argument(out / "data" / f"g{number}.js")[1]]


def test_the_same_records_give_the_same_bytes_and_an_older_page_leaves_nothing(
    records: Path, tmp_path: Path
) -> None:
    build(records, tmp_path / "a")
    build(made_records(20, rows=5), tmp_path / "b")
    build(records, tmp_path / "b")
    texts = [
        {
            path.relative_to(out).as_posix(): path.read_bytes()
            for path in out.rglob("*")
            if path.is_file()
        }
        for out in (tmp_path / "a", tmp_path / "b")
    ]
    assert texts[0] == texts[1]


def test_the_page_points_to_nothing_outside_its_folder(records: Path, tmp_path: Path) -> None:
    build(records, tmp_path / "page")
    for name in ("index.html", "page.css", "page.js"):
        text = (tmp_path / "page" / name).read_text()
        found = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]+[\w/]*", text)) - {
            "http://www.w3.org/2000/svg"
        }
        assert found == set()
    page = (tmp_path / "page" / "index.html").read_text()
    linked = set(re.findall(r'(?:src|href)="([^#"]+)"', page)) - {"data:,"}
    assert {"page.js", "page.css", "data/index.js"} == linked
    assert all((tmp_path / "page" / name).is_file() for name in linked)
    assert "default-src 'none'" in page and "unsafe" not in page


def test_scripts_never_write_markup() -> None:
    site = Path(building.__file__).parent / "site" / "script"
    text = "\n".join(path.read_text() for path in site.glob("*.js"))
    assert len(text) > 10_000
    assert (
        re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|fetch\(",
            text,
        )
        == []
    )


def test_a_sample_loses_less_than_a_twentieth_of_a_per_cent() -> None:
    values = [0.0, 1.2e-6, 3.3e-4, 0.01, 0.29999, 1.0, 17.5, 1234.5, 9.9e5, -1.0]
    sample = Sample(first=values, per_token=values[::-1], end_to_end=values)
    whole = (
        np.frombuffer(base64.b64decode(packed(sample_rows(sample))), "<u2")
        .reshape(3, -1)
        .astype(float)
    )
    back = SMALLEST * np.exp((whole - 1) * np.log(LARGEST / SMALLEST) / STEPS)
    back[whole == 0], back[whole == 65_535] = 0.0, -1.0
    order = np.argsort(values, kind="stable")
    np.testing.assert_allclose(back[0], np.array(values)[order], rtol=5e-4)
    # rows stay together
    np.testing.assert_allclose(back[1], np.array(values[::-1])[order], rtol=5e-4)
    np.testing.assert_array_equal(back[0], back[2])


def csv_rows(data: Path) -> list[dict[str, str]]:
    with (data / "points.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_downloads_hold_all(records: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    build(records, tmp_path / "page")
    data = tmp_path / "page" / "data"
    originals = [json.loads(path.read_text()) for path in sorted(records.rglob("*.json"))]
    assert json.loads((data / "records.json").read_text()) == originals
    wanted = [
        (each["run"], at.get("name"), at)
        for each in originals
        for at in (*each["points"], *each["failures"])
    ]
    rows, table = csv_rows(data), pq.ParquetFile(data / "points.parquet").read().to_pylist()
    assert [(row["run"], row["point"] or None) for row in rows] == [
        (run, name) for run, name, _ in wanted
    ]
    assert [(row["run"], row["point"]) for row in table] == [(run, name) for run, name, _ in wanted]
    failed = [number for number, (_, _, at) in enumerate(wanted) if "log" in at]
    assert [table[number]["failure"] for number in failed] == ["out of memory"] * len(
        failed
    ) and failed
    for line, row, (_, _, at) in zip(rows, table, wanted, strict=True):
        if "log" in at:
            assert line["message"] == row["message"] == at["message"] and row["requests"] is None
            assert (
                row["sample_first"] == []
                and row["goal1_share"] is None
                and line["goal1_share"] == ""
            )
            continue
        assert row["failure"] is None and line["failure"] == ""
        assert row["opens"] == at["opens"] and row["outcome_stalled"] == at["outcomes"].get(
            "stalled", 0
        )
        assert [
            row[f"goal{number}_{name}"]
            for number in (1, 2, 3)
            for name in ("seconds", "share", "goodput")
        ] == [goal[name] for goal in at["goals"] for name in ("seconds", "share", "goodput")]
        rate = at["figures"]["request_rate"]
        assert (
            float(line["request_rate_low"]) == pytest.approx(rate["low"]) == row["request_rate_low"]
        )
        assert row["first_token_p95"] == at["figures"]["first_token"]["p95"]["value"]
        assert row["sample_first"] == pytest.approx(at["sample"]["first"], rel=1e-6)
        assert (
            (line["concurrency"] == "")
            == (at["concurrency"] is None)
            == (row["concurrency"] is None)
        )


def test_downloads_have_an_editions_intervals_as_shown_and_what_else_to_read_them_by(
    tmp_path: Path,
) -> None:
    from penstock.almanac.machine_spread import EDITION, shown
    from penstock.almanac.record import Record

    edited = {"method.edition": EDITION.model_dump(), "method.short": True, "method.starts": 2}
    answers = {"model": "demo", "reference": "0" * 64, "engine": "e 1", "flags": [], "prompts": 16}
    answers |= {"positions": 500, "agree": 0.5, "kl": 2.5, "kl_most": 9.0, "wrong": True}
    of_engine = {"engine.lacks": ["FlashInfer", "DeepGEMM"], "answers": answers}
    points = [{**point(5.0, firsts(1, 0.1, 9)), "accepted_drafts": 1.5}]
    made = record("edition0", "e", points, **edited, **of_engine)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "a.json").write_text(json.dumps(made))
    build(tmp_path / "records", tmp_path / "page")
    (row,) = csv_rows(tmp_path / "page" / "data")
    rate = shown(Record.model_validate(made))[0].figures.output_rate
    assert rate is not None and rate.low is not None and rate.low < 0.7 * rate.value
    assert float(row["output_rate_low"]) == pytest.approx(rate.low)
    assert (row["lacks"], row["answers_kl"]) == ("FlashInfer; DeepGEMM", "2.5")
    assert (row["answers_wrong"], row["accepted_drafts"]) == ("1", "1.5")


def test_files_that_are_no_records_are_named_and_the_others_stay(
    records: Path, tmp_path: Path
) -> None:
    good = json.loads(next(records.rglob("*.json")).read_text())
    bad = {
        "too large.json": json.dumps(good).replace('"warm_up": 10.0', '"warm_up": 1e308'),
        "cut.json": json.dumps(good)[:500],
        "turned.json": json.dumps(
            {**good, "run": "turned00", "model": {**good["model"], "source": "a\u202eb"}}
        ),
        "twice.json": json.dumps(good),
        "keys.json": json.dumps(good)[:-1] + ', "when": "2026-01-01T00:00:00Z"}',
        "bytes.json": "\xff\xfe{}",
    }
    for name, text in bad.items():
        (records / name).write_text(text, encoding="latin-1")
    built = build(records, tmp_path / "page")
    assert built.records == 12
    reasons = dict(built.refused)
    assert set(reasons) == set(bad)
    assert "warm_up" in reasons["too large.json"] and good["run"] in reasons["twice.json"]
    assert "U+202E" in reasons["turned.json"] and "'when' stands twice" in reasons["keys.json"]
    (index,) = argument(tmp_path / "page" / "data" / "index.js")
    assert dict(index["refused"]) == reasons


def test_a_folder_that_is_no_page_is_left_alone(records: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "letters.txt").write_text("dear")
    with pytest.raises(UsageError, match="no almanac page"):
        build(records, out)
    assert [path.name for path in out.iterdir()] == ["letters.txt"]
    with pytest.raises(UsageError, match="is a file"):
        build(records, out / "letters.txt")
    with pytest.raises(UsageError, match="no folder"):
        build(tmp_path / "nowhere", tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_hostile_texts_stay_texts_in_every_file(tmp_path: Path) -> None:
    line = HOSTILE.replace("\n", "")
    made = record(
        "hostile0",
        "penstock",
        [point(1.0, firsts(1, 0.1, 2))],
        **{"machine.cpu": "=1+1" + line, "engine.command": line, "model.source": line},
    )
    made["failures"] = [{"point": None, "kind": "crashed", "message": line, "log": HOSTILE}]
    build([Record.model_validate(made)], tmp_path / "page")
    ((only,),) = groups(tmp_path / "page")
    assert (only["machine"]["cpu"], only["failures"][0]["log"]) == ("=1+1" + line, HOSTILE)
    # no formula to a spreadsheet
    assert csv_rows(tmp_path / "page" / "data")[0]["cpu"] == "'=1+1" + line
    assert "<script>hacked" not in (tmp_path / "page" / "index.html").read_text()


def rated(
    made: dict[str, Any], value: float, low: float | None, high: float | None
) -> dict[str, Any]:
    """The point with another request rate."""
    made["figures"]["request_rate"] = {"value": value, "low": low, "high": high}
    return made


def headline(tmp_path: Path, *points: dict[str, Any]) -> Any:
    build([Record.model_validate(record("headline", "penstock", points))], tmp_path / "page")
    (index,) = argument(tmp_path / "page" / "data" / "index.js")
    return index["records"]["peak"][0]


def test_the_highest_rate_is_not_the_luckiest_one(tmp_path: Path) -> None:
    lucky = rated(point(8.0, firsts(1, 0.1, 2)), 12.0, 6.0, 18.0)
    sure = rated(point(None, firsts(0, 0.1, 2), kind="saturation"), 10.0, 9.5, 10.5)
    unknown = rated(point(9.0, firsts(1, 0.1, 2)), 30.0, None, None)
    assert headline(tmp_path, lucky, sure, unknown) == [10.0, 9.5, 10.5]
    assert headline(tmp_path, unknown) == [30.0, None, None]


def test_the_page_is_small(tmp_path: Path) -> None:
    """A megabyte compressed for 2,000 records: what does not grow, and 2,000 lines of the index."""
    out = tmp_path / "page"
    build(made_records(40, rows=1), out)
    fixed = sum(
        len(gzip.compress((out / name).read_bytes()))
        for name in ("index.html", "page.css", "page.js")
    )
    index = len(gzip.compress((out / "data" / "index.js").read_bytes()))
    assert fixed < 100_000
    assert fixed + index / 40 * 2000 < 1_000_000


def test_serving_shows_the_page_to_this_machine_alone(records: Path, tmp_path: Path) -> None:
    out = tmp_path / "page"
    with pytest.raises(UsageError, match="almanac build"):
        serve(out, 0)
    build(records, out)
    ready = threading.Event()
    told: list[str] = []
    thread = threading.Thread(
        target=serve,
        args=(out, 0, lambda address: (told.append(address), ready.set())),
        daemon=True,
    )
    thread.start()
    assert ready.wait(600)
    with urllib.request.urlopen(told[0], timeout=600) as answer:
        assert answer.read() == (out / "index.html").read_bytes()
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert told[0].startswith("http://127.0.0.1:")
    with pytest.raises(CapacityError, match="--port"):
        serve(out, int(told[0].split(":")[2].strip("/")))


def test_the_command_builds_and_names_what_it_refuses(records: Path, tmp_path: Path) -> None:
    from penstock.cli import app

    asked = ["almanac", "build", "--records", str(records), "--out", str(tmp_path / "page")]
    good = CliRunner().invoke(app, asked)
    assert good.exit_code == 0 and "12 records" in good.output and "index.html" in good.output
    (records / "broken.json").write_text("{}")
    bad = CliRunner().invoke(app, asked)
    assert (
        bad.exit_code == 1
        and "refused broken.json" in bad.output
        and (tmp_path / "page" / "index.html").is_file()
    )
    none = CliRunner().invoke(
        app, ["almanac", "build", "--records", str(tmp_path / "no"), "--out", str(tmp_path / "x")]
    )
    assert none.exit_code == 2 and "name one with --records" in none.output
    (tmp_path / "empty").mkdir()
    asked = ["almanac", "build", "--records", str(tmp_path / "empty"), "--out", str(tmp_path / "y")]
    empty = CliRunner().invoke(app, asked)
    assert (
        empty.exit_code == 0
        and "nothing to show yet" in empty.output
        and "almanac add RUN" in empty.output
    )


def test_the_command_that_the_page_gives_is_one() -> None:
    from typer.main import get_command

    from penstock.cli import app

    text = (Path(building.__file__).parent / "site" / "script" / "52_command.js").read_text()
    given = set(re.findall(r'"(--[a-z-]+)"', text))
    bench: Any = get_command(app)
    run = bench.commands["bench"].commands["run"]
    assert {"--engine", "--model", "--shape", "--goal"} <= given
    assert given <= {flag for option in run.params for flag in option.opts}
    monkeys = re.search(r"MONKEYS = \{ n: (\d+), input: (\d+), output: (\d+) \}", text)
    plain, named = workload("monkeys"), workload(f"monkeys:{MONKEYS_SAMPLES}")
    assert monkeys and tuple(map(int, monkeys.groups())) == (plain.n, plain.input, plain.output)
    assert plain == named  # one subject, whichever way it was asked for

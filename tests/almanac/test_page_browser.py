"""The almanac's page in a real browser, from the file system: it answers, and answers truly;
nothing leaves it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import page_browser
import pytest
from page_browser import Reader, made_page
from page_records import firsts, point, record

from penstock.almanac.figures import kept_of, most_of, sustained
from penstock.almanac.intervals import share_interval
from penstock.almanac.record import Point

WHY_NOT = page_browser.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

LINE = "<img src=x onerror=hacked=1>javascript:hacked=1</script><script>hacked=1</script>"


def swift(run: str = "swift000", engine: str = "swift", **changes: Any) -> dict[str, Any]:
    """First tokens come early at low rates; it is full at 20 a second."""
    points = [
        point(None, firsts(1, 0.05, 1), kind="single"),
        point(10.0, firsts(1, 0.1, 9)),
        point(20.0, firsts(0.9, 0.1, 9)),
        point(40.0, firsts(0.1, 0.1, 9)),
        point(None, firsts(0.05, 0.1, 20), kind="saturation"),
    ]
    return record(run, engine, points, **changes)


def steady(run: str = "steady00", engine: str = "steady", **changes: Any) -> dict[str, Any]:
    """First tokens never come before 2 s; it takes 50 a second."""
    points = [
        point(None, firsts(1, 2.0, 3), kind="single"),
        point(25.0, firsts(1, 2.0, 9)),
        point(50.0, firsts(1, 2.0, 9)),
    ]
    return record(run, engine, points, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of most tests: two engines, one with another shape too; one that failed; one client
    short."""
    other = {"shape.input": 128.0, "shape.output": 1024.0, "shape.name": "128x1024"}
    broken = record("broken00", "broken", [])
    broken["failures"] = [
        {"point": None, "kind": "out of memory", "message": "no room", "log": "the log's tail"}
    ]
    unsure = record("unsure00", "unsure", [point(90.0, firsts(1, 0.1, 2), short=True)])
    records = [swift(), steady(), swift("longer00", **other), broken, unsure]
    return made_page(tmp_path_factory.mktemp("page"), records)


@pytest.fixture
def reader(browser: Any, folder: Path) -> Iterator[Reader]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    found = Reader(context.new_page(), folder)
    yield found
    context.close()
    assert found.faults == []


# --- the question and its answer


def test_the_question_changes_the_answer(reader: Reader) -> None:
    reader.open()
    # 100 % at 10 a second, 90 % at 20: 95 % half-way between.
    assert "swift 1.0 takes 15 requests a second" in reader.text("#answer")
    assert "Interpolated between two measured points, 10 (100 %) and 20" in reader.text("#answer")
    reader.choose("ask-quantile", "0.9")
    assert "takes 20 requests a second" in reader.text("#answer")
    reader.choose("ask-quantile", "0.5")
    assert "takes 30 requests a second" in reader.text("#answer")  # 90 % at 20, 10 % at 40
    reader.choose("ask-first", "5")
    assert (
        "steady 1.0 keeps 50 % of first tokens under 5 s up to 50 requests a second"
        in reader.text("#answer")
    )
    reader.choose("ask-engine", "swift")
    assert "swift 1.0 takes 30" in reader.text("#answer") and reader.ranking() == ["swift 1.0"]


def test_what_was_not_measured_is_said_with_its_command(reader: Reader) -> None:
    reader.open("#question?i=2048&o=2048")
    assert reader.text("#answer").startswith("Not measured.")
    asked = asked_of(reader.text("#answer code"))
    assert (asked["model"], list(asked["shape"]), list(asked["goal"])) == (
        "Test-1B",
        ["2048x2048"],
        [1.0],
    )
    assert asked["engine"] in ("swift", "steady", "unsure")  # whichever was measured last
    assert reader.page.is_hidden("#ranking-part") and reader.page.is_hidden("#curve-part")
    assert reader.texts("#answer code")[1] == "penstock almanac add bench-out"
    for kind, name, word in (
        ("monkeys", "monkeys:4@rows", "monkeys:4@rows.jsonl"),
        ("dataset", "talk", "talk.json"),
    ):
        reader.open(f"#question?k={kind}&n=4&s={name}")
        assert f"--shape {word} " in reader.text("#answer code")
    reader.open("#question?i=2048&o=2048")
    reader.page.click("#answer a >> nth=0")
    reader.wait("#answer", "requests a second")


def asked_of(command: str) -> dict[str, Any]:
    """What `penstock bench run` takes the command's words for."""
    from typer.main import get_command

    from penstock.cli import app

    words = shlex.split(command)
    assert words[:3] == ["penstock", "bench", "run"]
    bench: Any = get_command(app)
    params: dict[str, Any] = (
        bench.commands["bench"].commands["run"].make_context("run", words[3:]).params
    )
    return params


# --- moving


def test_the_address_restores_the_view(reader: Reader) -> None:
    reader.open()
    reader.choose("ask-quantile", "0.9")
    reader.choose("ask-first", "0.5")
    reader.page.fill("#price", "3.6")
    reader.page.wait_for_function("() => location.hash.includes('p=3.6')")
    before, address = reader.text("#answer"), reader.page.url
    assert "$" in before
    reader.page.reload()
    reader.wait("#answer", "takes 20")
    assert (reader.text("#answer"), reader.page.url) == (before, address)
    reader.page.goto("about:blank")
    reader.page.goto(address)
    reader.wait("#answer", "takes 20")
    assert reader.text("#answer") == before
    assert reader.page.input_value("#ask-first") == "0.5"


# --- the parts


def test_the_page_counts_intervals_as_the_almanac_does(reader: Reader) -> None:
    """The page's Clopper-Pearson against intervals.py's, whole numbers and others."""
    from penstock.almanac.page import build as building

    text = (Path(building.__file__).parent / "site" / "script" / "30_numbers.js").read_text()
    cases = [
        (0, 20),
        (20, 20),
        (1, 20),
        (475, 500),
        (499, 500),
        (12.5, 31.7),
        (950, 1000),
        (3.2, 4100.5),
    ]
    found = reader.open().page.evaluate(
        f"(cases) => {{ {text}; return cases.map(([k, n]) => shareInterval(k, n)) }}", cases
    )
    low, high = share_interval(*np.array(cases).T)
    np.testing.assert_allclose(found, np.stack([low, high], 1), atol=2e-6)


def whole(rate: float) -> list[dict[str, Any]]:
    """Points of a run whose everything at once ended, so that its highest rate is known."""
    return [point(rate, firsts(1, 0.1, 2)), point(None, firsts(0.1, 0.1, 9), kind="saturation")]


def scripts(*names: str) -> str:
    from penstock.almanac.page import build as building

    return "\n".join(
        (Path(building.__file__).parent / "site" / "script" / name).read_text() for name in names
    )


def drawn_points(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Of a run that may have been: open points and often everything at once, with intervals, cuts
    and short clients."""

    def rate(middle: float) -> dict[str, float | None] | None:
        value = middle * float(rng.choice([0.0, 0.5, 0.9, 1.0, 1.1]))
        low, high = value * float(rng.uniform(0.5, 1)), value * float(rng.uniform(1, 1.2))
        known = [{"low": low, "high": high}] * 4 + [
            {"low": low, "high": None},
            {"low": None, "high": None},
        ]
        return None if rng.random() < 0.1 else {"value": value, **known[rng.integers(len(known))]}

    points = []
    for _ in range(rng.integers(0, 6)):
        planned = float(rng.uniform(1, 9))
        made = point(planned, firsts(1, 0.1, 2, 12), short=bool(rng.random() < 0.1))
        share, away = min(float(rng.uniform(0.9, 1.03)), 1.0), float(rng.uniform(0, 0.05))
        made["goals"] = [
            {
                "seconds": 1.0,
                "share": share,
                "low": max(share - away, 0),
                "high": min(share + away, 1),
                "goodput": 1.0,
            }
        ]
        made["figures"]["request_rate"] = rate(planned)
        made |= {
            "seconds": 12 / planned * float(rng.uniform(0.8, 1.1)),
            "outcomes": {"unfinished": 1} if rng.random() < 0.2 else {},
        }
        points.append(made | {"opens": None} if rng.random() < 0.1 else made)
    if rng.random() < 0.8:
        made = point(None, firsts(1, 0.1, 2, 12), kind="saturation", short=bool(rng.random() < 0.1))
        made["figures"]["request_rate"] = rate(float(rng.uniform(5, 9)))
        points.append(made | {"outcomes": {"unfinished": 1} if rng.random() < 0.2 else {}})
    return points


def test_the_page_keeps_goals_at_the_rates_that_the_almanac_does(reader: Reader) -> None:
    """40_answer.js's `mostOf`, `lineOf`, `keptOf` and `surely` against figures.py's `most_of` and
    `kept_of`."""
    rng = np.random.default_rng(8)
    runs = [drawn_points(rng) for _ in range(600)]
    wanted = []
    for points in runs:
        read = [Point.model_validate(each) for each in points]
        ranked = [each for each in read if each.kind == "open" and not each.client.short]
        most = most_of(read)
        kept = kept_of(((sustained(each), each.goals[0]) for each in ranked), 0.95, most)
        wanted.append(
            [most, kept.rate, kept.low, kept.missed, kept.high if kept.rate is not None else None]
        )
    papers = [
        [
            {
                **each,
                "goals": [list(told.values()) for told in each["goals"]],
                "figures": {
                    "request_rate": (
                        list(done.values()) if (done := each["figures"]["request_rate"]) else None
                    )
                },
            }
            for each in points
        ]
        for points in runs
    ]
    found = reader.open().page.evaluate(
        f"""(runs) => {{ {scripts("30_numbers.js", "40_answer.js")};
        return runs.map((points) => {{
          const most = mostOf(points);
          const open = points.filter((point) => point.kind === "open" && !point.client.short);
          const line = lineOf(open.map((point) => ({{ point, ...sustained(point) }})),
            ({{ point }}) => point.goals[0].slice(1, 4), 0.95, most);
          const kept = keptOf(line, 0.95);
          if (!kept) return [most, null, null, line[0]?.offered ?? null, null];
          const [rate, after] = [line[kept.top].rate, kept.fails < 0 ? null : kept.fails];
          const [low, high] = surely(line, {{ rate, after }}, 0.95);
          return [most, rate, low, line[kept.fails]?.offered ?? null, high];
        }}) }}""",
        papers,
    )
    numbers = np.array([[np.nan if value is None else value for value in each] for each in wanted])
    np.testing.assert_allclose(
        [[np.nan if value is None else value for value in each] for each in found],
        numbers,
        rtol=1e-5,
    )
    most, rate, low, missed, high = numbers.T
    unbounded = np.isnan(most) & (rate > 0)
    for cases in (
        rate == most,
        rate < most,
        unbounded,
        np.isnan(rate),
        low > 0,
        missed > 0,
        high > 0,
    ):
        assert cases.sum() > 5  # all of them came up


# --- the reader's own file, and hostile ones


def test_a_dropped_record_appears_marked(reader: Reader) -> None:
    reader.open()
    own = record(
        "mine0000", "mine", [point(90.0, firsts(1, 0.1, 2)), point(99.0, firsts(0.5, 0.1, 2))]
    )
    reader.drop("mine.json", json.dumps(own))
    reader.wait("#said", "marked as yours")
    checked = "not whether its numbers can be believed: penstock almanac validate FILE says that"
    assert checked in reader.text("#said") and "penstock almanac validate FILE" in reader.text(
        "#view-question .own"
    )
    assert reader.ranking()[0] == "mine 1.0 · yours"
    assert "mine 1.0 · yours takes 90" in reader.text("#answer")
    reader.drop("mine.json", json.dumps(own))
    reader.wait("#said", "is here already")


def hostile_files() -> dict[str, tuple[str, str]]:
    """A name -> what is dropped, and what has to be said of it."""
    good = swift("hostile0")
    sample = good["points"][1]["sample"]
    longer = {**good["points"][1], "sample": {**sample, "first": sample["first"][1:]}}
    return {
        "too large": (
            json.dumps(good).replace('"warm_up": 10.0', '"warm_up": 1e308'),
            "method.warm_up: is above",
        ),
        "endless": (
            json.dumps(good).replace('"warm_up": 10.0', '"warm_up": 1e999'),
            "method.warm_up: is no number",
        ),
        "markup": (
            json.dumps({**good, "engine": {**good["engine"], "name": LINE}}),
            "engine.name: has characters",
        ),
        "missing": (
            json.dumps({key: value for key, value in good.items() if key != "shape"}),
            "lacks shape",
        ),
        "more": (json.dumps({**good, LINE: 1}), "which is none"),
        "prototype": (json.dumps(good)[:-1] + ', "__proto__": {"hacked": 1}}', "which is none"),
        "no record": ("[1, 2]", "is no object"),
        "no JSON": ("{", "is no JSON"),
        "turned": (
            json.dumps({**good, "model": {**good["model"], "source": "a\u202eb"}}),
            "source: holds a control",
        ),
        "columns": (json.dumps({**good, "points": [longer]}), "differ in length"),
        "no rate": (
            json.dumps({**good, "points": [{**good["points"][1], "rate": None}]}),
            "an open loop has a rate",
        ),
        "text for a number": (
            json.dumps(good).replace('"warm_up": 10.0', '"warm_up": "10"'),
            "warm_up: is no number",
        ),
    }


@pytest.mark.parametrize("name", list(hostile_files()))
def test_a_bad_file_is_refused_by_name_and_the_page_goes_on(reader: Reader, name: str) -> None:
    reader.open()
    text, said = hostile_files()[name]
    reader.drop(f"{name}<b>.json", text)
    reader.wait("#said", "was not taken")
    assert f"{name}<b>.json was not taken" in reader.text("#said") and said in reader.text("#said")
    assert reader.ranking()[:2] == ["swift 1.0", "steady 1.0"]
    assert reader.page.evaluate("[window.hacked === undefined, ({}).hacked === undefined]") == [
        True,
        True,
    ]


def test_hostile_texts_are_inert_wherever_they_are_shown(ask: Any) -> None:
    made = swift(
        "hostile1",
        **{
            "machine.cpu": LINE,
            "machine.system": LINE,
            "engine.command": LINE,
            "model.source": LINE,
            "client.command": LINE,
            "engine.configuration.flags": [LINE],
            "engine.configuration.files": {"javascript:hacked": LINE + "\n" + LINE},
            "engine.configuration.environment": {"A": LINE},
            "shape.source": LINE,
        },
    )
    made["failures"] = [{"point": None, "kind": "crashed", "message": LINE, "log": LINE}]
    made["points"][1]["marks"] = [LINE]
    reader = ask([made])
    assert LINE in reader.text("#failures")
    reader.page.click(".rank-name")
    assert LINE in reader.text("#drawer-body")
    reader.page.keyboard.press("Escape")
    for view in ("Summary", "Findings", "Data", "Method", "Question"):
        reader.page.click(f"nav >> text={view}")
        assert reader.page.evaluate("[window.hacked === undefined, document.images.length]") == [
            True,
            0,
        ]
        assert (
            reader.page.evaluate(
                "[...document.querySelectorAll('a')].filter((a) => a.protocol ==="
                " 'javascript:').length"
            )
            == 0
        )
        assert reader.page.locator("script").count() == 3  # page.js, index.js, the one group

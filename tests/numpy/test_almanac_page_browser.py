"""The almanac's page in a real browser, from the file system: it answers, and answers truly; nothing leaves it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import page_browser
import pytest
from page_browser import Reader, chromium, made_page
from page_records import firsts, point, record

from penstock.almanac.figures import kept_of, most_of, sustained
from penstock.almanac.intervals import share_interval
from penstock.almanac.record import Interval, Point
from penstock.bench.compare import ratio_ends
from penstock.bench.workload import Workload, workload

WHY_NOT = page_browser.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

# The question as it reads: a choice by what it shows.
SENTENCE = """() => [...document.querySelector("h1.sentence").childNodes].map((node) =>
  node.tagName === "SELECT" ? node.selectedOptions[0].textContent : node.textContent).join("").replace(/\\s+/g, " ")"""
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
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of most tests: two engines, one with another shape too; one that failed; one client short."""
    other = {"shape.input": 128.0, "shape.output": 1024.0, "shape.name": "128x1024"}
    broken = record("broken00", "broken", [])
    broken["failures"] = [{"point": None, "kind": "out of memory", "message": "no room", "log": "the log's tail"}]
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


@pytest.fixture
def ask(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a page of the given records."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened: list[Reader] = []

    def of(records: list[dict[str, Any]], address: str = "") -> Reader:
        opened.append(Reader(context.new_page(), made_page(tmp_path / str(len(opened)), records)))
        return opened[-1].open(address)

    yield of
    context.close()
    assert [fault for each in opened for fault in each.faults] == []


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
    assert "steady 1.0 keeps 50 % of first tokens under 5 s up to 50 requests a second" in reader.text("#answer")
    reader.choose("ask-engine", "swift")
    assert "swift 1.0 takes 30" in reader.text("#answer") and reader.ranking() == ["swift 1.0"]


def test_the_interval_leans_on_measured_points_alone(reader: Reader) -> None:
    reader.open()
    # 400 of 400 surely keep 95 %; 360 of 400 surely don't: between 10 and 20, wherever the line crosses.
    low, high = share_interval([400, 360], [400, 400])
    assert low[0] >= 0.95 and high[1] < 0.95
    assert "95 % interval 9.8 to 20" in reader.text("#answer")  # at 10 surely 9.8 were served


def test_what_is_not_sure_does_not_narrow_the_interval(ask: Any) -> None:
    """385 of 400 reach 95 %, 376 don't, and neither surely: the interval goes to the points beyond them."""
    low, high = share_interval([385, 376], [400, 400])
    assert low[0] < 0.95 < 385 / 400 and 376 / 400 < 0.95 < high[1]
    shares = {10.0: 1, 15.0: 385 / 400, 20.0: 376 / 400, 40.0: 0.1}
    reader = ask([record("unsure00", "unsure", [point(rate, firsts(each, 0.1, 9)) for rate, each in shares.items()])])
    assert "takes 17.8 requests a second (95 % interval 9.8 to 40)" in reader.text("#answer")


def test_chance_above_a_rate_that_misses_moves_no_answer(ask: Any) -> None:
    shares = {10.0: 1, 20.0: 0.9, 40.0: 1}
    reader = ask([record("chance00", "chance", [point(rate, firsts(each, 0.1, 9)) for rate, each in shares.items()])])
    assert "takes 15 requests a second (95 % interval 9.8 to 20)" in reader.text("#answer")


def test_the_answer_is_the_rule_on_any_records(ask: Any) -> None:
    """The rule again, in numpy, on the samples as they are on paper."""
    rng = np.random.default_rng(5)
    rates = [2.0, 5.0, 8.0, 11.0]
    points = [point(rate, rng.gamma(2, 0.05 * rate, 300).tolist(), failed=3) for rate in rates]
    reader = ask([record("random00", "random", points)])
    asked = [(0.5, 0.5), (0.9, 0.5), (0.9, 1.0), (0.8, 2.0), (0.5, 1.0)]
    for quantile, first in asked:
        reader.choose("ask-quantile", str(quantile))
        reader.choose("ask-first", f"{first:g}")
        shares = [np.mean([0 <= t <= first for t in each["sample"]["first"]]) for each in points]
        kept = [at for at, share in enumerate(shares) if share >= quantile]
        if not kept:
            assert reader.text("#answer").startswith("None.")
            continue
        last = kept[-1]
        wanted = rates[last]
        if last + 1 < len(rates):
            part = (shares[last] - quantile) / (shares[last] - shares[last + 1])
            wanted += part * (rates[last + 1] - rates[last])
        told = re.search(r"(?:takes|up to) ([\d.]+) requests", reader.text("#answer"))
        assert told and float(told[1]) == pytest.approx(wanted, rel=6e-3)  # three digits are shown


def test_a_limit_on_every_token_is_joint_with_the_first(ask: Any) -> None:
    both = point(10.0, firsts(1, 0.1, 2, 200), token=0.01)
    both["sample"]["per_token"] = [0.01] * 100 + [0.15] * 100
    reader = ask([record("joint000", "joint", [both])])
    assert "up to 10 requests" in reader.text("#answer")
    reader.choose("ask-pace", "0.1")
    assert reader.text("#answer").startswith("None.") and "50 %" in reader.text("#answer")
    reader.choose("ask-quantile", "0.5")
    assert "up to 10 requests" in reader.text("#answer") and "a token every 100 ms" in reader.text("#answer")


def test_failed_requests_count_against_the_goal(ask: Any) -> None:
    reader = ask([record("failing0", "failing", [point(10.0, firsts(1, 0.1, 2, 90), failed=10)])])
    assert reader.text("#answer").startswith("None.") and "90 %" in reader.text("#answer")


def test_a_recorded_goal_is_taken_over_the_sample(ask: Any) -> None:
    exact = point(10.0, firsts(1, 0.1, 2, 100))
    exact["goals"] = [{"seconds": 1.0, "share": 0.9, "low": 0.89, "high": 0.91, "goodput": 9.0}]
    reader = ask([record("goals000", "goals", [exact])])
    assert "90 % (89 % to 91 %)" in reader.text("#answer")
    reader.choose("ask-first", "2")
    assert "up to 10 requests" in reader.text("#answer")


def test_what_was_not_measured_is_said_with_its_command(reader: Reader) -> None:
    reader.open("#question?i=2048&o=2048")
    assert reader.text("#answer").startswith("Not measured.")
    asked = asked_of(reader.text("#answer code"))
    assert (asked["model"], list(asked["shape"]), list(asked["goal"])) == ("Test-1B", ["2048x2048"], [1.0])
    assert asked["engine"] in ("swift", "steady", "unsure")  # whichever was measured last
    assert reader.page.is_hidden("#ranking-part") and reader.page.is_hidden("#curve-part")
    assert reader.texts("#answer code")[1] == "penstock almanac add bench-out"
    for kind, name, word in (("monkeys", "monkeys:4@rows", "monkeys:4@rows.jsonl"), ("dataset", "talk", "talk.json")):
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
    params: dict[str, Any] = bench.commands["bench"].commands["run"].make_context("run", words[3:]).params
    return params


SERVED = (
    "penstock bench run http://127.0.0.1:8000 --model served --engine-name sglang --engine-version 1.0 --folder ./it "
    "--suite almanac --goal=3 --out elsewhere --random-weights"
)
STARTED = (
    "penstock bench run --engine penstock --model test-1b --options '--load-format dummy --note '\"'\"'a b'\"'\"'' "
    "--shape 128x1024 --shape 1024x128 --minutes 9 --quantile 0.9"
)


def test_the_command_is_that_of_a_record_like_it(ask: Any) -> None:
    """A server that was measured by its URL, an engine that needs options: as it was done, with another shape."""
    served = record("served00", "sglang", [point(10.0, firsts(1, 0.1, 2))], **{"client.command": SERVED})
    started = record("started0", "penstock", [point(9.0, firsts(1, 0.1, 2))], **{"client.command": STARTED})
    about = "m=Test-1B+%28bf16%29&g=Test+CPU%2C+4+cores&i=2048&o=2048&z=0.5"
    reader = ask([served, started], f"#question?{about}&e=sglang")
    asked = asked_of(reader.text("#answer code"))
    assert (asked["url"], asked["model"], asked["engine_name"]) == ("http://127.0.0.1:8000", "served", "sglang")
    assert (list(asked["shape"]), list(asked["goal"]), asked["suite"]) == (["2048x2048"], [0.5], None)
    assert asked["out"] == Path("bench-out") and asked["random_weights"] and asked["engine"] is None
    assert "sglang 1.0 was measured so on Test CPU, 4 cores" in reader.text("#answer")
    reader.choose("ask-engine", "penstock")
    reader.wait("#answer code", "--engine penstock")
    reader.choose("ask-quantile", "0.99")
    asked = asked_of(reader.text("#answer code"))
    assert (asked["engine"], asked["model"], asked["minutes"]) == ("penstock", "test-1b", 9.0)
    assert asked["options"] == "--load-format dummy --note 'a b'" and asked["quantile"] == 0.99
    assert list(asked["shape"]) == ["2048x2048"]


def test_without_a_record_the_command_says_what_to_put_in(ask: Any) -> None:
    other = record("imported", "vllm", [point(10.0, firsts(1, 0.1, 2))],
                   **{"client.command": "vllm bench serve --backend vllm (imported)"})  # fmt: skip
    reader = ask([other], "#question?m=New-7B+%28bf16%2C+random+weights%29&g=a+GPU&i=128&o=256")
    command = "penstock bench run --engine ENGINE --model MODEL --shape 128x256 --goal 1 --random-weights"
    assert reader.text("#answer code") == command and asked_of(command)
    assert "MODEL: of New-7B, its folder, file or id." in reader.text("#answer")
    reader.open("#question?m=New-7B+%28bf16%29&g=a+GPU&i=128&o=256&e=vllm")
    assert asked_of(reader.text("#answer code"))["engine"] == "vllm"
    assert "--engine-name vllm" in reader.text("#answer")
    reader.open("#question?i=128&o=256")  # of a model that was measured by another client
    assert "--engine ENGINE --model MODEL" in reader.text("#answer code")


def test_a_command_that_failed_is_not_given_as_one_that_measures(ask: Any) -> None:
    failed = record("failed00", "small", [])
    failed["failures"] = [{"point": None, "kind": "refused", "message": "its context is 2048.", "log": ""}]
    reader = ask([failed])
    assert "It was tried with this, and failed (refused: its context is 2048). Change what" in reader.text("#answer")
    assert "To measure it" not in reader.text("#answer")
    reader = ask([failed, record("alone000", "alone", [point(None, firsts(1, 0.1, 2), kind="single")])])
    assert "To measure it, run this:" in reader.text("#answer")
    assert asked_of(reader.text("#answer code"))["engine"] == "alone"


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ("n=64&i=512&o=256&s=monkeys", "monkeys"),
        ("n=7&i=512&o=256&s=monkeys%3A7", "monkeys:7"),
        ("n=64&i=600&o=256&s=monkeys", None),
    ],
)
def test_the_command_measures_the_subject_asked_about(reader: Reader, shape: str, name: str | None) -> None:
    reader.open(f"#question?k=monkeys&{shape}")
    if name is None:  # no word of --shape has these lengths
        assert reader.page.locator("#answer code").count() == 0
        assert "no command measures other lengths" in reader.text("#answer")
        return
    (word,) = asked_of(reader.text("#answer code"))["shape"]
    assert workload(word) == Workload(name, "monkeys", 512, 256, 64 if name == "monkeys" else 7)


def test_another_length_can_be_typed(reader: Reader) -> None:
    reader.open()
    reader.choose("ask-input", "other")
    reader.page.fill("input.length", "777")
    reader.page.keyboard.press("Enter")
    reader.wait("#answer", "Not measured.")
    assert "777x128" in reader.text("#answer code")
    assert "i=777" in reader.page.url


def test_measured_and_interpolated_are_told_apart(reader: Reader) -> None:
    reader.open()
    notes = dict(zip(reader.ranking(), reader.texts(".rank-note"), strict=True))
    assert "interpolated" in notes["swift 1.0"]
    assert reader.page.locator("#curve .measured").count() == 3 + 2  # open points of both
    assert reader.page.locator("#curve .aside.single").count() == 2  # and one at a time, for comparison
    assert reader.page.locator("#curve .crossing").count() == 1
    reader.page.click("#curve-part summary")
    rows = reader.texts("#curve-table tbody tr")
    assert [row.endswith("interpolated") for row in rows].count(True) == 1
    assert sum(row.endswith("measured") for row in rows) == 5


def test_a_short_client_is_shown_and_never_ranked(reader: Reader) -> None:
    reader.open()
    assert reader.ranking()[-1] in ("unsure 1.0", "broken 1.0")
    notes = dict(zip(reader.ranking(), reader.texts(".rank-note"), strict=True))
    assert "not ranked" in notes["unsure 1.0"] and "out of memory" in notes["broken 1.0"]
    assert reader.page.locator("#curve .short").count() == 1
    assert "90 requests" not in reader.text("#answer")


def test_failures_are_shown_with_their_log(reader: Reader) -> None:
    reader.open()
    assert "broken 1.0: out of memory" in reader.text("#failures")
    reader.page.click("#failures summary")
    assert "the log's tail" in reader.text("#failures pre")


# --- moving


def test_the_slider_ranks_anew(reader: Reader) -> None:
    reader.open()
    assert reader.ranking()[0] == "swift 1.0"
    reader.slide(4)
    assert reader.ranking()[0] == "steady 1.0"
    assert "steady 1.0 keeps 95 % of first tokens under 4 s up to 50" in reader.text("#answer")
    reader.slide(0.5)
    assert reader.ranking()[0] == "swift 1.0"
    reader.slide(0.02)
    assert reader.text("#answer").startswith("None.")
    reader.page.wait_for_function("() => location.hash.includes('z=0.02')")


def test_a_slider_that_comes_back_leaves_the_address_where_it_was(reader: Reader) -> None:
    reader.open()
    reader.choose("ask-quantile", "0.9")
    address = reader.page.url
    reader.slide(2)
    reader.slide(1)
    reader.page.wait_for_timeout(400)  # an address is written 150 ms after the last move
    assert reader.page.url == address and reader.page.input_value("#ask-first") == "1"


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


def test_what_is_left_out_of_an_address_is_not_what_the_page_would_ask_by_itself(ask: Any) -> None:
    """The fastest subject is 128x1024; 1024x128 has no word in the address."""
    turned = {"shape.input": 128.0, "shape.output": 1024.0, "shape.name": "128x1024"}
    fast = record("fast0000", "fast", [point(100.0, firsts(1, 0.1, 2))], **turned)
    reader = ask([fast, record("slow0000", "slow", [point(10.0, firsts(1, 0.1, 2))])])
    assert reader.page.input_value("#ask-input") == "128"
    reader.choose("ask-input", "1024")
    reader.wait("#answer", "slow 1.0 keeps")

    def shown() -> list[str]:
        reader.page.wait_for_function("() => !document.getElementById('view-question').hidden")
        reader.wait("#answer", "keeps")
        return [reader.page.input_value("#ask-input"), reader.page.input_value("#ask-output")]

    address = reader.page.url
    reader.page.reload()
    assert shown() == ["1024", "128"] and reader.page.url == address
    reader.page.click("nav >> text=Method")
    reader.page.click("nav >> text=Question")
    assert shown() == ["1024", "128"]
    reader.page.click("nav >> text=Summary")
    reader.page.click("#summary-body a:has-text('1,024 in, 128 out')")
    assert shown() == ["1024", "128"] and "slow 1.0 keeps" in reader.text("#answer")
    reader.page.click("nav >> text=Data")
    reader.page.click("#record-list a:has-text('slow 1.0')")
    reader.page.wait_for_selector("dialog[open]")
    assert "slow 1.0" in reader.text("#drawer-body")


def test_the_back_button_goes_back(reader: Reader) -> None:
    reader.open()
    reader.choose("ask-quantile", "0.9")
    reader.choose("ask-input", "128")
    reader.wait("#answer", "takes 20")
    assert reader.page.input_value("#ask-output") == "1024"  # what was measured with it
    reader.page.click("nav >> text=Method")
    assert reader.page.is_visible("#view-method") and reader.page.is_hidden("#view-question")
    reader.page.go_back()
    assert reader.page.is_visible("#view-question")
    reader.page.go_back()
    reader.page.wait_for_function("() => document.getElementById('ask-input').value === '1024'")
    reader.page.go_back()
    reader.wait("#answer", "takes 15")


@pytest.mark.parametrize("address", ["#question?z=1e308&q=2&i=-5&p=NaN", "#nowhere?evil=<img src=x onerror=hacked=1>"])
def test_an_address_that_cannot_be_is_told(reader: Reader, address: str) -> None:
    reader.open(address)
    reader.wait("#notes", "The address")
    assert reader.page.evaluate("[window.hacked === undefined, document.images.length]") == [True, 0]
    assert "swift 1.0 takes 15" in reader.text("#answer")


# --- the parts


def test_cost_follows_the_price(reader: Reader) -> None:
    reader.open()
    assert "give a price" in reader.text("#answer")
    reader.page.fill("#price", "5.4")  # 15 requests a second: 54,000 an hour
    reader.wait("#answer", "$0.10 a thousand requests")
    assert "$0.78 a million output tokens" in reader.text("#answer")  # 128 tokens each
    reader.page.fill("#price", "")
    reader.wait("#answer", "give a price")


def test_a_price_that_cannot_be_is_told(reader: Reader) -> None:
    reader.open()
    reader.page.fill("#price", "5.4")
    reader.wait("#answer", "$0.10 a thousand requests")
    reader.page.fill("#price", "-5.4")
    reader.wait(
        "#price-fault", "from 0 to 1,000,000 dollars. What was typed is not taken; costs are still at $5.40 an hour"
    )
    assert "$0.10 a thousand requests" in reader.text("#answer")
    reader.page.fill("#price", "")
    reader.wait("#answer", "give a price")
    assert reader.page.is_hidden("#price-fault")
    reader.page.type("#price", "-")
    reader.wait("#price-fault", "costs are still at what the runs state, if anything")
    reader.page.focus("#ask-quantile")
    reader.choose("ask-quantile", "0.9")
    assert reader.page.is_hidden("#price-fault") and reader.page.input_value("#price") == ""


def test_the_drawer_tells_how_to_run_it_again(reader: Reader) -> None:
    reader.open()
    reader.page.click("#ranking li:first-child .rank-name")
    assert reader.page.locator("dialog[open]").count() == 1
    told = reader.text("#drawer-body")
    measured = "penstock bench run --engine swift --model Test-1B --suite almanac"
    for part in ("swift serve it", measured, "--flag 1", "Test CPU", "seed 0", "swift000"):
        assert part in told
    assert "at=swift000" in reader.page.url
    reader.page.reload()
    reader.page.wait_for_selector("dialog[open]")
    reader.page.keyboard.press("Escape")
    reader.page.wait_for_selector("dialog:not([open])", state="attached")
    assert "at=" not in reader.page.url


def test_a_checksum_and_marks_are_in_the_drawer(ask: Any) -> None:
    made = record("raw00000", "raw", [point(10.0, firsts(1, 0.1, 2), marks=["cached prompts"])])
    made["raw"] = {"sha256": "ab" * 32, "rows": 400}
    reader = ask([made])
    reader.page.click(".rank-name")
    assert "ab" * 32 in reader.text("#drawer-body") and "cached prompts" in reader.text("#drawer-body")


def test_two_are_compared_and_no_difference_is_said(ask: Any) -> None:
    reader = ask([swift(), swift("twin0000", "twin"), steady()])
    assert "No significant difference" in reader.text("#compare-said")
    assert "no significant difference" in reader.text("#compare-table")
    assert "No significant difference from" in reader.text("#answer")
    reader.choose("compare-right", "steady00")
    assert "steady 1.0 has no measured rate" in reader.text("#compare-said")
    rows = dict(each.split(maxsplit=2)[:2] for each in reader.texts("#compare-table tbody tr"))
    assert rows
    assert "steady 1.0 is better" in reader.text("#compare-table")  # its highest rate, 50 against 40


def test_a_clear_ratio_has_its_interval(ask: Any) -> None:
    fast = record("fast0000", "fast", [point(100.0, firsts(1, 0.1, 2)), point(110.0, firsts(0.5, 0.1, 2))])
    slow = record("slow0000", "slow", [point(10.0, firsts(1, 0.1, 2)), point(11.0, firsts(0.5, 0.1, 2))])
    reader = ask([fast, slow])
    ratio = re.search(r"fast 1.0 takes ([\d.]+) \(([\d.]+) to ([\d.]+)\) times", reader.text("#compare-said"))
    assert ratio
    value, low, high = map(float, ratio.groups())
    assert low < value < high and value == pytest.approx(10, rel=0.02) and low > 8.9 and high < 11.1


def test_the_page_counts_intervals_as_the_almanac_does(reader: Reader) -> None:
    """The page's Clopper-Pearson against intervals.py's, whole numbers and others."""
    from penstock.almanac.page import build as building

    text = (Path(building.__file__).parent / "site" / "script" / "30_numbers.js").read_text()
    cases = [(0, 20), (20, 20), (1, 20), (475, 500), (499, 500), (12.5, 31.7), (950, 1000), (3.2, 4100.5)]
    found = reader.open().page.evaluate(
        f"(cases) => {{ {text}; return cases.map(([k, n]) => shareInterval(k, n)) }}", cases
    )
    low, high = share_interval(*np.array(cases).T)
    np.testing.assert_allclose(found, np.stack([low, high], 1), atol=2e-6)


def whole(rate: float) -> list[dict[str, Any]]:
    """Points of a run whose everything at once ended, so that its highest rate is known."""
    return [point(rate, firsts(1, 0.1, 2)), point(None, firsts(0.1, 0.1, 9), kind="saturation")]


def cut(rate: float) -> list[dict[str, Any]]:
    """Of one whose everything at once was cut off: at least this rate."""
    points = whole(rate)
    points[1]["outcomes"] = {"unfinished": 100}
    points[1]["requests"] += 100
    points[1]["figures"]["request_rate"]["high"] = None
    return points


def test_who_was_cut_off_is_not_beaten(ask: Any) -> None:
    turned = {"shape.input": 128.0, "shape.output": 1024.0, "shape.name": "128x1024"}
    records = [
        record("aa000000", "ahead", whole(30.0)), record("bb000000", "beaten", whole(20.0)),
        record("cc000000", "ahead", whole(30.0), **turned), record("dd000000", "beaten", whole(20.0), **turned),
        record("ee000000", "cutoff", cut(5.0), **turned),
    ]  # fmt: skip
    reader = ask(records, "#findings")
    reader.wait("#findings-body", "by a significant difference, that of ahead in 1; in 1 nobody is surely ahead")
    reader.page.click("#findings-body section:has-text('Who reaches') summary")
    reader.wait("#findings-body tbody tr", "ahead of all")
    rows = reader.texts("#findings-body section:has-text('Who reaches') tbody tr")
    assert sorted(row.endswith("ahead of all") for row in rows) == [False, True]
    assert any(row.endswith("cannot be said") and "cutoff 1.0" in row for row in rows)
    reader.page.click("nav >> text=Data")
    reader.wait("#record-list tbody tr", "≥ 5 (from 4.9)")


def test_a_dropped_record_has_the_same_highest_rate_as_one_of_the_almanac(reader: Reader) -> None:
    """The lucky window is passed over, and what was cut off has no upper end."""
    lucky = cut(10.0)
    lucky.append(point(12.0, firsts(1, 0.1, 2)))
    lucky[2]["figures"]["request_rate"] = {"value": 12.0, "low": 6.0, "high": 18.0}
    reader.open()
    reader.drop("mine.json", json.dumps(record("mine0000", "mine", lucky)))
    reader.wait("#said", "marked as yours")
    reader.page.click("nav >> text=Data")
    reader.wait("#record-list tbody tr", "≥ 10 (from 9.8)")


def test_an_offered_rate_that_nobody_saw_served_is_none(ask: Any) -> None:
    """Too few came back for an interval: what was offered is no answer."""

    def few(rate: float, ended: float) -> dict[str, Any]:
        made = point(rate, firsts(1, 0.1, 2, 8))
        made["figures"]["request_rate"] = {"value": ended, "low": None, "high": None}
        return made

    reader = ask([record("million0", "million", [few(1e5, 3.33)])])
    assert "million 1.0 keeps 95 % of first tokens under 1 s up to 3.33 requests a second" in reader.text("#answer")
    reader = ask([record("nothing0", "nothing", [few(4.0, 0.0)])])
    assert reader.text("#answer").startswith("Not measured")
    missed = few(8.0, 0.0)
    missed |= {"complete": 0, "outcomes": {"unfinished": 8}, "output_tokens": 0, "prompt_tokens": 0,
               "sample": dict.fromkeys(missed["sample"], [-1.0] * 8)}  # fmt: skip
    reader = ask([record("missed00", "missed", [few(4.0, 3.0), missed])])
    assert "missed 1.0 takes 4.2 requests a second" in reader.text("#answer")  # from 100 % at 4 to none at 8
    late = few(8.0, 0.0)  # all of them ended behind the window, and too late
    late["sample"]["first"] = [3.0] * 8
    reader = ask([record("late0000", "late", [few(4.0, 3.0), late])])
    assert "late 1.0 takes 4.2 requests a second" in reader.text("#answer")


def test_few_arrivals_are_what_was_offered_unless_chance_says_no(ask: Any) -> None:
    """6 of 8 ended in the window; 2 of 8 did."""
    served, drowned = point(4.0, firsts(1, 0.1, 2, 8)), point(4.0, firsts(1, 0.1, 2, 8))
    served["figures"]["request_rate"] = {"value": 3.0, "low": None, "high": None}
    drowned["figures"]["request_rate"] = {"value": 1.0, "low": None, "high": None}
    reader = ask([record("served00", "served", [served])])
    assert "up to 4 requests a second, the fastest that was offered (no interval can be given)" in reader.text(
        "#answer"
    )
    reader = ask([record("drowned0", "drowned", [drowned])])
    assert "drowned 1.0 keeps 95 % of first tokens under 1 s up to 1 requests a second" in reader.text("#answer")


def test_what_was_offered_is_what_went_out(ask: Any) -> None:
    """Planned at 4.71 a second; chance sent 87 in 21.2 s."""
    unlucky = {**point(4.71, firsts(1, 0.1, 2, 87)), "seconds": 21.2}
    unlucky["figures"]["request_rate"] = {"value": 4.1, "low": 3.5, "high": 4.9}
    reader = ask([record("unlucky0", "unlucky", [unlucky])])
    told = "up to 4.1 requests a second, the fastest that was offered (95 % interval from 3.5 up)"
    assert told in reader.text("#answer")
    reader.page.click(".rank-name")
    assert "4.1 requests a second · point “open 4.71”" in reader.text("#drawer-body")


def test_more_offered_and_less_completed_is_no_lower_answer(ask: Any) -> None:
    fuller = point(12.0, firsts(1, 0.1, 2))
    fuller["figures"]["request_rate"] = {"value": 7.1, "low": 6.5, "high": 7.7}
    reader = ask([record("fuller00", "fuller", [point(8.0, firsts(1, 0.1, 2)), fuller])])
    assert (
        "up to 8 requests a second, the most that it was seen to serve with the goal kept (95 % interval from 7.84 up)"
        in reader.text("#answer")
    )
    assert "Offered more, up to 12 a second, it still kept the goal but completed 7.1." in reader.text("#answer")
    reader = ask([record("fuller00", "fuller", [fuller])])
    assert (
        "up to 7.1 requests a second, the most that it was seen to serve with the goal kept (95 % interval from 6.5 up)"
        in reader.text("#answer")
    )


def rated(made: dict[str, Any], value: float, low: float | None, high: float | None, **more: Any) -> dict[str, Any]:
    """The point with another completed rate."""
    made["figures"]["request_rate"] = {"value": value, "low": low, "high": high}
    return made | more


def at_once(value: float, low: float, high: float) -> dict[str, Any]:
    return rated(point(None, firsts(0.05, 0.1, 20), kind="saturation"), value, low, high)


def test_no_rate_is_above_what_all_at_once_gave(ask: Any) -> None:
    """81 in 40 s, and 63: not significantly more than came back, of engines that give 1.997 and 1.522 at most."""
    kept = goal(rated(point(1.9, firsts(1, 0.1, 2, 81)), 1.8, 1.6, 2.1, seconds=40.0), 1.0)
    reader = ask([record("beyond00", "beyond", [kept, at_once(1.9, 1.813, 1.997)])])
    assert "beyond 1.0 takes 2 requests a second (95 % interval from 1.6 up)" in reader.text("#answer")
    assert "up to 2.02 a second, it still kept the goal but completed 1.8. All at once" in reader.text("#answer")
    assert "it reached 1.9 (1.81 to 2), and no more than that is told." in reader.text("#answer")
    assert "all at once gave no more" in reader.texts(".rank-note")[0] and reader.texts(".rank-value") == ["2/s"]
    kept = goal(rated(point(1.27, firsts(1, 0.1, 2, 63)), 1.4, 1.1, 1.7, seconds=40.0), 1.0)
    missed = goal(rated(point(2.0, firsts(0.5, 0.1, 2)), 1.3, 1.2, 1.4), 0.5)
    reader = ask([record("crossed0", "crossed", [kept, missed, at_once(1.371, 1.219, 1.522)])])
    assert "crossed 1.0 takes 1.52 requests a second (95 % interval 1.1 to 2)" in reader.text("#answer")
    assert "At 2 requests a second, the slowest that misses the goal, it completed 1.3" in reader.text("#answer")
    reader.page.click("nav >> text=Summary")
    reader.wait("#summary-body", "crossed 1.0: 1.52")
    reader.page.click("nav >> text=Findings")
    reader.page.click("#findings-body section:has-text('What a goal leaves') summary")
    reader.wait("#findings-body tbody tr", "all, as far as can be told")


def test_the_fastest_rate_that_was_tried_claims_no_more(ask: Any) -> None:
    """Offered 193, completed 163 [127, 198]: nobody knows that more would be served."""
    fastest = rated(point(193.0, firsts(1, 0.1, 2)), 163.0, 127.0, 198.0)
    reader = ask([record("fastest0", "fastest", [fastest])])
    kept = "up to 193 requests a second, the fastest that was offered (95 % interval from 127 up)"
    assert f"fastest 1.0 keeps 95 % of first tokens under 1 s {kept}" in reader.text("#answer")
    assert reader.texts(".rank-value") == ["kept at 193/s"] and "at least" not in reader.text("#answer")
    told = (
        "It still kept the goal there, and no faster rate was measured; of 193 offered it completed 163 (127 to 198)."
    )
    assert told in reader.text("#answer")
    reader = ask([record("fastest0", "fastest", [fastest, at_once(194.2, 190.0, 197.6)])])
    assert kept in reader.text("#answer")
    reader = ask([record("all00000", "all", [rated(point(10.0, firsts(1, 0.1, 2)), 10.2, 9.8, 10.6)])])
    assert "It still kept the goal there, and no faster rate was measured." in reader.text("#answer")


def test_what_is_said_of_the_leader_is_not_said_of_the_next(ask: Any) -> None:
    """The leader's sentences stand before the first that names another."""
    fuller = rated(point(12.0, firsts(1, 0.1, 2)), 7.1, 6.5, 7.7)
    leader = record("leader00", "leader", [fuller, at_once(9.0, 8.9, 9.1)])
    missed = record("missed00", "missed", [point(1.0, firsts(0.5, 0.1, 2))])
    slower = record("slower00", "slower", [rated(point(2.0, firsts(1, 0.1, 2)), 2.0, None, None)])
    crossed = record("crossed0", "crossed", [point(2.0, firsts(1, 0.1, 2)), point(3.0, firsts(0.5, 0.1, 2))])
    for other, said in ((missed, "has no measured rate"), (slower, "follows with 2"), (crossed, "times the rate of")):
        told = ask([leader, other]).text("#answer")
        before, _, after = told.partition(f"{other['engine']['name']} 1.0")
        assert "it still kept the goal" in before and "it reached 9" in before and said in told
        assert not re.search(r"\bit\b|\bThat\b", after), after
    both = [record("leader00", "leader", [point(20.0, firsts(1, 0.1, 2)), point(30.0, firsts(0.5, 0.1, 2))]), crossed]
    reader = ask(both)
    assert re.search(
        r"leader 1.0 takes 10 \(\S+ to \S+\) times the rate of crossed 1.0, the next", reader.text("#answer")
    )


def test_an_interval_of_which_nothing_is_known_is_not_drawn(ask: Any) -> None:
    """A line across all would look like the widest interval."""
    unknown = record("unknown0", "unknown", [rated(point(2.0, firsts(1, 0.1, 2)), 2.0, None, None)])
    reader = ask([unknown, record("known000", "known", [point(3.0, firsts(1, 0.1, 2))])])
    assert reader.ranking() == ["known 1.0", "unknown 1.0"]
    assert [each.is_visible() for each in reader.page.locator(".bar .range").all()] == [True, False]
    assert reader.texts(".rank-note")[1].startswith("no interval · measured")
    assert reader.page.locator("#curve .crossing").count() == 2
    assert reader.page.locator("#curve .crossing-range").count() == 1


def test_goodput_above_the_request_rate_is_explained(reader: Reader) -> None:
    reader.open("#method")
    assert "goodput can be above requests a second" in reader.text("#view-method")


def test_a_rate_at_which_nothing_was_served_was_tried(ask: Any) -> None:
    """One answer came back, behind the window: that is neither kept nor missed, and not untried."""
    drowned = rated(point(0.1, firsts(1, 0.1, 2, 4)), 0.0, None, None)
    reader = ask([record("drowned0", "drowned", [drowned])])
    told = "drowned 1.0: a rate was tried, and nothing was served in its window."
    assert reader.text("#answer").startswith("Not measured") and told in reader.text("#answer")
    assert "no open-loop rate measured" not in reader.text("body")


def test_what_is_kept_for_other_shares_stands_beside_nothing(ask: Any) -> None:
    """At 50 % of requests a goal is kept at a rate that wins over any at 95 %."""
    points = [goal(point(100.0, firsts(0.6, 0.1, 2)), 0.6), goal(point(110.0, firsts(0.2, 0.1, 2)), 0.2)]
    loose = record("loose000", "loose", [*points, at_once(120.0, 119.0, 121.0)], **{"method.quantile": 0.5})
    points = [goal(point(10.0, firsts(1, 0.1, 2)), 1.0), goal(point(20.0, firsts(0.5, 0.1, 2)), 0.5)]
    strict = record("strict00", "strict", [*points, at_once(40.0, 39.0, 41.0)])
    newer = record("newer000", "strict", [*points, at_once(40.0, 39.0, 41.0)],
                   **{"method.quantile": 0.5, "when": "2099-01-01T00:00:00Z"})  # fmt: skip
    reader = ask([loose, strict, newer], "#summary")
    reader.wait("#summary-body th", "1 s kept for 95 %")
    (row,) = reader.texts("#summary-body tbody tr")
    assert "loose 1.0" in row and row.endswith("strict 1.0: 10")
    reader.page.click("nav >> text=Findings")
    reader.wait("#findings-body", "for 95 % of requests was, in the middle, 25 % under 1 s (1 run)")


def test_a_dropped_record_is_marked_where_it_is_told_and_none_of_the_almanacs(ask: Any) -> None:
    reader = ask([record("theirs00", "theirs", whole(10.0))], "#summary")
    reader.wait("#summary-body", "The almanac holds 1 run of 1 engine")
    reader.drop("mine.json", json.dumps(record("mine0000", "mine", whole(30.0))))
    reader.wait("#said", "marked as yours")
    reader.page.click("nav >> text=Summary")
    reader.wait("#summary-body tbody tr", "mine 1.0 · yours")
    assert "The almanac holds 1 run of 1 engine, 1 model and 1 machine, 2 measured points" in reader.text(
        "#summary-body"
    )
    assert "1 run of yours stands among them below" in reader.text("#summary-body")
    reader.page.click("nav >> text=Findings")
    reader.page.click("#findings-body section:has-text('Who reaches') summary")
    reader.wait("#findings-body tbody tr", "mine 1.0 · yours")


def test_where_only_a_short_client_offered_more_it_is_said(ask: Any) -> None:
    points = [point(10.0, firsts(1, 0.1, 2)), point(20.0, firsts(1, 0.1, 2), short=True)]
    reader = ask([record("barred00", "barred", points)])
    assert "10 is the fastest rate that can be ranked" in reader.text("#answer")
    assert "nothing faster can be ranked" in reader.texts(".rank-note")[0]


def test_the_page_says_of_a_point_what_the_almanac_says(reader: Reader) -> None:
    """40_answer.js's `sustained` against figures.py's."""
    from penstock.almanac.page import build as building

    rng, points = np.random.default_rng(3), []
    for number in range(60):
        made = point(4.0, firsts(1, 0.1, 2, 12), failed=number % 3)
        value = float(rng.choice([0.0, 0.3, 1.0, 2.5, 3.9, 4.4]))
        low, high = (None, None) if number % 2 else (value * 0.9, value * 1.1)
        made["figures"]["request_rate"] = None if number % 7 == 0 else {"value": value, "low": low, "high": high}
        made |= {"outcomes": {"unfinished": 1} if number % 5 == 0 else {}, "opens": None if number % 11 == 0 else 10.0}
        points.append(made)
    script = Path(building.__file__).parent / "site" / "script"
    text = "\n".join((script / name).read_text() for name in ("30_numbers.js", "40_answer.js"))
    rates = [each["figures"]["request_rate"] for each in points]
    papers = [
        {**each, "figures": {"request_rate": [rate["value"], rate["low"], rate["high"]] if rate else None}}
        for each, rate in zip(points, rates, strict=True)
    ]
    found = reader.open().page.evaluate(
        f"(points) => {{ {text}; return points.map(sustained).map((one) => [one.offered, one.rate, one.low ?? -1]) }}",
        papers,
    )
    read = [sustained(Point.model_validate(each)) for each in points]
    wanted = [[each.offered, each.rate, -1 if each.low is None else each.low] for each in read]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def scripts(*names: str) -> str:
    from penstock.almanac.page import build as building

    return "\n".join((Path(building.__file__).parent / "site" / "script" / name).read_text() for name in names)


def drawn_points(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Of a run that may have been: open points and often everything at once, with intervals, cuts and short clients."""

    def rate(middle: float) -> dict[str, float | None] | None:
        value = middle * float(rng.choice([0.0, 0.5, 0.9, 1.0, 1.1]))
        low, high = value * float(rng.uniform(0.5, 1)), value * float(rng.uniform(1, 1.2))
        known = [{"low": low, "high": high}] * 4 + [{"low": low, "high": None}, {"low": None, "high": None}]
        return None if rng.random() < 0.1 else {"value": value, **known[rng.integers(len(known))]}

    points = []
    for _ in range(rng.integers(0, 6)):
        planned = float(rng.uniform(1, 9))
        made = point(planned, firsts(1, 0.1, 2, 12), short=bool(rng.random() < 0.1))
        share, away = min(float(rng.uniform(0.9, 1.03)), 1.0), float(rng.uniform(0, 0.05))
        made["goals"] = [{"seconds": 1.0, "share": share, "low": max(share - away, 0), "high": min(share + away, 1),
                          "goodput": 1.0}]  # fmt: skip
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
    """40_answer.js's `mostOf`, `lineOf`, `keptOf` and `surely` against figures.py's `most_of` and `kept_of`."""
    rng = np.random.default_rng(8)
    runs = [drawn_points(rng) for _ in range(600)]
    wanted = []
    for points in runs:
        read = [Point.model_validate(each) for each in points]
        ranked = [each for each in read if each.kind == "open" and not each.client.short]
        most = most_of(read)
        kept = kept_of(((sustained(each), each.goals[0]) for each in ranked), 0.95, most)
        wanted.append([most, kept.rate, kept.low, kept.missed, kept.high if kept.rate is not None else None])
    papers = [
        [{**each, "goals": [list(told.values()) for told in each["goals"]],
          "figures": {"request_rate": list(done.values()) if (done := each["figures"]["request_rate"]) else None}}
         for each in points]
        for points in runs
    ]  # fmt: skip
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
        [[np.nan if value is None else value for value in each] for each in found], numbers, rtol=1e-5
    )
    most, rate, low, missed, high = numbers.T
    unbounded = np.isnan(most) & (rate > 0)
    for cases in (rate == most, rate < most, unbounded, np.isnan(rate), low > 0, missed > 0, high > 0):
        assert cases.sum() > 5  # all of them came up


def test_the_page_has_the_intervals_of_ratios_that_bench_has(reader: Reader) -> None:
    """30_numbers.js's `ratioOf` against compare.py's `ratio_ends`; a low end of 0 is known, null is not."""
    ends: list[tuple[float | None, float | None]] = [
        (1.0, 4.0),
        (0.0, 4.0),
        (None, 4.0),
        (1.0, None),
        (None, None),
        (2.0, 2.0),
    ]
    cases = [([2.0, *one], [3.0, *(each and each * 1.5 for each in other)]) for one in ends for other in ends]
    found = reader.open().page.evaluate(
        f"""(cases) => {{ {scripts("30_numbers.js")}; return cases.map(([a, b]) => ratioOf(a, b).slice(1)
        .map((end) => end === Infinity ? "without end" : end)) }}""", cases,
    )  # fmt: skip
    for (a, b), told in zip(cases, found, strict=True):
        one, other = (Interval(**dict(zip(("value", "low", "high"), each, strict=True))) for each in (a, b))
        wanted = ["without end" if end == float("inf") else end for end in ratio_ends(other, one)]
        assert told == [pytest.approx(end) if isinstance(end, float) else end for end in wanted], (a, b)


def test_one_at_a_time_is_no_rate_that_visitors_get(ask: Any) -> None:
    """It waits for the server: that it kept the goal says nothing of its rate; that it missed it says all."""

    def alone(run: str, engine: str, waited: float) -> dict[str, Any]:
        points = [point(None, firsts(1, waited, 9), kind="single"), point(None, firsts(0, 0.1, 20), kind="saturation")]
        return record(run, engine, points)

    reader = ask([alone("quick000", "quick", 0.1)])
    assert "no record here has a point that can answer this. quick 1.0: no open-loop rate" in reader.text("#answer")
    assert asked_of(reader.text("#answer code"))["engine"] == "quick"
    reader = ask([alone("quick000", "quick", 0.1), alone("slow0000", "slow", 2.0)])
    assert reader.text("#answer").startswith("None.") and reader.ranking() == ["slow 1.0", "quick 1.0"]
    assert reader.texts(".rank-note")[0].startswith("misses it even at 0.306 a second (0 %)")
    measured = alone("quick000", "quick", 0.1)
    measured["points"].append(point(0.1, firsts(1, 0.2, 9)))  # slower than the one at a time
    reader = ask([measured, alone("other000", "other", 0.1)])
    assert "quick 1.0 keeps 95 % of first tokens under 1 s up to 0.1 requests a second" in reader.text("#answer")
    assert "other 1.0 cannot be ranked (no open-loop rate measured)." in reader.text("#answer")


def test_a_few_that_missed_prove_nothing(ask: Any) -> None:
    """3 of 4 in time may be 99 in 100, and 376 of 400 may be 95; 320 of 400 may not."""
    alone = point(None, firsts(0.75, 0.1, 2, 4), kind="single")
    reader = ask([record("lonely00", "lonely", [alone])])
    assert "no record here has a point that can answer this. lonely 1.0: no open-loop rate" in reader.text("#answer")
    unsure = record("unsure00", "unsure", [point(5.0, firsts(0.94, 0.1, 2))])
    reader = ask([unsure, record("missed00", "missed", [point(5.0, firsts(0.8, 0.1, 2))])])
    assert reader.text("#answer").startswith("None. No measured rate keeps")
    notes = dict(zip(reader.ranking(), reader.texts(".rank-note"), strict=True))
    assert notes["unsure 1.0"].startswith("missed it even at 5 a second, though not surely (94 %, ")
    assert notes["missed 1.0"] == "misses it even at 5 a second (80 %)"


def overfull(run: str, engine: str, kept: float, offered: float) -> dict[str, Any]:
    """Keeps the goal at a rate; of what it is offered next it completes two thirds."""
    full = point(offered, firsts(0.9, 0.1, 2))
    full["figures"]["request_rate"] = {"value": offered / 1.5, "low": offered / 1.6, "high": offered / 1.4}
    return record(run, engine, [point(kept, firsts(1, 0.1, 2)), full])


def test_a_rate_that_was_not_served_is_said(ask: Any) -> None:
    reader = ask([overfull("full0000", "full", 5.0, 6.0)])
    assert "full 1.0 takes 5 requests a second (95 % interval 4.9 to 6)" in reader.text("#answer")
    told = "At 6 requests a second, the slowest that misses the goal, it completed 4 and kept the goal for 90 %"
    assert told in reader.text("#answer") and "measured, more was not served" in reader.texts(".rank-note")[0]


def test_the_answers_interval_has_room_where_a_rate_was_not_served(ask: Any) -> None:
    """5 and 5.2, with 6 and 6.2 offered next: what came back there places neither limit."""
    reader = ask([overfull("first000", "first", 5.0, 6.0), overfull("second00", "second", 5.2, 6.2)])
    assert "No significant difference from first 1.0, the next: ratio 1.04 (" in reader.text("#answer")


def goal(made: dict[str, Any], share: float) -> dict[str, Any]:
    """The point with its share under a second recorded."""
    made["goals"] = [{"seconds": 1.0, "share": share, "low": share, "high": share, "goodput": 1.0}]
    return made


def test_what_a_goal_costs_is_known_where_a_rate_missed_it(ask: Any) -> None:
    """Else it would be the part at which the fastest rate was tried."""
    top = point(None, firsts(0.1, 0.1, 9), kind="saturation")
    top["figures"]["request_rate"] = {"value": 20.0, "low": 19.6, "high": 20.4}
    kept, missed = goal(point(10.0, firsts(1, 0.1, 2)), 1.0), goal(point(15.0, firsts(0.5, 0.1, 2)), 0.5)
    reader = ask([record("missed00", "missed", [kept, missed, top]), record("untried0", "untried", [kept, top])],
                 "#findings")  # fmt: skip
    reader.wait("#findings-body", "was, in the middle, 50 % under 1 s (1 run)")
    reader = ask([record("untried0", "untried", [kept, top]), record("another0", "another", [kept, top])], "#findings")
    reader.wait("#findings-body", "Who reaches")
    assert "What a goal leaves" not in reader.text("#findings-body")


def test_a_dropped_record_has_the_headlines_of_one_of_the_almanac(ask: Any) -> None:
    """Kept at 10 and, chance will have it, at 12, of which 9 came back; missed at 15."""
    lower = goal(point(12.0, firsts(1, 0.1, 2)), 1.0)
    lower["figures"]["request_rate"] = {"value": 9.0, "low": 8.5, "high": 9.5}
    points = [goal(point(10.0, firsts(1, 0.1, 2)), 1.0), lower, goal(point(15.0, firsts(0.5, 0.1, 2)), 0.5)]
    wide = point(None, firsts(0.1, 0.1, 9), kind="saturation")  # fewer requests, and of these the most tokens
    wide["figures"]["request_rate"] = {"value": 8.0, "low": 7.9, "high": 8.1}
    wide["figures"]["output_rate"] = {"value": 9000.0, "low": 8900.0, "high": 9100.0}
    mine = record("mine0000", "mine", [*points, wide, point(None, firsts(1, 0.05, 1), kind="single")])
    reader = ask([mine], "#summary?p=3.6")
    reader.wait("#summary-body", "mine 1.0: 10")
    (built,) = reader.texts("#summary-body tbody tr")
    assert "$0.11" in built  # 3.6 an hour is a thousandth a second: over 9,000 tokens
    reader = ask([record("other000", "other", [point(1.0, firsts(1, 0.1, 2))], **{"machine.cpu": "Other CPU"})])
    reader.drop("mine.json", json.dumps(mine))
    reader.wait("#said", "marked as yours")
    reader.page.fill("#price", "3.6")
    reader.page.click("nav >> text=Summary")
    reader.wait("#summary-body", "mine 1.0 · yours: 10")
    assert built in [row.replace(" · yours", "") for row in reader.texts("#summary-body tbody tr")]
    reader.page.click("nav >> text=Findings")
    reader.wait("#findings-body", "under 1 s (1 run)")


def test_findings_are_computed(ask: Any) -> None:
    turned = {"shape.input": 128.0, "shape.output": 1024.0, "shape.name": "128x1024"}
    reads = record("reads000", "one", whole(30.0))
    writes = record("writes00", "one", whole(10.0), **turned)
    tuned = record("tuned000", "one", whole(36.0), **{"engine.configuration.name": "tuned"})
    reader = ask([reads, writes, tuned], "#findings")
    reader.wait("#findings-body", "3 (2.92 to 3.09) times as many requests a second at 1,024 in and 128 out")
    assert "1.2 (1.17 to 1.23) times the default's highest rate" in reader.text("#findings-body")
    reader.page.click("nav >> text=Summary")
    assert "3 runs of 1 engine, 1 model and 1 machine" in reader.text("#summary-body")
    assert reader.page.locator("#summary-body tbody tr").count() == 2


def test_the_data_page_filters_and_offers_the_files(reader: Reader) -> None:
    reader.open("#data")
    reader.page.wait_for_selector("#record-list tbody tr")
    assert reader.page.locator("#record-list tbody tr").count() == 5
    reader.choose("filter-engine", "swift")
    assert reader.page.locator("#record-list tbody tr").count() == 2
    reader.page.fill("#filter-text", "longer00")
    reader.page.wait_for_function("() => document.querySelectorAll('#record-list tbody tr').length === 1")
    reader.page.wait_for_function("() => location.hash.includes('x=longer00')")
    links = reader.page.eval_on_selector_all("#downloads a", "all => all.map((each) => each.getAttribute('href'))")
    assert links == ["data/records.json", "data/points.csv", "data/points.parquet"]
    assert all((reader.folder / link).is_file() for link in links)


def test_a_table_can_be_kept(reader: Reader) -> None:
    reader.open()
    reader.page.click("#curve-part summary")
    with reader.page.expect_download() as kept:
        reader.page.click("#curve-table button:has-text('Keep as CSV')")
    lines = Path(kept.value.path()).read_text().splitlines()
    assert lines[0].startswith("Engine,Point,Requests/s") and any("interpolated" in line for line in lines)


# --- the reader's own file, and hostile ones


def test_a_dropped_record_appears_marked(reader: Reader) -> None:
    reader.open()
    own = record("mine0000", "mine", [point(90.0, firsts(1, 0.1, 2)), point(99.0, firsts(0.5, 0.1, 2))])
    reader.drop("mine.json", json.dumps(own))
    reader.wait("#said", "marked as yours")
    checked = "not whether its numbers can be believed: penstock almanac validate FILE says that"
    assert checked in reader.text("#said") and "penstock almanac validate FILE" in reader.text("#view-question .own")
    assert reader.ranking()[0] == "mine 1.0 · yours"
    assert "mine 1.0 · yours takes 90" in reader.text("#answer")
    reader.drop("mine.json", json.dumps(own))
    reader.wait("#said", "is here already")


def test_a_record_can_be_chosen_by_hand(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(record("mine0001", "mine", [point(90.0, firsts(1, 0.1, 2))])))
    reader.open()
    reader.page.set_input_files("#view-question input[type=file]", str(path))
    reader.wait("#answer", "mine 1.0 · yours keeps 95 % of first tokens under 1 s up to 90")


def hostile_files() -> dict[str, tuple[str, str]]:
    """A name -> what is dropped, and what has to be said of it."""
    good = swift("hostile0")
    sample = good["points"][1]["sample"]
    longer = {**good["points"][1], "sample": {**sample, "first": sample["first"][1:]}}
    return {
        "too large": (json.dumps(good).replace('"warm_up": 10.0', '"warm_up": 1e308'), "method.warm_up: is above"),
        "endless": (json.dumps(good).replace('"warm_up": 10.0', '"warm_up": 1e999'), "method.warm_up: is no number"),
        "markup": (json.dumps({**good, "engine": {**good["engine"], "name": LINE}}), "engine.name: has characters"),
        "missing": (json.dumps({key: value for key, value in good.items() if key != "shape"}), "lacks shape"),
        "more": (json.dumps({**good, LINE: 1}), "which is none"),
        "prototype": (json.dumps(good)[:-1] + ', "__proto__": {"hacked": 1}}', "which is none"),
        "no record": ("[1, 2]", "is no object"),
        "no JSON": ("{", "is no JSON"),
        "turned": (json.dumps({**good, "model": {**good["model"], "source": "a\u202eb"}}), "source: holds a control"),
        "columns": (json.dumps({**good, "points": [longer]}), "differ in length"),
        "no rate": (json.dumps({**good, "points": [{**good["points"][1], "rate": None}]}), "an open loop has a rate"),
        "text for a number": (json.dumps(good).replace('"warm_up": 10.0', '"warm_up": "10"'), "warm_up: is no number"),
    }


@pytest.mark.parametrize("name", list(hostile_files()))
def test_a_bad_file_is_refused_by_name_and_the_page_goes_on(reader: Reader, name: str) -> None:
    reader.open()
    text, said = hostile_files()[name]
    reader.drop(f"{name}<b>.json", text)
    reader.wait("#said", "was not taken")
    assert f"{name}<b>.json was not taken" in reader.text("#said") and said in reader.text("#said")
    assert reader.ranking()[:2] == ["swift 1.0", "steady 1.0"]
    assert reader.page.evaluate("[window.hacked === undefined, ({}).hacked === undefined]") == [True, True]


def test_hostile_texts_are_inert_wherever_they_are_shown(ask: Any) -> None:
    made = swift(
        "hostile1", **{"machine.cpu": LINE, "machine.system": LINE, "engine.command": LINE, "model.source": LINE,
                       "client.command": LINE, "engine.configuration.flags": [LINE],
                       "engine.configuration.files": {"javascript:hacked": LINE + "\n" + LINE},
                       "engine.configuration.environment": {"A": LINE}, "shape.source": LINE},
    )  # fmt: skip
    made["failures"] = [{"point": None, "kind": "crashed", "message": LINE, "log": LINE}]
    made["points"][1]["marks"] = [LINE]
    reader = ask([made])
    assert LINE in reader.text("#failures")
    reader.page.click(".rank-name")
    assert LINE in reader.text("#drawer-body")
    reader.page.keyboard.press("Escape")
    for view in ("Summary", "Findings", "Data", "Method", "Question"):
        reader.page.click(f"nav >> text={view}")
        assert reader.page.evaluate("[window.hacked === undefined, document.images.length]") == [True, 0]
        assert (
            reader.page.evaluate(
                "[...document.querySelectorAll('a')].filter((a) => a.protocol === 'javascript:').length"
            )
            == 0
        )
        assert reader.page.locator("script").count() == 3  # page.js, index.js, the one group


# --- everybody


def test_all_by_keyboard(reader: Reader) -> None:
    reader.open()
    reached: list[str] = []
    for _ in range(45):
        reader.page.keyboard.press("Tab")
        reached.append(reader.page.evaluate(
            "() => { const at = document.activeElement; const ring = getComputedStyle(at);"
            " const hit = at.querySelector && at.querySelector('.hit');"
            " const seen = ring.outlineStyle !== 'none' || (hit && getComputedStyle(hit).strokeWidth !== '1px')"
            " || (at.type === 'file' && getComputedStyle(at.parentElement).outlineStyle !== 'none');"
            " return `${at.id || at.getAttribute('class') || at.tagName}${seen ? '' : ' UNSEEN'}` }"
        ))  # fmt: skip
    wanted = ["skip", "theme", "ask-model", "ask-engine", "ask-machine", "ask-input", "ask-output", "ask-quantile",
              "ask-first", "first-slider", "ask-pace", "ask-end", "price", "rank-name", "compare-left"]  # fmt: skip
    assert [each for each in wanted if each not in reached] == []
    assert [each for each in reached if "UNSEEN" in each and "BODY" not in each] == []
    assert any("mark" in each for each in reached)


def test_marks_are_walked_by_arrows_and_the_drawer_gives_the_focus_back(reader: Reader) -> None:
    reader.open()
    reader.page.focus("#curve .mark[tabindex='0']")
    first = reader.page.evaluate("document.activeElement.getAttribute('aria-label')")
    reader.page.keyboard.press("ArrowRight")
    second = reader.page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert first != second and "measured" in second
    assert reader.text("#curve .tip") == second.replace("\xa0", " ")
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_selector("dialog[open]")
    reader.page.keyboard.press("Escape")
    reader.page.wait_for_function("() => document.activeElement.classList.contains('mark')")
    assert reader.page.evaluate("document.activeElement.getAttribute('aria-label')") == second


def test_dark_is_the_readers_choice(browser: Any, folder: Path) -> None:
    context = browser.new_context(color_scheme="dark")
    reader = Reader(context.new_page(), folder)
    background = "getComputedStyle(document.body).backgroundColor"
    dark = reader.open().page.evaluate(background)
    reader.page.click("#theme")
    light = reader.page.evaluate(background)
    assert sum(map(int, re.findall(r"\d+", dark))) < 150 < 600 < sum(map(int, re.findall(r"\d+", light)))
    reader.page.reload()
    assert reader.page.evaluate(background) == light
    context.close()
    assert reader.faults == []


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("view", ["question", "summary", "findings", "method", "data"])
def test_nothing_hangs_over_the_edge(reader: Reader, width: int, view: str) -> None:
    reader.page.set_viewport_size({"width": width, "height": 800})
    reader.open(f"#{view}")
    assert reader.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


LABELS = """() => [...document.querySelectorAll("#users .tick[text-anchor=middle], #curve .tick[text-anchor=middle]")]
  .map((each) => { const { left, right, top } = each.getBoundingClientRect(); return [top, left, right]; })"""


@pytest.mark.parametrize("top", [2.0, 9.0, 130.0, 1100.0, 2e4, 1e5])
def test_labels_along_an_axis_do_not_touch(ask: Any, top: float) -> None:
    """From 7 a second on, 128 tokens each: 900 to 90 million."""
    points = [point(rate, firsts(1, 0.1, 2)) for rate in np.geomspace(7.0, 7.0 * top, 4)]
    reader = ask([record("ticks000", "ticks", points)])
    for width in (400, 1280):
        reader.page.set_viewport_size({"width": width, "height": 800})
        places = sorted(reader.page.evaluate(LABELS))
        assert len(places) >= 3
        for (row, _, right), (other, left, _) in pairwise(places):
            assert other - row > 50 or left - right > 3


def test_no_records_is_no_error(ask: Any) -> None:
    reader = ask([])
    assert reader.text("#answer").startswith("Not measured. The almanac holds no record yet.")
    assert "How fast is a model on any engine on a machine," in reader.page.evaluate(SENTENCE)
    reader.page.click("nav >> text=Summary")
    assert "holds no run yet" in reader.text("#summary-body")
    reader.page.click("nav >> text=Findings")
    assert "too few records" in reader.text("#findings-body")
    reader.page.click("nav >> text=Data")
    assert reader.text("#filter-count") == "0 runs of 0"

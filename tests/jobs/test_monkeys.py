"""The sampling job over an LLM that computes nothing: what it asks, what it writes, and how it goes
on."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from fake_llm import CONTEXT, FakeLLM, shown_by

from penstock.config import Config
from penstock.errors import ContextLengthError, JournalError, PenstockError, UsageError
from penstock.jobs import monkeys as monkeys_room
from penstock.jobs.monkeys import Options, run_monkeys
from penstock.jobs.open_llm import OpenLLM
from penstock.jobs.pass_at_k import pass_at_k
from penstock.journal import journal_of
from penstock.journal_lines import line_of
from penstock.llm import Finished, Prompt
from penstock.request import SamplingParams

pytestmark = pytest.mark.torch

N = 6


def make_problems(folder: Path, count: int = 5, long: int | None = None) -> str:
    path = folder / "problems.jsonl"
    with path.open("w") as file:
        for i in range(count):
            question = f"How many <b>letters</b> & signs are in this {'long ' * i}question?"
            question += " x" * CONTEXT if i == long else ""
            file.write(
                json.dumps({"question": question, "answer": f"Count.\n#### {len(question)}"}) + "\n"
            )
    return str(path)


def ask(folder: Path, *, out: str = "out", n: int = N, **values: Any) -> Options:
    problems = values.pop("problems", None) or make_problems(folder)
    sampling = SamplingParams(n=n, temperature=0.6, max_tokens=64, stop=["Question:"])
    return Options(
        problems=problems, out=folder / out, sampling=sampling, **{"few_shot": 2, **values}
    )


def opener(llm: FakeLLM) -> OpenLLM:
    return cast(OpenLLM, lambda config: llm)


def samples(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    by_key = {(row["problem"], row["sample"]): row for row in rows}
    assert len(by_key) == len(rows), "a sample was written twice"
    return by_key


def test_what_it_asks_and_what_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM()
    summary = run_monkeys(Config(), ask(tmp_path), opener(llm))
    assert [p.key for p in llm.asked] == [0, 1, 2, 3, 4]
    assert len({p.params.seed for p in llm.asked}) == 5
    assert all(
        p.samples is None and p.params.n == N and p.params.stop == ["Question:"] for p in llm.asked
    )
    assert all(p.group_stop is None for p in llm.asked)
    prompt = llm.asked[0].prompt
    assert isinstance(prompt, str)
    assert (
        prompt.count("Question: ") == 3
        and prompt.count("Answer: Count.\n#### ") == 2
        and prompt.endswith("\nAnswer:")
    )
    assert prompt.count("in this question?") == 1, "a problem is never among its own shots"
    rows = samples(tmp_path / "out")
    assert sorted(rows) == [(p, s) for p in range(5) for s in range(N)]
    one = rows[2, 3]
    assert one["answer"] == re.search(r"#### (\d+)", one["text"])[1]  # type: ignore[index]
    check_summary(summary, rows)
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    printed = capsys.readouterr().out
    assert "majority vote" in printed and "output speed" in printed and "report.html" in printed
    assert llm.closed


def check_summary(summary: dict[str, Any], rows: dict[tuple[int, int], dict[str, Any]]) -> None:
    right = [sum(rows[p, s]["right"] for s in range(N)) for p in range(5)]
    assert 0 < sum(right) < 5 * N, "the fake answers rightly about half of the times"
    for point in summary["coverage"]:
        assert point["value"] == pytest.approx(sum(pass_at_k(N, c, point["k"]) for c in right) / 5)
        assert point["low"] <= point["value"] <= point["high"]
    assert [point["k"] for point in summary["coverage"]] == [1, 2, 4, 6]
    lengths = [row["token_count"] for row in rows.values()]
    assert summary["output_tokens"] == sum(lengths) == summary["speed"]["output_tokens"]
    assert (summary["longest"], summary["finish_reasons"]) == (max(lengths), {"stop": 5 * N})
    prompts = {p: rows[p, 0]["prompt_tokens"] for p in range(5)}
    assert summary["prompt_tokens"] == sum(prompts.values()) == summary["speed"]["prompt_tokens"]
    speed = summary["speed"]
    total = (speed["output_tokens"] + speed["prompt_tokens"]) / speed["seconds"]
    assert speed["total_tokens_per_second"] == pytest.approx(total, rel=1e-3)


def test_the_report_stands_alone(tmp_path: Path) -> None:
    run_monkeys(Config(), ask(tmp_path), opener(FakeLLM()))
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"(?:src|href)=|@import|url\(|<script", page)
    assert "<svg" in page and 'class="curve"' in page and "prefers-color-scheme: dark" in page
    assert "&lt;b&gt;letters&lt;/b&gt; &amp; signs" in page and "<b>letters" not in page
    assert "Right samples" in page and "Wrong samples" in page
    assert (tmp_path / "out" / "coverage.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_alone_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.jobs.report.find_spec", lambda name: None)
    run_monkeys(Config(), ask(tmp_path), opener(FakeLLM()))
    assert (
        'coverage.png is left out: it needs pip install "penstock[plot]"' in capsys.readouterr().err
    )
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"summary.json", "report.html"} <= written and "coverage.png" not in written


def test_stopped_it_goes_on(tmp_path: Path) -> None:
    """Whatever was drawn when it was stopped, all together is what a run in one piece draws;
    nothing is asked twice."""
    run_monkeys(Config(), ask(tmp_path, out="whole"), opener(FakeLLM()))
    for stopped_at in (0, 1, 7, 20):
        out = f"stopped-{stopped_at}"
        first = FakeLLM(dies_after=stopped_at)
        with pytest.raises(
            KeyboardInterrupt, match=rf"{stopped_at} of 30 samples .*goes on from there"
        ):
            run_monkeys(Config(), ask(tmp_path, out=out), opener(first))
        second = FakeLLM()
        summary = run_monkeys(Config(), ask(tmp_path, out=out), opener(second))
        asked = sum(len(p.samples) if p.samples is not None else N for p in second.asked)
        assert asked == 30 - stopped_at == summary["speed"]["samples"]
        assert samples(tmp_path / out) == samples(tmp_path / "whole")
        assert (
            summary["coverage"]
            == json.loads((tmp_path / "whole" / "summary.json").read_text())["coverage"]
        )


def test_a_problem_of_which_some_samples_fail_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = shown_by(monkeys_room, monkeypatch)

    class Broken(FakeLLM):
        """Every other sample of the second problem fails."""

        def _samples(self, prompt: Prompt) -> list[Finished]:
            drawn = super()._samples(prompt)
            for finished in drawn[::2] if prompt.key == 1 else ():
                finished.error = "the model's logits were not finite"
            return drawn

    summary = run_monkeys(Config(), ask(tmp_path), opener(Broken()))
    assert [failed["problem"] for failed in summary["failed"]] == [1]
    rows = samples(tmp_path / "out")
    assert sorted(rows) == [(p, s) for p in range(5) for s in range(N) if p != 1 or s % 2]
    right = [sum(rows[p, s]["right"] for s in range(N)) for p in (0, 2, 3, 4)]
    assert summary["coverage"][0]["value"] == pytest.approx(sum(right) / (4 * N)), (
        "of those that have all samples"
    )
    assert [(count.name, count.done, count.total) for count in shown[0].counts] == [
        ("problems", 5, 5),
        ("samples", 5 * N, 5 * N),
    ]


def test_done_it_opens_no_model(tmp_path: Path) -> None:
    before = run_monkeys(Config(), ask(tmp_path), opener(FakeLLM()))
    unopened = FakeLLM()
    after = run_monkeys(Config(), ask(tmp_path), opener(unopened))
    assert not unopened.asked and not unopened.closed
    assert after["coverage"] == before["coverage"] and after["speed"] == before["speed"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 7}, "n: 6 there, 7 now"),
        ({"seed": 1}, "seed: 42 there, 1 now"),
        ({"limit": 3}, "limit: null there, 3 now"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, int], says: str) -> None:
    run_monkeys(Config(), ask(tmp_path), opener(FakeLLM()))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(JournalError, match=f"{says}.*name another output"):
        run_monkeys(Config(), ask(tmp_path, **change), opener(FakeLLM()))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_prompt_that_is_too_long_ends_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = make_problems(tmp_path, long=1)
    (tmp_path / "shots").mkdir()
    shots = make_problems(tmp_path / "shots", count=4)
    summary = run_monkeys(
        Config(), ask(tmp_path, problems=problems, shots=shots), opener(FakeLLM())
    )
    assert [f["problem"] for f in summary["failed"]] == [1]
    assert {problem for problem, _ in samples(tmp_path / "out")} == {0, 2, 3, 4}
    assert "row 2 was not sampled" in capsys.readouterr().out
    with pytest.raises(ContextLengthError, match="no problem could be sampled"):
        run_monkeys(
            Config(),
            ask(tmp_path, out="all", problems=problems, shots=shots, few_shot=0, limit=None),
            opener(Deaf()),
        )
    assert not (tmp_path / "all").exists()


class Deaf(FakeLLM):
    """Finds every prompt too long."""

    def _samples(self, prompt: Any) -> Any:
        prompt.prompt += "x" * CONTEXT
        return super()._samples(prompt)


def test_bad_input_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b"}\n')
    cases: list[tuple[type[PenstockError], dict[str, Any], str]] = [
        (UsageError, {"problems": str(broken)}, "row 2"),
        (UsageError, {"few_shot": 9}, "lower --few-shot"),
        (JournalError, {"out": "problems.jsonl/out"}, "cannot be made"),
        (JournalError, {"out": "problems.jsonl"}, "cannot be made"),
    ]
    for kind, change, says in cases:
        with pytest.raises(kind, match=says) as caught:
            run_monkeys(Config(), ask(tmp_path, **change), cast(OpenLLM, must_not_open))
        assert "\n" not in str(caught.value)
    for change in ({"few_shot": -1}, {"limit": 0}, {"seed": -1}):
        with pytest.raises(UsageError, match="must be at least"):
            ask(tmp_path, **change)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "problems.jsonl"]


def must_not_open(config: Config) -> None:
    raise AssertionError("the model was opened before the input was checked")


@pytest.mark.parametrize("rule", ["right", "agree:2"])
def test_problems_end_early_and_a_later_sitting_knows_what_was_answered(
    tmp_path: Path, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ask(tmp_path, n=12, stop_when=rule)
    with pytest.raises(KeyboardInterrupt):
        run_monkeys(Config(), options, opener(FakeLLM(dies_after=17)))
    summary = run_monkeys(Config(), options, opener(FakeLLM()))
    rows = samples(tmp_path / "out")
    assert len(rows) == 5 * 12
    for problem in range(5):
        mine = [row for (p, _), row in rows.items() if p == problem]
        cut = [row for row in mine if row["finish_reason"] == "abort"]
        ended = Counter(row["answer"] for row in mine if row["finish_reason"] == "stop")
        assert cut and all(
            row["answer"] is None and not row["right"] and row["token_count"] == 2 for row in cut
        )
        if rule == "right":
            assert sum(row["right"] for row in mine) == 1
        else:
            assert max(ended.values()) == 2
    assert [point["k"] for point in summary["coverage"]] == [12], (
        "of fewer samples nothing can be said"
    )
    assert summary["output_tokens"] == sum(row["token_count"] for row in rows.values())
    assert summary["settings"]["stop_when"] == rule and summary["finish_reasons"]["abort"] > 5
    assert "stopped early" in capsys.readouterr().out


def test_a_rule_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    for rule in ("first", "agree:0", "agree:", "agree:7"):
        with pytest.raises(UsageError, match="--stop-when"):
            ask(tmp_path, stop_when=rule)


@pytest.mark.parametrize(
    "change",
    [
        {"problem": 99},
        {"problem": "0"},
        {"problem": None},
        {"sample": "0"},
        {"answer": 4},
        {"token_count": "many"},
        {"finish_reason": None},
        {"right": "yes"},
        {"text": 5},
        {"prompt_tokens": []},
    ],
    ids=str,
)
def test_vouched_rows_that_no_job_wrote_are_a_line(tmp_path: Path, change: dict[str, Any]) -> None:
    """Their journal's checksums hold: they were written by its own hand, of a job whose settings
    are these."""
    options = ask(tmp_path)
    run_monkeys(Config(), options, opener(FakeLLM()))
    out = tmp_path / "out" / "samples.jsonl"
    first, rest = (
        out.read_bytes().splitlines(keepends=True)[0],
        out.read_bytes().splitlines(keepends=True)[1:],
    )
    head, *lines = journal_of(out).read_bytes().splitlines(keepends=True)
    row = json.dumps({**json.loads(first), **change}).encode() + b"\n"
    key = json.loads(lines[0].split(b" ", 3)[3])
    journal_of(out).write_bytes(b"".join([head, line_of(row, key), *lines[1:]]))
    out.write_bytes(b"".join([row, *rest]))
    before = out.read_bytes()
    with pytest.raises(JournalError, match="holds a row that no run wrote"):
        run_monkeys(Config(), options, cast(OpenLLM, must_not_open))
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "summary", ["nope", "[]", "{}", '{"speed": {}, "engine": {}}', "[" * 100_000]
)
def test_a_summary_that_no_job_wrote_is_a_line(tmp_path: Path, summary: str) -> None:
    run_monkeys(Config(), ask(tmp_path), opener(FakeLLM()))
    (tmp_path / "out" / "summary.json").write_text(summary)
    with pytest.raises(JournalError, match=r"summary\.json is no summary of a run"):
        run_monkeys(Config(), ask(tmp_path), cast(OpenLLM, must_not_open))


@pytest.mark.parametrize("name", ["samples.jsonl", "summary.json", "report.html", "coverage.png"])
def test_no_link_in_the_place_of_what_it_writes_is_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").write_text("somebody's words")
    (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalError, match="is a link: name the file"):
        run_monkeys(Config(), ask(tmp_path), cast(OpenLLM, must_not_open))
    assert (tmp_path / "elsewhere").read_text() == "somebody's words"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]

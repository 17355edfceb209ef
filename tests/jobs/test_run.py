"""`penstock run` over an LLM that computes nothing: each id exactly once, whatever happens."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_llm import CONTEXT, IN_FLIGHT, FakeLLM, Waves, sample, shown_by

from penstock import journal as journal_room
from penstock.cli import main
from penstock.config import Config
from penstock.errors import JournalError, UsageError
from penstock.jobs import run as run_room
from penstock.jobs.input_rows import LONGEST_CARRIED, LONGEST_ID, kept_columns
from penstock.jobs.open_llm import OpenLLM
from penstock.jobs.run import run_file
from penstock.llm import Finished, Prompt

pytestmark = pytest.mark.torch


def opener(llm: FakeLLM) -> OpenLLM:
    return cast(OpenLLM, lambda config: llm)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> dict[Any, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {row["id"]: row for row in rows}
    assert len(by_id) == len(rows), "an id was written twice"
    return by_id


def many(count: int) -> list[dict[str, Any]]:
    return [{"id": f"row-{i}", "prompt": f"prompt {i}", "n": 1 + i % 3} for i in range(count)]


def test_rows_in_rows_out(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "x", "n": 3, "seed": 4},
        {"id": 2, "prompt": [5, 6], "max_tokens": 9},
        {
            "id": "2",
            "messages": [{"role": "user", "content": "Hi"}],
            "chat_template_kwargs": {"x": 1},
        },
        {"id": "long", "prompt": "x" * (CONTEXT + 1)},
        {
            "custom_id": "c",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "y", "model": "gpt"},
        },
    ]
    llm = FakeLLM()
    outcome = run_file(
        write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", Config(), opener(llm)
    )
    out = read(tmp_path / "out.jsonl")
    assert set(out) == {"a", 2, "2", "long", "c"}
    expected = [sample("x", 4, i) for i in range(3)]
    assert out["a"]["outputs"] == [
        {"text": o.text, "finish_reason": o.finish_reason, "token_count": len(o.token_ids)}
        for o in expected
    ]
    assert out["long"].keys() == {"id", "error"} and "the context" in out["long"]["error"]
    assert (outcome.rows, outcome.done, outcome.failed) == (5, 5, 1)
    assert [(p.key, p.prompt, p.messages) for p in llm.asked][1:3] == [
        (2, [5, 6], None),
        ("2", None, [{"role": "user", "content": "Hi"}]),
    ]
    assert [p.chat_template_kwargs for p in llm.asked] == [None, None, {"x": 1}, None, None]
    assert llm.closed


def test_few_rows_are_in_flight(tmp_path: Path) -> None:
    llm = FakeLLM()
    run_file(write(tmp_path / "in.jsonl", many(500)), tmp_path / "out.jsonl", Config(), opener(llm))
    assert len(read(tmp_path / "out.jsonl")) == 500
    assert llm.most_in_flight <= IN_FLIGHT


def test_stopped_it_goes_on_and_done_it_rests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", many(60))
    run_file(source, tmp_path / "whole.jsonl", Config(), opener(FakeLLM()))
    with pytest.raises(KeyboardInterrupt, match=r"of 60 rows are in .*goes on from there"):
        run_file(source, tmp_path / "out.jsonl", Config(), opener(FakeLLM(dies_after=40)))
    there = set(read(tmp_path / "out.jsonl"))
    assert 0 < len(there) < 60
    second = FakeLLM()
    run_file(source, tmp_path / "out.jsonl", Config.of(max_num_seqs=3), opener(second))
    assert {p.key for p in second.asked} == {f"row-{i}" for i in range(60)} - there
    assert read(tmp_path / "out.jsonl") == read(tmp_path / "whole.jsonl")
    third = FakeLLM()
    assert run_file(source, tmp_path / "out.jsonl", Config(), opener(third)).done == 0
    assert not third.asked and not third.closed
    assert "nothing was left to do" in capsys.readouterr().err


def vouched(out: Path) -> int:
    return out.with_name(out.name + ".journal").read_bytes().count(b"\n") - 1


def test_rows_that_end_together_outlive_a_kill_in_the_next_wave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 0.3 s by the journal's clock; every sixth ends 8 rows, the others none. A kill
    finds all that ended half a second before, and none is counted that it wouldn't find."""
    source, out, killed = (
        write(tmp_path / "in.jsonl", many(24)),
        tmp_path / "out.jsonl",
        tmp_path / "killed.jsonl",
    )
    now, found, counted = [0.0], list[int](), list[int]()
    shown = shown_by(run_room, monkeypatch)

    def look() -> None:
        now[0] += 0.3
        found.append(vouched(out))
        counted.append(shown[0].counts[0].done)
        if len(found) == 8:  # amid the second wave
            for name in ("out.jsonl", "out.jsonl.journal"):
                shutil.copy(tmp_path / name, tmp_path / name.replace("out", "killed"))

    monkeypatch.setattr(journal_room, "time", SimpleNamespace(monotonic=lambda: now[0]))
    outcome = run_file(source, out, Config(), opener(Waves(8, 6, look)))
    assert [found[wave * 6 + 2] for wave in range(3)] == [8, 16, 24]
    assert counted == found, "what is counted is what is on the disk"
    assert (outcome.done, len(read(out))) == (24, 24)
    second = FakeLLM()
    run_file(source, killed, Config(), opener(second))
    assert [p.key for p in second.asked] == [f"row-{i}" for i in range(16, 24)]
    assert read(killed) == read(out)


def test_rows_that_are_refused_without_a_step_are_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of prompts may be read between two steps, and each of them may be too long."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, [{"id": i, "prompt": "x" * (CONTEXT + 1)} for i in range(6)] + many(1))
    now, found = [0.0], list[int]()

    class Stepless(FakeLLM):
        def stream(
            self, prompts: Iterable[Prompt], *, after_step: Callable[[], object]
        ) -> Iterator[Finished]:
            for prompt in prompts:
                found.append(vouched(out))
                now[0] += 0.3
                yield from self._samples(prompt)

    monkeypatch.setattr(journal_room, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run_file(source, out, Config(), opener(Stepless()))
    assert found == [0, 0, 2, 2, 4, 4, 6] and len(read(out)) == 7


def test_all_bad_rows_are_told_before_anything_runs(tmp_path: Path) -> None:
    rows = many(60)
    for i in (3, 4, 40):
        rows[i] = {"id": f"row-{i}", "prompt": "x", "temperature": -i}
    source = write(tmp_path / "in.jsonl", rows)
    with pytest.raises(UsageError) as caught:
        run_file(source, tmp_path / "out.jsonl", Config(), cast(OpenLLM, must_not_open))
    said = str(caught.value)
    assert said.startswith(
        "3 rows are bad: mend them or take them out, none was run: row 4: temperature must be"
    )
    assert "; row 5: temperature" in said and "; row 41: temperature" in said and "\n" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_what_is_refused_before_the_model_opens(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", many(3))
    run_file(source, tmp_path / "done.jsonl", Config(), opener(FakeLLM()))
    double = write(tmp_path / "double.jsonl", [*many(3), *many(1)])
    other = write(tmp_path / "other.jsonl", many(4))
    long = write(tmp_path / "long.jsonl", [{"id": "x" * (LONGEST_ID + 1), "prompt": "a"}])
    (tmp_path / "link.jsonl").symlink_to(other)
    (tmp_path / "dangling.gz").symlink_to(tmp_path / "nothing")
    before = sorted(tmp_path.iterdir())
    cases: list[tuple[type[Exception], Path, Path, Config, str]] = [
        (UsageError, double, tmp_path / "out.jsonl", Config(), "row 4: id 'row-0'"),
        (UsageError, tmp_path / "none.jsonl", tmp_path / "out.jsonl", Config(), "no file"),
        (UsageError, source, source, Config(), "is the input too"),
        (JournalError, source, tmp_path / "none" / "out.jsonl", Config(), "is no folder"),
        (JournalError, source, tmp_path, Config(), "is a folder"),
        (JournalError, source, other, Config(), "no run wrote it"),
        (
            JournalError,
            source,
            tmp_path / "link.jsonl",
            Config(),
            "is a link: name the file that it leads to",
        ),
        (
            JournalError,
            source,
            tmp_path / "dangling.gz",
            Config(),
            "is a link: name the file that it leads to",
        ),
        (UsageError, long, tmp_path / "out.jsonl", Config(), "row 1: .*id"),
        (JournalError, other, tmp_path / "done.jsonl", Config(), "input: .* there"),
        (JournalError, source, tmp_path / "done.jsonl", Config.of(seed=3), "seed: 0 there, 3 now"),
    ]
    for kind, read_from, out, config, says in cases:
        with pytest.raises(kind, match=says) as caught:
            run_file(read_from, out, config, cast(OpenLLM, must_not_open))
        assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def must_not_open(config: Config) -> None:
    raise AssertionError("the model was opened before the input was checked")


@pytest.mark.parametrize(("failed", "asked", "code"), [(0, True, 0), (2, False, 0), (2, True, 1)])
def test_fail_on_error_is_an_exit_code(
    failed: int, asked: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_room, "run_file", lambda *given: run_room.RunOutcome(5, failed=failed))
    monkeypatch.setattr(
        "sys.argv",
        [
            "penstock",
            "run",
            "in",
            "out",
            "--model",
            "demo",
            *(["--fail-on-error"] if asked else []),
        ],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == code


def test_metadata_and_kept_columns_go_through(tmp_path: Path) -> None:
    told = {"any": [1, None, {"x": "é"}]}
    rows = [
        {"id": "a", "prompt": "x", "metadata": told, "answer": 7, "n": 2},
        {"id": "long", "prompt": "x" * (CONTEXT + 1), "metadata": "text"},
        {"id": "none", "prompt": "z"},
        {
            "custom_id": "c",
            "method": "POST",
            "url": "/v1/chat/completions",
            "answer": None,
            "body": {
                "messages": [{"role": "user", "content": "y"}],
                "model": "m",
                "metadata": {"k": "v"},
            },
        },
    ]
    source, llm = write(tmp_path / "in.jsonl", rows), FakeLLM()
    run_file(source, tmp_path / "out.jsonl", Config(), opener(llm), ("prompt", "answer"))
    out = read(tmp_path / "out.jsonl")
    assert out["a"] == {
        "id": "a",
        "outputs": out["a"]["outputs"],
        "prompt": "x",
        "answer": 7,
        "metadata": told,
    }
    assert (
        out["long"].keys() == {"id", "error", "prompt", "metadata"}
        and out["long"]["metadata"] == "text"
    )
    assert out["none"].keys() == {"id", "outputs", "prompt"}
    assert out["c"].keys() == {"id", "outputs", "answer", "metadata"} and out["c"]["metadata"] == {
        "k": "v"
    }
    with pytest.raises(JournalError):  # other columns are another run
        run_file(
            source, tmp_path / "out.jsonl", Config(), opener(FakeLLM()), ("answer", "prompt", "n")
        )
    assert (
        run_file(
            source, tmp_path / "out.jsonl", Config(), opener(FakeLLM()), ("answer", "prompt")
        ).done
        == 0
    )


def test_what_cannot_go_through_is_named(tmp_path: Path) -> None:
    rows = [{"id": 1, "prompt": "x", "answer": 3}]
    source = write(tmp_path / "in.jsonl", rows)
    with pytest.raises(UsageError, match="answer"):  # as ever: an unknown field that nobody keeps
        run_file(source, tmp_path / "out.jsonl", Config(), opener(FakeLLM()))
    write(
        source,
        [{"id": 1, "prompt": "x", "metadata": "m" * (LONGEST_CARRIED - len('{"metadata": ""}'))}],
    )
    assert run_file(source, tmp_path / "fits.jsonl", Config(), opener(FakeLLM())).done == 1
    write(source, [{"id": 1, "prompt": "x", "metadata": "m" * LONGEST_CARRIED}])
    with pytest.raises(
        UsageError, match=r"row 1: metadata of this row has .* characters of JSON, and at most"
    ):
        run_file(source, tmp_path / "out.jsonl", Config(), opener(FakeLLM()))
    for told in ("id", "outputs,answer", "error", "metadata", "a,,b", ""):
        with pytest.raises(UsageError, match="--keep takes names"):
            kept_columns(told)


def test_rows_from_standard_input_and_to_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    source = write(tmp_path / "in.jsonl", many(20))
    run_file(source, tmp_path / "out.jsonl", Config(), opener(FakeLLM()))
    for data in (source.read_bytes(), gzip.compress(source.read_bytes())):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        capfdbinary.readouterr()
        outcome = run_file(Path("-"), Path("-"), Config(), opener(FakeLLM()))
        shown, said = capfdbinary.readouterr()
        (tmp_path / "shown.jsonl").write_bytes(shown)
        assert outcome.done == 20 and read(tmp_path / "shown.jsonl") == read(tmp_path / "out.jsonl")
        assert b"all 20 are in standard output" in said
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(source.read_bytes())))
    assert run_file(Path("-"), tmp_path / "out.jsonl", Config(), opener(FakeLLM())).done == 0, (
        "the same rows go on"
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(source.read_bytes())))
    with pytest.raises(KeyboardInterrupt) as stopped:
        run_file(Path("-"), Path("-"), Config(), opener(FakeLLM(dies_after=4)))
    assert "goes on" not in str(stopped.value) and "were done" in str(stopped.value)
    assert {path.name for path in tmp_path.iterdir()} == {
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.journal",
        "shown.jsonl",
    }

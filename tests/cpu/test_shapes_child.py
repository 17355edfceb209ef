"""The processes and files of `bench shapes`: what says nothing is ended, what cannot be written is one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.errors import EngineError, JournalError
from penstock.jobs import shapes_start
from penstock.jobs.shapes import Results, machine
from penstock.jobs.shapes_child import rows_of


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """For the interpreter: a script of the shell."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_rows_come_as_they_are_said_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, tmp_path, 'read line; echo "{\\"asked\\": $line, \\"of\\": \\"$2\\"}"; echo aside; echo "{}"')
    assert list(rows_of("some.module", b"[1, 2]\n", 60)) == [{"asked": [1, 2], "of": "some.module"}, {}]
    assert capsys.readouterr().err == "aside\n"


def test_a_process_that_never_takes_its_line_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, "exit 3")
    assert list(rows_of("some.module", b"x" * 1_000_000, 60)) == []


def test_a_start_that_says_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, "exec sleep 5")
    monkeypatch.setattr(shapes_start, "PATIENCE", 0.2)
    with pytest.raises(EngineError, match=r"said nothing for 0\.2 s and was ended"):
        shapes_start.first_token_seconds({"model": str(tmp_path)}, cold=False)


def test_a_start_that_ends_without_a_token_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, "exit 3")
    with pytest.raises(EngineError, match="gave no token"):
        shapes_start.first_token_seconds({"model": str(tmp_path)}, cold=True)


def test_cores_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 9}, raising=False)
    assert machine({})["cores"] == 3


def test_results_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    results = Results(tmp_path / "gone" / "results.json")
    with pytest.raises(JournalError, match="cannot be written"):
        results.put("tiny/one/llm", {})

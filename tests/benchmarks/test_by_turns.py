"""benchmarks/by_turns.py: two trees whose step benchmark says what it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_turns import SCRIPT, compared, main, measured

SAYS = """
import json, sys
print("start 0.1 s")
print(json.dumps({"rows": int(sys.argv[1]), "groups": 0, "ms": MS}))
print(json.dumps({"rows": 1, "groups": 8, "ms": 2 * MS}))
"""


def _tree(folder: Path, ms: float, says: str = SAYS) -> Path:
    (folder / "benchmarks").mkdir(parents=True)
    (folder / SCRIPT).write_text(says.replace("MS", str(ms)))
    return folder


def test_each_case_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("by_turns.HERE", _tree(tmp_path / "here", 1.1))
    assert main([str(_tree(tmp_path / "there", 1.0)), "--turns", "2", "--", "5"]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["rows", "5,", "groups", "0", "1.000", "1.100", "+10.0", "%"]
    assert second.split() == ["rows", "1,", "groups", "8", "2.000", "2.200", "+10.0", "%"]


def test_the_least_counts_and_a_case_of_one_tree_is_left_out() -> None:
    ((case, old, new, slower),) = compared(
        {"a": [3.0, 2.0], "b": [1.0]}, {"a": [4.0, 5.0], "c": [1.0]}
    )
    assert (case, old, new, slower) == ("a", 4.0, 2.0, -50.0)


def test_a_benchmark_that_fails_ends_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="failed: its words are above"):
        measured(_tree(tmp_path / "bad", 1.0, "raise SystemExit(3)"), [])

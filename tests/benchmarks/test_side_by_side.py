"""benchmarks/side_by_side.py at tiny size: an engine that is there is measured, of one that isn't a log is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import side_by_side

pytestmark = pytest.mark.torch


def test_an_engine_is_measured_and_one_that_fails_costs_itself_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise SystemExit('no GPU')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = "--shape tiny --work big --knob device=cpu --knob dtype=float32 --turns 2"
    side_by_side.main([*words.split(), "--out", str(tmp_path / "out"), "--vllm-site", str(tmp_path)])
    told = json.loads((tmp_path / "out" / "side_by_side.json").read_text())
    assert len(told["penstock"]["big"]) == 2 and min(told["penstock"]["big"]) > 0
    assert "no GPU" in (tmp_path / "out" / "vllm.log").read_text()
    printed = capsys.readouterr().out
    assert f"vllm ended with 1: {tmp_path / 'out' / 'vllm.log'}" in printed and "big" in printed
    asked = json.loads((tmp_path / "out" / "vllm.json").read_text())
    assert asked["knobs"]["max_num_seqs"] == 1024 and asked["knobs"]["device"] == "cpu"
    assert {len(ids) for ids in asked["works"][0]["prompts"]} == {4}


def test_engines_open_together_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This tree, and itself as another commit's: texts, some samples each, ended by a stop string."""
    words = "--shape tiny --work monkeys-stops --engine penstock --together --turns 2 --knob device=cpu"
    side_by_side.main([*words.split(), "--out", str(tmp_path), "--other", str(Path(side_by_side.__file__).parents[1])])
    rates = [line for line in capsys.readouterr().out.splitlines() if " monkeys-stops " in line]
    assert [line.split()[0] for line in rates] == ["penstock", "other", "other", "penstock"]
    asked = json.loads((tmp_path / "other.json").read_text())["works"][0]
    assert len(asked["sampling"]["stop"][0]) == 2 and asked["sampling"]["n"] == 8
    assert all(isinstance(prompt, str) for prompt in asked["prompts"])


def test_a_work_that_it_cannot_give_all_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="monkeys-alone is no work for several engines: take of monkeys, 128-1024, "):
        side_by_side.main(["--shape", "tiny", "--work", "big", "--work", "monkeys-alone", "--out", str(tmp_path)])

"""Batches that are killed, cut and starved of disk: every line comes out once, whole. `make reliability` does more."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from batch_faults import try_all
from batch_kills import kill_and_resume

from penstock.errors import JournalError
from penstock.server.batch_results import Outcome, Results

BATCH = "batch_" + "0" * 32


def test_killed_at_random_points_every_line_comes_out_once(tmp_path: Path) -> None:
    report = kill_and_resume(tmp_path, kills=12, lines=600, seed=3)
    assert report.statuses["in_progress"] >= 6, report.statuses
    assert (report.lost, report.doubled, report.torn) == (0, 0, 0)
    assert report.again == 0, "what is on the disk is not computed again"
    assert report.twice <= 12 * 64 * 2, "what was in flight, and no more"


def test_a_fault_at_a_touch_of_the_disk_costs_nothing(tmp_path: Path) -> None:
    faults = try_all(tmp_path, 20, every=6)
    assert all(count >= 3 for count in faults.tried.values()), faults.tried
    assert (faults.report.lost, faults.report.doubled, faults.report.torn) == (0, 0, 0)


def outcomes(count: int) -> list[Outcome]:
    body = [json.dumps({"text": "\u2028é" * (i % 7), "i": i}, ensure_ascii=False).encode() for i in range(count)]
    return [Outcome(f"row {i}", 400 if i % 5 == 0 else 200, f"req_{i}", body[i]) for i in range(count)]


def written(folder: Path, count: int) -> None:
    folder.mkdir()
    results = Results(folder, BATCH)
    for at in range(0, count, 7):
        results.put(outcomes(count)[at : at + 7])
    results.close()


def rows_of(folder: Path) -> list[str]:
    lines = (folder / "output.jsonl").read_bytes() + (folder / "errors.jsonl").read_bytes()
    assert lines.endswith(b"\n")
    return [json.loads(line)["custom_id"] for line in lines.split(b"\n")[:-1]]


@pytest.mark.parametrize("file", ["output.jsonl.journal", "errors.jsonl.journal", "output.jsonl"])
def test_cut_at_any_byte_of_its_tail_it_goes_on(tmp_path: Path, file: str) -> None:
    count, draw = 80, random.Random(file)
    written(tmp_path / "whole", count)
    size = (tmp_path / "whole" / file).stat().st_size
    journaled = file.endswith(".journal")
    for cut in sorted(draw.sample(range(1, min(size, 4096)), 60)):
        folder = tmp_path / f"{cut}"
        shutil.copytree(tmp_path / "whole", folder)
        with (folder / file).open("r+b") as torn:
            torn.truncate(size - cut)
        if not journaled:  # rows that were vouched for are gone: somebody took them, and mixing would hide it
            with pytest.raises(JournalError, match="was changed since"):
                Results(folder, BATCH)
            continue
        if b"\n" not in (folder / file).read_bytes():  # its header was synced before any row
            with pytest.raises(JournalError, match="no journal"):
                Results(folder, BATCH)
            continue
        results = Results(folder, BATCH)
        done = [outcome for outcome in outcomes(count) if results.has(outcome.custom_id)]
        assert results.completed + results.failed == len(done) < count
        results.put([outcome for outcome in outcomes(count) if not results.has(outcome.custom_id)])
        results.close()
        assert sorted(rows_of(folder)) == sorted(f"row {i}" for i in range(count))


def test_one_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    written(tmp_path / "whole", 10)
    results = Results(tmp_path / "whole", BATCH)
    results.put(outcomes(12))
    results.close()
    assert len(rows_of(tmp_path / "whole")) == 12


def test_a_folder_of_another_batch_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "whole", 10)
    with pytest.raises(JournalError, match="other settings"):
        Results(tmp_path / "whole", "batch_" + "1" * 32)

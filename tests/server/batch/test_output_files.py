"""A batch's two journals: cut at every byte of their tails, they go on; what cannot be theirs is refused.

`make reliability` cuts at every byte, `make test` at every seventh.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from fuzz_bounds import in_memory
from fuzz_inputs import SCALE

from penstock.errors import JournalError
from penstock.journal import KeySet
from penstock.server.batch.output_files import BatchOutput, LineOutcome, answered, unrun

pytestmark = pytest.mark.torch

BATCH = "batch_" + "0" * 32
FILES = ("output.jsonl.journal", "errors.jsonl.journal", "output.jsonl", "errors.jsonl")
TAIL, EVERY = 4096, 1 if SCALE > 1 else 7
COUNT = 80


def outcomes(count: int) -> list[LineOutcome]:
    body = [json.dumps({"text": "\u2028é" * (i % 7), "i": i}, ensure_ascii=False).encode() for i in range(count)]
    return [answered(f"row {i}", 400 if i % 5 == 0 else 200, f"req_{i}", body[i]) for i in range(count)]


def written(folder: Path, count: int) -> None:
    folder.mkdir()
    results = BatchOutput(folder, BATCH)
    for at in range(0, count, 7):
        results.put(outcomes(count)[at : at + 7])
    results.close()


def rows_of(folder: Path) -> list[str]:
    lines = (folder / "output.jsonl").read_bytes() + (folder / "errors.jsonl").read_bytes()
    assert lines.endswith(b"\n")
    return [json.loads(line)["custom_id"] for line in lines.split(b"\n")[:-1]]


@pytest.mark.parametrize("file", FILES)
def test_cut_at_any_byte_of_its_tail_it_goes_on(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    with in_memory() as place:
        written(place / "batch", COUNT)
        whole = {path.name: path.read_bytes() for path in (place / "batch").iterdir()}
        size = len(whole[file])
        for left in range(size - 1, max(size - TAIL, 1) - 1, -EVERY):
            for name, data in whole.items():
                (place / "batch" / name).write_bytes(data[:left] if name == file else data)
            said = refusal(file, whole[file], left)
            if said is None:
                goes_on(place / "batch")
            else:
                with pytest.raises(JournalError, match=said):
                    BatchOutput(place / "batch", BATCH)


def refusal(file: str, whole: bytes, left: int) -> str | None:
    """What is said of a file of which so many bytes are left, where it isn't taken up."""
    if not file.endswith(".journal"):
        return "was changed since"  # rows that were vouched for are gone: somebody took them
    return "no journal" if left <= whole.index(b"\n") else None  # the header was synced before any row


def goes_on(folder: Path) -> None:
    every = outcomes(COUNT)
    results = BatchOutput(folder, BATCH)
    missing = [outcome for outcome in every if not results.has(outcome.key)]
    assert results.completed + results.failed == COUNT - len(missing) < COUNT
    results.put(missing)
    results.close()
    assert sorted(rows_of(folder)) == sorted(outcome.key for outcome in every)


def test_one_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    written(tmp_path / "whole", 10)
    results = BatchOutput(tmp_path / "whole", BATCH)
    results.put(outcomes(12))
    results.close()
    assert len(rows_of(tmp_path / "whole")) == 12


def test_a_folder_of_another_batch_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "whole", 10)
    with pytest.raises(JournalError, match="other settings"):
        BatchOutput(tmp_path / "whole", "batch_" + "1" * 32)


def test_a_line_without_a_custom_id_has_its_number_for_a_key(tmp_path: Path) -> None:
    (tmp_path / "batch").mkdir()
    results = BatchOutput(tmp_path / "batch", BATCH)
    results.put([answered("7", 400, "req_7", b"{}"), unrun(7, "invalid_json_line", "line 7: no")])
    results.close()
    for _ in range(2):
        results = BatchOutput(tmp_path / "batch", BATCH)
        assert results.has(7) and results.has("7") and not results.has(8) and results.failed == 2
        results.put([unrun(7, "invalid_json_line", "line 7: no")])
        results.close()
    named, nameless = map(json.loads, (tmp_path / "batch" / "errors.jsonl").read_text().splitlines())
    assert named["custom_id"] == "7" and named["error"] is None and named["response"]["status_code"] == 400
    assert nameless.pop("id").startswith("batch_req_")
    said = {"code": "invalid_json_line", "message": "line 7: no"}
    assert nameless == {"custom_id": None, "response": None, "error": said}


def test_keys_are_found_while_another_thread_adds_some() -> None:
    keys, over = KeySet(), threading.Event()
    assert keys.add("first")

    def add() -> None:
        for number in range(60_000):
            keys.add(number)
        over.set()

    adding = threading.Thread(target=add)
    adding.start()
    while not over.is_set():
        assert "first" in keys
    adding.join()
    assert len(keys) == 60_001

"""Every line of an input comes out once, whatever it is (good, bad, without a custom_id of its own, not run since the
batch was cancelled) and whenever the server is killed: at every fourth sync, rename and transaction
(`make reliability`: at each)."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_kills import sitting
from fuzz_inputs import SCALE

from penstock.server.batch.batch_limits import BatchLimits
from penstock.server.batch.database import BatchDatabase, BatchRow, FileRow
from penstock.server.batch.file_store import new_batch_id, new_file_id
from penstock.server.batch.output_files import BatchOutput, LineResult
from penstock.server.batch.state_folder import StateFolder, opened
from penstock.server.openai.batch_line import COMPLETIONS

pytestmark = pytest.mark.torch

LINES = range(1, 41)
DONE = range(1, 5)  # before the cancel
EVERY = 1 if SCALE > 1 else 4
RATE = 1e6  # lines a second
FAST = BatchLimits(commit_seconds=0.005)


def kind(number: int) -> str:
    for every, name in ((5, "torn"), (7, "bad"), (11, "again")):
        if number % every == 0:
            return name
    return "good"


def line(number: int) -> bytes:
    if kind(number) == "torn":
        return b"{"
    body = {"model": "fake", "prompt": [number] * 3, "max_tokens": 2, "n": 0 if kind(number) == "bad" else 1}
    name = "row 1" if kind(number) == "again" else f"row {number}"
    return json.dumps({"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": body}).encode()


def make_batch(folder: Path, *, cancelled: bool) -> str:
    """One that waits in a fresh state folder; `cancelled` with DONE of its lines done."""
    with opened(folder) as state:
        assert state is not None
        draft = state.file_store.draft(file_id := new_file_id())
        draft.write(content := b"\n".join(map(line, LINES)))
        draft.keep()
        size = len(content)
        state.database.add_file(FileRow(id=file_id, owner="", created_at=0, filename="in", purpose="batch", bytes=size))
        row = BatchRow(id=new_batch_id(), owner="", created_at=0, endpoint=COMPLETIONS, input_file_id=file_id)
        state.database.add_batch(row)
        if cancelled:
            assert state.database.move(row.id, ("validating",), "in_progress", total=len(LINES), model="fake")
            results = BatchOutput(state.file_store.batch_folder(row.id), row.id)
            results.put([LineResult(f"row {number}", 200, "req", b"{}") for number in DONE])
            results.close()
            assert state.database.move(row.id, ("in_progress",), "cancelling")
        return row.id


def dies_at(touch: int) -> Callable[[], None]:
    """For a process of its own: the touch at which it is killed."""

    def stand_in_the_way() -> None:
        count = itertools.count(1)

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def touched(*values: Any, **named: Any) -> Any:
                if next(count) == touch:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*values, **named)

            return touched

        for name in ("fsync", "rename"):
            setattr(os, name, counted(getattr(os, name)))
        for name in ("move", "note", "finish"):
            setattr(BatchDatabase, name, counted(getattr(BatchDatabase, name)))

    return stand_in_the_way


def kill_everywhere(folder: Path, check: Callable[[Path, str], None], *, cancelled: bool) -> int:
    """At how many moments it was killed, each amid a batch of its own, which then came to an end that `check` likes."""
    for touch in itertools.count(1, EVERY):
        place = folder / str(touch)
        place.mkdir()
        batch_id = make_batch(place / "state", cancelled=cancelled)
        status = sitting(place / "state", batch_id, place / "log", RATE, first=dies_at(touch), limits=FAST)
        killed = os.WIFSIGNALED(status)
        assert sitting(place / "state", batch_id, place / "log", RATE, limits=FAST) == 0
        check(place / "state", batch_id)
        if not killed:
            assert status == 0
            return touch // EVERY
    raise AssertionError


def results_of(folder: Path, batch_id: str, status: str) -> tuple[dict[int, Any], dict[int, Any]]:
    """Rows of output and errors, each by its line's number; none is there twice, and the counts are theirs."""
    state = StateFolder(folder)
    try:
        row = state.database.batch(batch_id)
        assert row is not None and row.status == status
        found = []
        for file_id in (row.output_file_id, row.error_file_id):
            assert file_id is not None and state.database.file(file_id, "") is not None
            content = state.file_store.path(file_id).read_bytes()
            rows = [json.loads(each) for each in content.removesuffix(b"\n").split(b"\n")]
            numbers = [_number(each) for each in rows]
            assert len(set(numbers)) == len(numbers)
            found.append(dict(zip(numbers, rows, strict=True)))
        output, errors = found
        assert (row.total, row.completed, row.failed) == (len(LINES), len(output), len(errors))
        assert sorted([*output, *errors]) == list(LINES)
        return output, errors
    finally:
        state.close()


def _number(row: dict[str, Any]) -> int:
    if row["custom_id"] is not None:
        return int(row["custom_id"].removeprefix("row "))
    assert row["response"] is None
    return int(row["error"]["message"].split(":")[0].removeprefix("line "))


def check_bad(errors: dict[int, Any]) -> None:
    """The bad lines' rows, and no other's."""
    assert sorted(errors) == [number for number in LINES if kind(number) != "good"]
    for number, row in errors.items():
        if kind(number) == "bad":
            assert row["custom_id"] == f"row {number}" and row["response"]["status_code"] == 400
        else:
            code = "invalid_json_line" if kind(number) == "torn" else "duplicate_custom_id"
            assert row["custom_id"] is None and row["error"]["code"] == code


def check_completed(folder: Path, batch_id: str) -> None:
    output, errors = results_of(folder, batch_id, "completed")
    check_bad(errors)
    for number, row in output.items():
        assert f"line {number} " in row["response"]["body"]["choices"][0]["text"]


def check_cancelled(folder: Path, batch_id: str) -> None:
    output, errors = results_of(folder, batch_id, "cancelled")
    assert sorted(output) == list(DONE)
    unrun = {number: errors.pop(number) for number in list(errors) if kind(number) == "good"}
    assert {row["error"]["code"] for row in unrun.values()} == {"batch_cancelled"}
    assert all(row["response"] is None and "was cancelled" in row["error"]["message"] for row in unrun.values())
    check_bad(errors)


def test_of_good_and_bad_lines(tmp_path: Path) -> None:
    assert kill_everywhere(tmp_path, check_completed, cancelled=False) >= 16 // EVERY


def test_of_a_cancelled_batch(tmp_path: Path) -> None:
    assert kill_everywhere(tmp_path, check_cancelled, cancelled=True) >= 12 // EVERY

"""Batches and files as the official client uses them, over a fake engine whose every answer is
known."""

from __future__ import annotations

import errno
import itertools
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_fake import CHAT, COMPLETIONS, Batching, batching, jsonl, line
from server_fake import FakeStream, running_server

from penstock.config import Config
from penstock.errors import CapacityError, UsageError
from penstock.server.api_server.serve import serve
from penstock.server.batch import batch_job, input_file
from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.batch.state_folder import StateFolder
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Batching]:
    with batching(tokenizer, tmp_path / "state") as running:
        yield running


def test_a_batch_of_completions_runs(server: Batching) -> None:
    lines = [line(f"row-{i}", prompt=f"p{i}", n=1 + i % 3) for i in range(50)]
    batch = server.until_over(server.submit(jsonl(lines)))
    assert batch.status == "completed" and batch.errors is None and batch.error_file_id is None
    assert (
        batch.request_counts.total,
        batch.request_counts.completed,
        batch.request_counts.failed,
    ) == (50, 50, 0)
    rows = {row["custom_id"]: row for row in server.rows(batch.output_file_id)}
    assert sorted(rows) == sorted(f"row-{i}" for i in range(50))
    one = rows["row-2"]
    assert one["error"] is None and one["response"]["status_code"] == 200
    body = one["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["abc", "bcd", "cde"]
    assert body["object"] == "text_completion" and body["usage"]["completion_tokens"] == 9


def test_a_batch_of_chats_runs(server: Batching) -> None:
    batch = server.until_over(server.submit(jsonl([line("a", CHAT, n=2)]), CHAT))
    (row,) = server.rows(batch.output_file_id)
    assert [choice["message"]["content"] for choice in row["response"]["body"]["choices"]] == [
        "abc",
        "bcd",
    ]


def test_a_batch_calls_tools(server: Batching) -> None:
    pytest.importorskip("llguidance")
    server.engine.says = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": 100}
    lines = [line("a", CHAT, tool_choice="required", **tools), line("b", CHAT, **tools)]
    batch = server.until_over(server.submit(jsonl(lines), CHAT))
    (row,) = server.rows(batch.output_file_id)
    (choice,) = row["response"]["body"]["choices"]
    assert (
        choice["finish_reason"] == "tool_calls"
        and choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    )
    (refused,) = server.rows(batch.error_file_id)
    assert (
        refused["custom_id"] == "b"
        and refused["response"]["body"]["error"]["param"] == "tool_choice"
    )


def test_a_line_that_our_code_fails_at_fails_alone(
    server: Batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.fail_with = "its logits were not finite"
    batch = server.until_over(server.submit(jsonl([line("a")])))
    (row,) = server.rows(batch.error_file_id)
    assert (
        row["response"]["status_code"] == 500
        and row["response"]["body"]["error"]["code"] == "numerical_error"
    )
    server.engine.fail_with = None

    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server.engine, "submit", breaks)
    batch = server.until_over(server.submit(jsonl([line("a"), line("b")])))
    assert [
        row["response"]["body"]["error"]["code"] for row in server.rows(batch.error_file_id)
    ] == ["internal"] * 2


def test_lines_run_in_the_background_and_online_requests_do_not(server: Batching) -> None:
    server.until_over(server.submit(jsonl([line("a")])))
    server.openai.completions.create(model="fake", prompt="a")
    assert [stream.background for stream in server.engine.submitted] == [True, False]


def test_what_is_at_the_engine_is_bounded(server: Batching) -> None:
    server.running.hold(True)
    server.submit(jsonl([line(str(i), n=2) for i in range(100)]))
    server.running.wait_for(lambda: len(server.engine.open) >= 12)
    server.http.get("/health")  # the loop has turned
    assert len(server.engine.open) == 12, "16 rows and 8 sequences ahead of them, two a line"
    server.running.hold(False)


def test_a_line_larger_than_all_room_runs_alone(server: Batching) -> None:
    batch = server.until_over(server.submit(jsonl([line("a"), line("b", n=100), line("c", n=30)])))
    rows = {
        row["custom_id"]: len(row["response"]["body"]["choices"])
        for row in server.rows(batch.output_file_id)
    }
    assert rows == {"a": 1, "b": 100, "c": 30}


def test_counts_grow_and_an_end_is_expected(
    server: Batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine stops at every hundredth line until the batch was looked at."""
    engine, submit, begun = server.engine, server.engine.submit, int(time.time())

    def submitting(*asked: Any, **how: Any) -> FakeStream:
        made = submit(*asked, **how)
        if len(engine.submitted) % 100 == 0:
            engine.going.clear()
        return made

    monkeypatch.setattr(engine, "submit", submitting)
    batch_id = server.submit(jsonl([line(str(i)) for i in range(400)]))
    for submitted in (100, 200, 300, 400):
        server.running.wait_for(lambda: not engine.going.is_set())
        while True:  # 24 lines are at the engine at most
            batch = server.openai.batches.retrieve(batch_id)
            if batch.request_counts.completed >= submitted - 24:
                break
        assert batch.status == "in_progress" and batch.request_counts.completed < submitted
        assert batch.expected_at >= begun  # type: ignore[attr-defined]
        server.running.hold(False)
    assert server.until_over(batch_id).request_counts.completed == 400


def test_a_cancelled_batch_keeps_what_is_done(server: Batching) -> None:
    server.engine.step_seconds = 0.02
    batch_id = server.submit(jsonl([line(str(i)) for i in range(2000)]))
    while server.openai.batches.retrieve(batch_id).request_counts.completed < 20:
        pass
    assert server.openai.batches.cancel(batch_id).status == "cancelling"
    batch = server.until_over(batch_id)
    assert (
        batch.status == "cancelled"
        and batch.cancelling_at <= batch.cancelled_at
        and batch.completed_at is None
    )
    rows, unrun = server.rows(batch.output_file_id), server.rows(batch.error_file_id)
    assert 20 <= len(rows) == batch.request_counts.completed < 2000 == batch.request_counts.total
    assert (
        sorted(int(row["custom_id"]) for row in rows + unrun) == list(range(2000))
        and not server.engine.open
    )
    assert {(row["response"], row["error"]["code"]) for row in unrun} == {(None, "batch_cancelled")}
    assert batch.request_counts.failed == len(unrun)
    assert server.openai.batches.cancel(batch_id).status == "cancelled"


def test_a_batch_that_is_over_cannot_be_cancelled(server: Batching) -> None:
    batch_id = server.submit(jsonl([line("a")]))
    server.until_over(batch_id)
    with pytest.raises(openai.ConflictError, match="a batch that is completed cannot be cancelled"):
        server.openai.batches.cancel(batch_id)


def test_more_batches_than_run_at_once_wait_their_turn(server: Batching) -> None:
    server.running.hold(True)
    ids = [server.submit(jsonl([line("a"), line("typo", n=0)])) for _ in range(12)]
    server.running.wait_for(lambda: len(server.engine.open) == 8)
    while {(batch := server.openai.batches.retrieve(each)).status for each in ids} != {
        "in_progress"
    }:
        pass
    assert batch.errors.data[0].line == 2, "all are checked"
    assert server.until_over(server.submit(jsonl([line("typo", n=0)]))).status == "failed"
    server.openai.batches.cancel(ids[-1])
    assert server.until_over(ids[-1]).status == "cancelled"
    assert len(server.engine.open) == 8
    server.running.hold(False)
    assert [server.until_over(batch_id).status for batch_id in ids] == ["completed"] * 11 + [
        "cancelled"
    ]


def test_an_input_that_cannot_be_read_holds_a_batch_up(
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain, calls = input_file._some_lines, itertools.count()
    faults = {
        1: OSError(errno.EIO, "Input/output error"),
        4: OSError(errno.EMFILE, "Too many open files"),
    }

    def some(*values: Any) -> Any:
        if (fault := faults.get(next(calls))) is not None:
            raise fault
        return plain(*values)

    monkeypatch.setattr(input_file, "_some_lines", some)
    with batching(tokenizer, tmp_path, BatchJobLimits(read_bytes=100, first_pause=0.01)) as server:
        batch = server.until_over(server.submit(jsonl([line(str(i)) for i in range(40)])))
    assert batch.status == "completed" and batch.errors is None, (
        "what was read before the fault is no earlier line"
    )
    assert batch.request_counts.completed == 40 and next(calls) > 80
    said = capfd.readouterr().err
    assert (
        said.count(
            "waits for the state folder's disk (input/output error): see to it, and make room in"
        )
        == 1
    )
    assert f"{tmp_path} where it is full" in said
    assert said.count("goes on") == 1 and "Traceback" not in said


def test_a_batch_waits_for_its_own_model(
    tokenizer: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with batching(tokenizer, tmp_path) as first:
        first.engine.step_seconds = 0.05
        ids = [first.submit(jsonl([line(str(i)) for i in range(400)])) for _ in range(2)]
        for each in ids:
            while first.openai.batches.retrieve(each).request_counts.completed < 5:
                pass
    with batching(tokenizer, tmp_path, model="other") as second:
        of_its_own = second.until_over(second.submit(jsonl([line("a", model="other"), line("b")])))
        assert (of_its_own.model, of_its_own.request_counts.completed) == ("other", 1)
        waiting = second.openai.batches.retrieve(ids[0])
        assert (waiting.status, waiting.model, waiting.request_counts.failed) == (
            "in_progress",
            "fake",
            0,
        )
        assert waiting.waits_for == "model"  # type: ignore[attr-defined]
        second.openai.batches.cancel(ids[1])
        cancelled = second.until_over(ids[1])
        assert cancelled.request_counts.completed >= 5
        codes = {row["error"]["code"] for row in second.rows(cancelled.error_file_id)}
        assert cancelled.status == "cancelled" and codes == {"batch_cancelled"}
        assert len(second.engine.submitted) == 1
    said = capfd.readouterr().err.splitlines()
    assert [each for each in said if "waits for" in each] == [
        f"penstock: {each} waits for a server of fake" for each in ids
    ]
    with batching(tokenizer, tmp_path) as third:
        batch = third.until_over(ids[0])
        assert batch.status == "completed" and batch.error_file_id is None
        assert sorted(int(row["custom_id"]) for row in third.rows(batch.output_file_id)) == list(
            range(400)
        )
        assert len(third.engine.submitted) == 400 - waiting.request_counts.completed, (
            "what was done runs no more"
        )


def test_a_batch_that_fails_by_our_fault_leaves_its_rows(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken, batching(tokenizer, tmp_path) as server:
        broken.setattr(batch_job.BatchJob, "_finish", breaks)
        batch = server.until_over(server.submit(jsonl([line("a"), line("bad", n=0), line("b")])))
        assert batch.status == "failed" and batch.failed_at is not None
        assert [error.code for error in batch.errors.data] == ["internal", "invalid_request"]
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    with batching(tokenizer, tmp_path) as server:
        assert sorted(row["custom_id"] for row in server.rows(batch.output_file_id)) == ["a", "b"]
        assert [row["custom_id"] for row in server.rows(batch.error_file_id)] == ["bad"]
        assert server.openai.batches.retrieve(batch.id).status == "failed", "it is over"


class Panic(BaseException):
    """As a library in Rust raises it."""


def test_a_library_that_panics_at_a_line_costs_that_line(
    server: Batching,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain = tokenizer.encode_batch

    def encode(texts: list[str], **more: Any) -> list[list[int]]:
        if "panic" in texts[0]:
            raise Panic("at the tokenizer")
        return plain(texts, **more)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    lines = [
        line("a"),
        line("short", prompt="panic"),
        line("long", prompt="panic" * 2000, truncate_prompt_tokens=9),
        line("b"),
    ]
    batch = server.until_over(server.submit(jsonl(lines)))
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)
    rows = {
        row["custom_id"]: row["response"]["body"]["error"]["code"]
        for row in server.rows(batch.error_file_id)
    }
    assert rows == {"short": "internal", "long": "internal"}
    assert "Panic: at the tokenizer" in capfd.readouterr().err


def test_batches_are_listed_youngest_first(server: Batching) -> None:
    ids = [server.submit(jsonl([line("a")])) for _ in range(5)]
    listed = server.openai.batches.list(limit=2)
    assert [batch.id for batch in listed.data] == ids[::-1][:2] and listed.has_more
    assert [batch.id for batch in listed] == ids[::-1], "the client walks the pages"


def test_metadata_comes_back(server: Batching) -> None:
    file_id = server.upload(jsonl([line("a")]))
    made = server.openai.batches.create(
        input_file_id=file_id,
        endpoint=COMPLETIONS,
        completion_window="24h",
        metadata={"job": "night"},
    )
    assert (
        made.metadata == {"job": "night"}
        and made.status == "validating"
        and made.expires_at is None
    )
    assert server.openai.batches.retrieve(made.id).metadata == {"job": "night"}


CREATE = {"input_file_id": "file-" + "0" * 32, "endpoint": COMPLETIONS, "completion_window": "24h"}


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"endpoint": "/v1/responses"}, 400, "endpoint"),
        ({"endpoint": 3}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
            400,
            "output_expires_after",
        ),
        ({"priority": 1}, 400, "priority"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"metadata": {"a" * 65: ""}}, 400, "metadata"),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({}, 404, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, 404, "input_file_id"),
        ({"input_file_id": "file-" + "0" * 31 + "\u0660"}, 404, "input_file_id"),
    ],
)
def test_what_cannot_be_a_batch_is_refused(
    server: Batching, change: dict[str, object], status: int, param: str
) -> None:
    answer = server.http.post("/v1/batches", json={**CREATE, **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_an_output_is_no_input(server: Batching) -> None:
    batch = server.until_over(server.submit(jsonl([line("a")])))
    with pytest.raises(openai.BadRequestError, match="purpose is not batch"):
        server.openai.batches.create(
            input_file_id=batch.output_file_id, endpoint=COMPLETIONS, completion_window="24h"
        )


def test_without_a_state_folder_it_says_how(tokenizer: Tokenizer) -> None:
    with running_server(tokenizer) as server:
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/batches"),
            ("GET", "/v1/batches/x"),
        ):
            answer = httpx.request(method, server.url + path)
            assert answer.status_code == 404 and "--state-dir" in answer.json()["error"]["message"]


def test_a_folder_has_one_server(server: Batching, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="in use by another server"):
        StateFolder(tmp_path / "state")


def _file(folder: Path) -> None:
    folder.write_text("no folder")


def _no_database(folder: Path) -> None:
    folder.mkdir()
    (folder / "state.sqlite").write_bytes(b"no database" * 100)


def _another_version(folder: Path) -> None:
    StateFolder(folder).close()
    database = sqlite3.connect(folder / "state.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()


def _no_room_for_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "files").write_text("no folder")


@pytest.mark.parametrize("make", [_file, _no_database, _another_version, _no_room_for_files])
def test_what_is_no_state_folder_is_refused_in_one_line(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "state")
    for _ in range(2):  # the lock is let go
        with pytest.raises(UsageError, match="folder") as error:
            StateFolder(tmp_path / "state")
        assert "\n" not in str(error.value) and error.value.param == "state_dir"


def test_a_folder_of_other_things_is_refused_untouched(tmp_path: Path) -> None:
    folder = tmp_path / "mydocs"
    folder.mkdir()
    for name in (".hidden", "lost+found"):
        (folder / name).write_text("harmless")
    StateFolder(folder).close()  # a disk of its own
    (folder / "beside.txt").write_text("of whoever runs it")
    StateFolder(folder).close()
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match=r"holds other things \(letter.txt\)") as error:
        StateFolder(other)
    assert error.value.param == "state_dir" and [each.name for each in other.iterdir()] == [
        "letter.txt"
    ]


def test_several_servers_keep_no_state(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave --state-dir or --api-server-count out"):
        serve(Config.of(model="demo"), port=0, api_server_count=2, state_dir=tmp_path)


def test_files_belong_to_their_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = gather_keys(["first", "second"], None, {})
    with batching(tokenizer, tmp_path, access=AccessPolicy(keys=keys)) as server:
        first = server.openai.with_options(api_key="first")
        second = server.openai.with_options(api_key="second")
        file_id = first.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch").id
        made = first.batches.create(
            input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h"
        )
        assert first.files.retrieve(file_id).id == file_id
        assert list(second.files.list()) == list(second.batches.list()) == []
        for behind in (
            partial(second.files.list, after=file_id),
            partial(second.batches.list, after=made.id),
        ):
            with pytest.raises(openai.NotFoundError, match="list from the start again"):
                behind()
        assert first.files.list(after=file_id).data == first.batches.list(after=made.id).data == []
        with pytest.raises(openai.NotFoundError):
            second.files.content(file_id)
        with pytest.raises(openai.NotFoundError):
            second.batches.cancel(made.id)
        with pytest.raises(openai.NotFoundError):
            second.batches.create(
                input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h"
            )

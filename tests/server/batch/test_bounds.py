"""What one owner may leave here: batches, files, errors. What answers of batches may take of
memory: their own room, which costs no line its outcome; and how few of their texts are tokenised at
once."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_fake import COMPLETIONS, Batching, StuckDisk, batching, jsonl, line

from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.batch.line_request import PREPARED_AT_ONCE
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy
from penstock.server.online.buffered import AnswerTooLargeError, ResponseBudget
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

LIMITS = BatchJobLimits(max_unfinished=3, max_files=6)


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Batching]:
    with batching(tokenizer, tmp_path / "state", LIMITS) as running:
        yield running


def create(client: openai.OpenAI, file_id: str) -> str:
    return client.batches.create(
        input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h"
    ).id


def test_unfinished_batches_of_an_owner_are_bounded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with batching(tokenizer, tmp_path, LIMITS) as server:
        server.running.hold(True)
        file_id = server.upload(jsonl([line("a")]))
        ids = [create(server.openai, file_id) for _ in range(3)]
        with pytest.raises(openai.RateLimitError, match="cancel one") as refused:
            create(server.openai, file_id)
        assert refused.value.code == "too_many_batches"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
        assert len(list(server.openai.batches.list())) == 3
        server.openai.batches.cancel(ids[0])
        server.until_over(ids[0])
        create(server.openai, file_id)
    with batching(
        tokenizer, tmp_path, LIMITS, model="another"
    ) as server:  # what was left counts, while it waits
        with pytest.raises(openai.RateLimitError):
            create(server.openai, file_id)
        server.openai.batches.cancel(ids[1])
        server.until_over(ids[1])
        create(server.openai, file_id)


def test_another_keys_owner_has_bounds_of_its_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    limits, access = (
        BatchJobLimits(max_unfinished=1, max_files=1),
        AccessPolicy(keys=gather_keys(["one", "two"], None, {})),
    )
    with batching(tokenizer, tmp_path, limits, access=access) as server:
        server.running.hold(True)
        for key in ("one", "two"):
            client = server.openai.with_options(api_key=key)
            file_id = client.files.create(file=("in", jsonl([line("a")])), purpose="batch").id
            create(client, file_id)
            with pytest.raises(openai.RateLimitError):
                create(client, file_id)
            with pytest.raises(openai.BadRequestError, match="delete some"):
                client.files.create(file=("in", b""), purpose="batch")
        server.running.hold(False)


def test_files_of_an_owner_are_bounded(server: Batching, tmp_path: Path) -> None:
    ids = [server.upload(b"") for _ in range(6)]
    with pytest.raises(openai.BadRequestError, match="delete some") as refused:
        server.upload(b"")
    assert refused.value.code == "too_many_files"
    assert sorted(os.listdir(tmp_path / "state" / "files")) == sorted(ids)
    server.openai.files.delete(ids[0])
    server.upload(b"")


def test_results_count_and_are_never_refused(server: Batching) -> None:
    batch = server.until_over(server.submit(jsonl([line("a"), line("b", prompt="x" * 300)])))
    assert batch.output_file_id and batch.error_file_id
    for _ in range(2):
        server.upload(b"")
    last = server.submit(jsonl([line("a")]))
    batch = server.until_over(last)
    assert (
        len(server.rows(batch.output_file_id)) == 1 and len(list(server.openai.files.list())) == 7
    )
    with pytest.raises(openai.BadRequestError):
        server.upload(b"")


def test_of_uploads_that_come_together_too_many_are_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    part = (
        b'--e\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        + b"x" * 2_000_000
    )
    rest = b'\r\n--e\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--e--\r\n'
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data;"
        f" boundary=e\r\nContent-Length: {len(part) + len(rest)}\r\n\r\n"
    )
    files = tmp_path / "state" / "files"
    with batching(tokenizer, tmp_path / "state", BatchJobLimits(max_files=1)) as server:
        address = server.url.removeprefix("http://").split(":")
        connections = [
            socket.create_connection((address[0], int(address[1])), timeout=600) for _ in range(3)
        ]
        for connection in connections:
            connection.sendall(head.encode() + part)
        server.running.wait_for(lambda: len(os.listdir(files)) == 3)
        statuses = []
        for connection in connections:
            connection.sendall(rest)
            statuses.append(connection.recv(4096).split(b" ")[1])
            connection.close()
        assert statuses == [b"200", b"400", b"400"] and len(os.listdir(files)) == 1


def bad_lines(count: int) -> bytes:
    return jsonl([line("good"), *(line(str(number), n=0) for number in range(count))])


def test_a_batchs_errors_are_bounded_in_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with batching(tokenizer, tmp_path, BatchJobLimits(max_error_bytes=2_000)) as server:
        errors = server.until_over(server.submit(bad_lines(100))).errors.data
        *told, last = errors
        assert 5 < len(told) < 2_000 // 40 and [error.line for error in told] == list(
            range(2, 2 + len(told))
        )
        assert last.code == "more_errors" and last.line == 2 + len(told)
        assert last.message == f"more lines are bad, {100 - len(told)} of them: {2 + len(told)}-101"


def test_files_stay_their_keys_whatever_keys_come_and_go(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def seen(keys: list[str]) -> dict[str, list[str]]:
        access = AccessPolicy(keys=gather_keys(keys, None, {}))
        with batching(tokenizer, tmp_path, access=access) as server:
            clients = {key: server.openai.with_options(api_key=key) for key in keys}
            return {
                key: [file.filename for file in client.files.list()]
                for key, client in clients.items()
            }

    with batching(
        tokenizer, tmp_path, access=AccessPolicy(keys=gather_keys(["a", "b"], None, {}))
    ) as server:
        for key in ("a", "b"):
            server.openai.with_options(api_key=key).files.create(
                file=(f"{key}'s", b""), purpose="batch"
            )
    assert seen(["a", "b"]) == {"a": ["a's"], "b": ["b's"]}
    assert seen(["b"]) == {"b": ["b's"]}, "a was revoked"
    assert seen(["c", "b", "a"]) == {"a": ["a's"], "b": ["b's"], "c": []}


# --- room of answers and texts


BODY = {"max_tokens": 200, "logprobs": 5}


@pytest.fixture(scope="module")
def size(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of an answer to BODY, about."""
    with batching(tokenizer, tmp_path_factory.mktemp("state")) as server:
        batch = server.until_over(server.submit(jsonl([line("a", **BODY)])))
        return len(server.openai.files.content(batch.output_file_id).content)


@contextlib.contextmanager
def with_room(tokenizer: Tokenizer, folder: Path, room: float) -> Iterator[Batching]:
    with batching(
        tokenizer, folder, server_limits=HttpLimits(max_answer_bytes=int(room))
    ) as server:
        yield server
        assert answers_of(server).bytes == answers_of(server).kept.bytes == 0


def answers_of(server: Batching) -> ResponseBudget:
    return server.manager.shared.lines.answers


def test_answers_that_find_no_room_beside_others_are_made_again(
    tokenizer: Tokenizer, tmp_path: Path, size: int
) -> None:
    with with_room(tokenizer, tmp_path, 1.6 * size) as server:
        server.running.hold(True)
        batch_id = server.submit(jsonl([line(str(number), **BODY) for number in range(8)]))
        server.running.wait_for(lambda: len(server.engine.open) == 8)
        server.running.hold(False)
        batch = server.until_over(batch_id)
        assert batch.status == "completed" and batch.error_file_id is None
        assert sorted(int(row["custom_id"]) for row in server.rows(batch.output_file_id)) == list(
            range(8)
        )
        assert len(server.engine.submitted) > 8


def test_one_that_is_too_large_alone_is_the_only_one_refused(
    tokenizer: Tokenizer, tmp_path: Path, size: int
) -> None:
    lines = [line(str(number), **BODY) for number in range(6)] + [line("large", **{**BODY, "n": 3})]
    with with_room(tokenizer, tmp_path, 1.6 * size) as server:
        batch = server.until_over(server.submit(jsonl(lines[::-1])))
        (row,) = server.rows(batch.error_file_id)
        assert (row["custom_id"], row["response"]["status_code"]) == ("large", 400)
        assert row["response"]["body"]["error"]["code"] == "answer_too_large"
        assert batch.request_counts.completed == 6


def test_what_waits_for_the_disk_is_bounded_and_comes_out_whole(
    tokenizer: Tokenizer, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = StuckDisk(monkeypatch)
    with with_room(tokenizer, tmp_path, 6 * size) as server:
        batch_id = server.submit(jsonl([line(str(number), **BODY) for number in range(30)]))
        answers = answers_of(server)
        server.running.wait_for(
            lambda: disk.writing.is_set() and answers.kept.bytes > answers.most // 2
        )
        server.running.wait_for(lambda: not server.engine.open)
        asked = len(server.engine.submitted)
        assert answers.most // 2 < answers.kept.bytes == answers.bytes <= answers.most
        assert (
            server.http.get("/health").status_code == 200
            and len(server.engine.submitted) == asked < 30
        )
        disk.going.set()
        batch = server.until_over(batch_id)
        assert batch.error_file_id is None and len(server.rows(batch.output_file_id)) == 30


def test_what_is_kept_is_never_given_up() -> None:
    wholes = ResponseBudget(100)
    with wholes.hold([b""]) as begun, wholes.hold([b"x" * 30]) as written:
        wholes.kept.add(60)
        assert not written.given_up
        wholes.kept.add(30)
        assert (
            written.given_up
            and not begun.given_up
            and (wholes.kept.bytes, wholes.bytes) == (90, 90)
        )
        wholes.kept.add(30)
        assert not begun.given_up, "that would make no room"
        with pytest.raises(AnswerTooLargeError):
            begun.put(0, b"x")
    wholes.kept.add(-120)
    assert wholes.kept.bytes == wholes.bytes == 0


def test_few_texts_of_batches_are_tokenised_at_once_and_online_ones_do_not_wait(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, going, begun = tokenizer.encode_batch, threading.Event(), []

    def encode(texts: Sequence[str], **more: Any) -> list[list[int]]:
        if texts[0].startswith("batch"):
            begun.append(texts)
            assert going.wait(600)
        return plain(["ab"] if len(texts[0]) > 1000 else texts, **more)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    with batching(tokenizer, tmp_path, max_model_len=100_000) as server:
        ids = [server.submit(jsonl([line("a", prompt="batch" * 1000)])) for _ in range(8)]
        # one sandbox is left to others
        at_once = min(PREPARED_AT_ONCE, server.running.service.turns.long.capacity[0])
        server.running.wait_for(lambda: len(begun) == at_once)
        for each in ids:
            while server.openai.batches.retrieve(each).status != "in_progress":
                pass
        body = {"model": "fake", "prompt": "online" * 1000, "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).status_code == 200
        assert len(begun) == at_once
        going.set()
        assert {server.until_over(each).request_counts.completed for each in ids} == {1}

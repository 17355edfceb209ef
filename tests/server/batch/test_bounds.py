"""What one owner may leave here: batches, files, uploads, errors; and how much of lines of many samples is at work."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from batch_fake import COMPLETIONS, Batching, batching, jsonl, line

from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

LIMITS = BatchJobLimits(max_unfinished=3, max_files=6)


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Batching]:
    with batching(tokenizer, tmp_path / "state", LIMITS) as running:
        yield running


def create(client: openai.OpenAI, file_id: str) -> str:
    return client.batches.create(input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h").id


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
    with batching(tokenizer, tmp_path, LIMITS, model="another") as server:  # what was left counts, while it waits
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
    assert len(server.rows(batch.output_file_id)) == 1 and len(list(server.openai.files.list())) == 7
    with pytest.raises(openai.BadRequestError):
        server.upload(b"")


def test_of_uploads_that_come_together_too_many_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    part = b'--e\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 2_000_000
    rest = b'\r\n--e\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--e--\r\n'
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=e\r\n"
        f"Content-Length: {len(part) + len(rest)}\r\n\r\n"
    )
    files = tmp_path / "state" / "files"
    with batching(tokenizer, tmp_path / "state", BatchJobLimits(max_files=1)) as server:
        address = server.url.removeprefix("http://").split(":")
        connections = [socket.create_connection((address[0], int(address[1])), timeout=30) for _ in range(3)]
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
        assert 5 < len(told) < 2_000 // 40 and [error.line for error in told] == list(range(2, 2 + len(told)))
        assert last.code == "more_errors" and last.line == 2 + len(told)
        assert last.message == f"more lines are bad, {100 - len(told)} of them: {2 + len(told)}-101"


def test_files_stay_their_keys_whatever_keys_come_and_go(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def seen(keys: list[str]) -> dict[str, list[str]]:
        access = AccessPolicy(keys=gather_keys(keys, None, {}))
        with batching(tokenizer, tmp_path, access=access) as server:
            clients = {key: server.openai.with_options(api_key=key) for key in keys}
            return {key: [file.filename for file in client.files.list()] for key, client in clients.items()}

    with batching(tokenizer, tmp_path, access=AccessPolicy(keys=gather_keys(["a", "b"], None, {}))) as server:
        for key in ("a", "b"):
            server.openai.with_options(api_key=key).files.create(file=(f"{key}'s", b""), purpose="batch")
    assert seen(["a", "b"]) == {"a": ["a's"], "b": ["b's"]}
    assert seen(["b"]) == {"b": ["b's"]}, "a was revoked"
    assert seen(["c", "b", "a"]) == {"a": ["a's"], "b": ["b's"], "c": []}

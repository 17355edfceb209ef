"""What answers of batches may take of memory: their own room, which costs no line its outcome; and how few of their
texts are tokenised at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_fake import Batching, StuckDisk, batching, jsonl, line

from penstock.server.batch.line_request import PREPARED_AT_ONCE
from penstock.server.online.buffered import AnswerTooLargeError, ResponseBudget
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

BODY = {"max_tokens": 200, "logprobs": 5}


@pytest.fixture(scope="module")
def size(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of an answer to BODY, about."""
    with batching(tokenizer, tmp_path_factory.mktemp("state")) as server:
        batch = server.until_over(server.submit(jsonl([line("a", **BODY)])))
        return len(server.openai.files.content(batch.output_file_id).content)


@contextlib.contextmanager
def with_room(tokenizer: Tokenizer, folder: Path, room: float) -> Iterator[Batching]:
    with batching(tokenizer, folder, server_limits=HttpLimits(max_answer_bytes=int(room))) as server:
        yield server
        assert answers_of(server).bytes == answers_of(server).kept == 0


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
        assert sorted(int(row["custom_id"]) for row in server.rows(batch.output_file_id)) == list(range(8))
        assert len(server.engine.submitted) > 8


def test_one_that_is_too_large_alone_is_the_only_one_refused(tokenizer: Tokenizer, tmp_path: Path, size: int) -> None:
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
        server.running.wait_for(lambda: disk.writing.is_set() and answers.kept > answers.most // 2)
        server.running.wait_for(lambda: not server.engine.open)
        asked = len(server.engine.submitted)
        assert answers.most // 2 < answers.kept == answers.bytes <= answers.most
        assert server.http.get("/health").status_code == 200 and len(server.engine.submitted) == asked < 30
        disk.going.set()
        batch = server.until_over(batch_id)
        assert batch.error_file_id is None and len(server.rows(batch.output_file_id)) == 30


def test_what_is_kept_is_never_given_up() -> None:
    wholes = ResponseBudget(100)
    with wholes.hold([b""]) as begun, wholes.hold([b"x" * 30]) as written:
        wholes.keep(60)
        assert not written.given_up
        wholes.keep(30)
        assert written.given_up and not begun.given_up and (wholes.kept, wholes.bytes) == (90, 90)
        wholes.keep(30)
        assert not begun.given_up, "that would make no room"
        with pytest.raises(AnswerTooLargeError):
            begun.put(0, b"x")
    wholes.let_go(120)
    assert wholes.kept == wholes.bytes == 0


def test_few_texts_of_batches_are_tokenised_at_once_and_online_ones_do_not_wait(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, going, begun = tokenizer.encode_batch, threading.Event(), []

    def encode(texts: Sequence[str], **more: Any) -> list[list[int]]:
        if texts[0].startswith("batch"):
            begun.append(texts)
            assert going.wait(60)
        return plain(["ab"] if len(texts[0]) > 1000 else texts, **more)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    with batching(tokenizer, tmp_path, max_model_len=100_000) as server:
        ids = [server.submit(jsonl([line("a", prompt="batch" * 1000)])) for _ in range(8)]
        server.running.wait_for(lambda: len(begun) == PREPARED_AT_ONCE)
        for each in ids:
            while server.openai.batches.retrieve(each).status != "in_progress":
                pass
        body = {"model": "fake", "prompt": "online" * 1000, "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200
        assert len(begun) == PREPARED_AT_ONCE
        going.set()
        assert {server.until_over(each).request_counts.completed for each in ids} == {1}

"""Batches and files as the official client uses them, over a fake engine whose every answer is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_fake import CHAT, Batching, batching, jsonl, line
from server_fake import make_tokenizer

from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Batching]:
    with batching(tokenizer, tmp_path / "state") as running:
        yield running


def test_a_batch_of_completions_runs(server: Batching) -> None:
    lines = [line(f"row-{i}", prompt=f"p{i}", n=1 + i % 3) for i in range(50)]
    batch = server.until_over(server.submit(jsonl(lines)))
    assert batch.status == "completed" and batch.errors is None and batch.error_file_id is None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (50, 50, 0)
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
    assert [choice["message"]["content"] for choice in row["response"]["body"]["choices"]] == ["abc", "bcd"]

"""A server with files and batches over the fake engine, and small words for tests of both.

A batch's state folder outlives a server: tests open it again with the next one.
"""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
from openai import OpenAI
from server_fake import Running, running_server

from penstock import journal
from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.batch.manager import BatchManager
from penstock.server.batch.state_folder import opened
from penstock.server.online.app_state import AppState
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.tokenizer import Tokenizer

OVER = ("completed", "failed", "cancelled")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


PATIENT = dict.fromkeys(
    ("death_notice", "flush_seconds", "flush_seconds_dead", "flush_seconds_hurried"), 600.0
)
# Pauses are short, and an end waits for a disk that is slow.
QUICK = BatchJobLimits(commit_seconds=0.01, first_pause=0.01, **PATIENT)  # type: ignore[arg-type]


class Batching:
    """A running server, and the official client of it."""

    def __init__(self, running: Running, manager: BatchManager) -> None:
        self.running, self.engine, self.url, self.manager = (
            running,
            running.engine,
            running.url,
            manager,
        )
        self.openai = OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0)
        self.http = httpx.Client(base_url=running.url, timeout=600)

    def upload(self, content: bytes, name: str = "in.jsonl") -> str:
        return self.openai.files.create(file=(name, content), purpose="batch").id

    def submit(self, content: bytes, endpoint: str = COMPLETIONS) -> str:
        file_id = self.upload(content)
        made = self.openai.batches.create(
            input_file_id=file_id, endpoint=endpoint, completion_window="24h"
        )
        return made.id

    def until_over(self, batch_id: str) -> Any:
        while (batch := self.openai.batches.retrieve(batch_id)).status not in OVER:
            time.sleep(0.01)
        return batch

    def rows(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = self.openai.files.content(file_id).content
        assert content.endswith(b"\n")
        return [json.loads(line) for line in content.split(b"\n")[:-1]]


@contextlib.contextmanager
def batching(
    tokenizer: Tokenizer | None,
    folder: Path,
    limits: BatchJobLimits = QUICK,
    server_limits: HttpLimits | None = None,
    model: str = "fake",
    held: bool = False,
    **facts: Any,
) -> Iterator[Batching]:
    """Goes on with what is in the folder; ends as a server does that was told to. model: the served
    name. held: the engine gives nothing until it is told to."""
    made: list[BatchManager] = []

    def manage(service: AppState) -> BatchManager:
        assert state is not None
        service.model = model
        made.append(BatchManager(service, state, limits))
        return made[0]

    with (
        opened(folder) as state,
        running_server(tokenizer, limits=server_limits, batches=manage, **facts) as running,
    ):
        running.hold(held)
        running.on_loop(made[0].go_on())
        try:
            yield Batching(running, made[0])
        finally:
            running.on_loop(made[0].end())


class StuckDisk:
    """A disk that doesn't answer where a batch's rows are written, until `going` is set. writers:
    threads that wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing, self.going = threading.Event(), threading.Event()
        self.writers: set[int] = set()
        self._plain = journal._write
        monkeypatch.setattr(journal, "_write", self._write)

    def _write(self, file: BinaryIO, data: bytes) -> None:
        if b"custom_id" in data:
            self.writers.add(threading.get_ident())
            self.writing.set()
            assert self.going.wait(600)
        self._plain(file, data)


class StuckRead(io.RawIOBase):
    """A file behind whose content the disk answers no read, until `going` is set."""

    def __init__(self, content: bytes = b"") -> None:
        self.reading, self.going = threading.Event(), threading.Event()
        self._content = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        size = self._content.readinto(room)
        if not size:
            self.reading.set()
            assert self.going.wait(600)
        return size

    def buffered(self) -> io.BufferedReader:
        return io.BufferedReader(self)


def points(folder: Path, batch_id: str) -> dict[int, int]:
    """What a batch remembers of engines that died: what that says against its lines, by their
    numbers."""
    with contextlib.closing(sqlite3.connect(folder / "state.sqlite")) as database:
        (kept,) = database.execute(
            "SELECT suspects FROM batches WHERE id = ?", (batch_id,)
        ).fetchone()
        return (
            {}
            if kept is None
            else {int(number): count for number, count in json.loads(kept).items()}
        )


def note_points(folder: Path, batch_id: str, points: dict[int, int]) -> None:
    """Between two servers: as if the engine had died while those lines were there."""
    with contextlib.closing(sqlite3.connect(folder / "state.sqlite")) as database, database:
        database.execute(
            "UPDATE batches SET suspects = ? WHERE id = ?", (json.dumps(points), batch_id)
        )


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = {"model": "fake", "max_tokens": 3, **body}
    if url == COMPLETIONS:
        body.setdefault("prompt", "a")
    else:
        body.setdefault("messages", [{"role": "user", "content": "a"}])
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in lines)

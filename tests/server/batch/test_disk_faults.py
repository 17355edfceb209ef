"""Files on a disk that is full or fails: each answer is one of ours, nothing stays out of sight,
the next one works."""

from __future__ import annotations

import errno
import io
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_fake import COMPLETIONS, Batching, batching, jsonl, line

from penstock.server.batch import file_store
from penstock.server.batch.database import BatchDatabase
from penstock.server.batch.files import WRITE_BYTES
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

CONTENT = b"x" * ((2 << 20) + 17)
UPLOADED = b"x" * (5 * WRITE_BYTES + 17)


@pytest.fixture
def server(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Batching]:
    """Behind it: no fault was our code's."""
    with caplog.at_level(logging.ERROR), batching(tokenizer, tmp_path / "state") as running:
        yield running
    assert not [
        record
        for record in caplog.get_records("call")
        if "Exception in ASGI" in record.getMessage()
    ]


class Disk:
    """Counts what an upload asks of the disk, and fails at the `at`-th of it; if it `stays`, at
    what follows too."""

    def __init__(self) -> None:
        self.count = self.at = 0
        self.error = errno.ENOSPC
        self.stays = False

    def fail(self, at: int, error: int, stays: bool) -> None:
        self.count, self.at, self.error, self.stays = 0, at, error, stays

    def __call__(self, call: Callable[..., Any], *values: Any, **named: Any) -> Any:
        self.count += 1
        if self.at and (self.count == self.at or (self.stays and self.count > self.at)):
            raise OSError(self.error, os.strerror(self.error))
        return call(*values, **named)

    def add_file(self, plain: Callable[..., None], *values: Any) -> None:
        try:
            self(plain, *values)
        except OSError as error:
            raise sqlite3.OperationalError("database or disk is full") from error


class Os:
    """os, some of whose calls are the disk's."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        return partial(self._disk, call) if name in ("fsync", "rename", "open") else call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made, add_file = Disk(), BatchDatabase.add_file

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            written: int = made(super().write, data)
            return written

    def opened(path: Path, mode: str, buffering: int = -1, **named: Any) -> Any:
        return open(path, mode, **named) if buffering else made(File, path, mode.replace("b", ""))

    monkeypatch.setattr(file_store, "open", opened, raising=False)
    monkeypatch.setattr(file_store, "os", Os(made))
    monkeypatch.setattr("penstock.disk.os", Os(made))  # folders are synced there
    monkeypatch.setattr(BatchDatabase, "add_file", lambda *values: made.add_file(add_file, *values))
    return made


def on_disk(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "state" / "files"))


def post(server: Batching, content: bytes = CONTENT, purpose: str = "batch") -> httpx.Response:
    return server.http.post(
        "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": purpose}
    )


def is_the_disks(answer: httpx.Response, tmp_path: Path) -> bool:
    error = answer.json()["error"]
    told = (answer.status_code, error["type"], error["code"]) == (507, "server_error", "storage")
    return told and "\n" not in error["message"] and str(tmp_path) not in answer.text


@pytest.mark.parametrize(
    ("error", "stays"), [(errno.ENOSPC, True), (errno.EIO, False), (errno.EMFILE, False)]
)
def test_an_upload_is_whole_or_leaves_nothing(
    server: Batching, disk: Disk, tmp_path: Path, error: int, stays: bool
) -> None:
    kept = [server.upload(UPLOADED)]
    touches = disk.count
    assert touches == 13, (
        "opened, six times written, twice synced, named, the folder opened and synced, its row"
    )
    for at in range(1, touches + 1):
        disk.fail(at, error, stays)
        answer = post(server, UPLOADED)
        assert is_the_disks(answer, tmp_path), (at, answer.text)
        assert on_disk(tmp_path) == sorted(kept), at
        disk.fail(0, error, stays)
        if at % 3 == 0:
            kept.append(server.upload(UPLOADED))
            assert disk.count == touches
    assert [file.id for file in server.openai.files.list()] == kept[::-1]
    assert all(server.openai.files.content(file_id).content == UPLOADED for file_id in kept)


def test_what_cannot_be_taken_away_goes_at_the_next_start(
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fails(path: Path, missing_ok: bool = False) -> None:
        if path.exists() and path.parent.name == "files":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with batching(tokenizer, tmp_path / "state") as server:
        deleted, kept = server.upload(b"deleted"), server.upload(b"kept")
        with monkeypatch.context() as broken:
            broken.setattr(Path, "unlink", fails)
            assert server.openai.files.delete(deleted).deleted
            assert post(server, purpose="fine-tune").status_code == 400, (
                "its own answer, not the disk's"
            )
        assert server.http.get(f"/v1/files/{deleted}").status_code == 404
    left = [name for name in on_disk(tmp_path) if name != kept]
    assert len(left) == 2 and f"{deleted}.part" in left
    said = capfd.readouterr().err
    assert all(
        f"penstock: {name} stays in the state folder until the next start" in said for name in left
    ), said
    with batching(tokenizer, tmp_path / "state") as server:
        assert on_disk(tmp_path) == [kept] and server.openai.files.content(kept).content == b"kept"


@pytest.mark.parametrize("good", [None, 1 << 20], ids=["opened", "read"])
@pytest.mark.parametrize("cut", [False, True])
def test_content_that_the_disk_does_not_give(
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    good: int | None,
    cut: bool,
) -> None:
    """One that can't be opened is refused; one that fails, or is cut, on its way breaks off: by its
    length that is known."""

    class Broken(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:  # type: ignore[override]
            if good is not None and self.tell() >= good:
                if cut:
                    return 0
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().readinto(memoryview(buffer)[:good])

    def open_file(path: Path, mode: str, *rest: Any, **named: Any) -> Any:
        if mode != "rb":
            return open(path, mode, *rest, **named)
        if good is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return io.BufferedReader(Broken(path))

    with batching(tokenizer, tmp_path / "state") as server:
        file_id = server.upload(CONTENT)
        with monkeypatch.context() as broken:
            broken.setattr(file_store, "open", open_file, raising=False)
            if good is None:
                assert is_the_disks(server.http.get(f"/v1/files/{file_id}/content"), tmp_path)
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    server.http.get(f"/v1/files/{file_id}/content")
        assert server.openai.files.content(file_id).content == CONTENT


def test_a_database_that_fails_is_said_so(
    server: Batching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = server.upload(jsonl([line("a")]))
    batch_id = server.submit(jsonl([line("a")]))
    server.until_over(batch_id)
    asked = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    requests: list[tuple[str, str, Any]] = [
        ("GET", "/v1/files", None),
        ("GET", f"/v1/files/{file_id}", None),
        ("DELETE", f"/v1/files/{file_id}", None),
        ("GET", f"/v1/files/{file_id}/content", None),
        ("POST", "/v1/batches", asked),
        ("GET", "/v1/batches", None),
        ("GET", f"/v1/batches/{batch_id}", None),
        ("POST", f"/v1/batches/{batch_id}/cancel", None),
    ]

    def fails(*_: Any, **__: Any) -> Any:
        raise sqlite3.OperationalError("disk I/O error")

    for broken in (("_one", "_page"), ("_insert", "_count", "user_of", "move")):
        with monkeypatch.context() as patch:
            for name in broken:
                patch.setattr(BatchDatabase, name, fails)
            for method, path, body in requests:
                answer = server.http.request(method, path, json=body)
                assert answer.status_code == 200 or is_the_disks(answer, tmp_path), (
                    method,
                    path,
                    answer.text,
                )
                writes = method in ("POST", "DELETE")
                assert answer.status_code == (507 if broken[0] == "_one" or writes else 200), (
                    method,
                    path,
                )
    assert (
        len(list(server.openai.batches.list())) == 1
        and server.openai.files.retrieve(file_id).id == file_id
    )

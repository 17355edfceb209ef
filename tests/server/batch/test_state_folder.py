"""A state folder that somebody laid hands on: an older database put back, contents cut, changed,
replaced by links. Nothing is thrown away unknown, and nothing is answered or computed as if it were
whole."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from batch_fake import Batching, batching, jsonl, line

from penstock.server.batch import batch_job
from penstock.server.batch.file_store import new_batch_id, new_file_id
from penstock.server.batch.state_folder import StateFolder
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

LINES = [line(str(number)) for number in range(400)]


# --- what a start finds and doesn't know


def put_back(folder: Path, database: Path) -> None:
    for name in ("state.sqlite-wal", "state.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    shutil.copy(database, folder / "state.sqlite")


def contents(folder: Path) -> dict[str, bytes]:
    """By their paths in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_database_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask; one that an earlier release made is closed to others."""
    folder = tmp_path / "state"
    folder.mkdir()
    umask = os.umask(0)
    try:
        for _ in range(2):
            state = StateFolder(folder)
            parts = [*folder.glob("state.sqlite*")]
            assert len(parts) == 3 and {stat.S_IMODE(part.stat().st_mode) for part in parts} == {
                0o600
            }
            state.close()
            (folder / "state.sqlite").chmod(0o644)
    finally:
        os.umask(umask)


def test_what_an_older_database_does_not_know_is_moved_aside(
    tokenizer: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, older, newer = tmp_path / "state", tmp_path / "older", tmp_path / "newer"
    with batching(tokenizer, folder) as server:
        known = server.upload(b"known")
    shutil.copy(folder / "state.sqlite", older)
    with batching(tokenizer, folder) as server:
        done = server.until_over(server.submit(jsonl(LINES)))
        going = server.submit(jsonl(LINES))
        server.running.hold(True)
        while server.openai.batches.retrieve(going).status != "in_progress":
            pass
        newest = server.openai.files.content(done.output_file_id).content
    shutil.copy(folder / "state.sqlite", newer)
    (folder / "batches" / going).mkdir(exist_ok=True)
    before = contents(folder / "files")
    capfd.readouterr()

    put_back(folder, older)
    StateFolder(folder).close()
    (said,) = capfd.readouterr().err.splitlines()
    (place,) = (folder / "unknown").iterdir()
    assert (
        said
        == f"penstock: 4 files or batches in {folder} that its state.sqlite doesn't know (was an"
        f" older one put back?) were moved to {place}"
    )
    assert contents(folder / "files") == {known: b"known"}
    assert contents(place / "files") == {
        name: content for name, content in before.items() if name != known
    }
    assert os.listdir(place / "batches") == [going]
    StateFolder(folder).close()
    assert not capfd.readouterr().err and len(list((folder / "unknown").iterdir())) == 1, (
        "it is said once"
    )

    put_back(folder, newer)  # and what it knows
    shutil.copytree(place, folder, dirs_exist_ok=True)
    with batching(tokenizer, folder) as server:
        assert server.openai.files.content(done.output_file_id).content == newest
        assert server.until_over(going).request_counts.completed == len(LINES)
    put_back(folder, older)
    StateFolder(folder).close()
    assert len(list((folder / "unknown").iterdir())) == 2, "none is written over"
    assert contents(place / "files")[done.output_file_id] == newest


def test_by_their_names_drafts_go_and_all_else_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, file_id, batch_id = tmp_path / "state", new_file_id(), new_batch_id()
    StateFolder(folder).close()
    (tmp_path / "elsewhere").write_bytes(b"elsewhere")
    strangers = [
        file_id,
        "notes.txt",
        f"{new_file_id()}.part.txt",
        f"{new_file_id().upper()}.part",
        "x.part",
    ]
    for name in strangers:
        (folder / "files" / name).write_text(name)
    (folder / "files" / f"{new_file_id()}.part").write_bytes(b"half an upload")
    (folder / "files" / f"{new_file_id()}.part").symlink_to(tmp_path / "elsewhere")
    (folder / "files" / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "files" / f"{file_id}.part").mkdir()
    (folder / "batches" / batch_id).mkdir()
    (folder / "batches" / batch_id / "output.jsonl").write_bytes(b"rows")
    StateFolder(folder).close()
    (place,) = (folder / "unknown").iterdir()
    assert "8 files or batches" in capfd.readouterr().err
    assert sorted(os.listdir(place / "files")) == sorted([*strangers, "link", f"{file_id}.part"])
    assert all((place / "files" / name).read_text() == name for name in strangers)
    assert (place / "files" / "link").is_symlink() and (
        tmp_path / "elsewhere"
    ).read_bytes() == b"elsewhere"
    assert contents(place / "batches") == {f"{batch_id}/output.jsonl": b"rows"}
    assert os.listdir(folder / "files") == os.listdir(folder / "batches") == []


# --- what is not as it was


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_at_a_line(path: Path) -> None:
    kept = path.read_bytes().split(b"\n")[:-4]
    path.write_bytes(b"\n".join([*kept, b""]))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(jsonl([line("one more")]))


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"max_tokens": 3', b'"max_tokens": 4'))


def take_away(path: Path) -> None:
    path.unlink()


def link(path: Path) -> None:
    there = path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(there)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SEEN_BY_SIZE = [cut, cut_at_a_line, grow, take_away, link, make_folder, make_pipe]


@pytest.mark.parametrize("harm", SEEN_BY_SIZE)
def test_a_content_that_is_not_whole_is_one_error(
    tokenizer: Tokenizer, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    with batching(tokenizer, tmp_path / "state") as server:
        file_id, whole = server.upload(jsonl(LINES)), server.upload(b"whole")
        harm(tmp_path / "state" / "files" / file_id)
        answer = server.http.get(f"/v1/files/{file_id}/content")
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (
            500,
            "server_error",
            "file_damaged",
        )
        assert answer.headers["x-should-retry"] == "false"
        assert (
            "this file is damaged on the server's disk (" in error["message"]
            and str(tmp_path) not in answer.text
        )
        assert server.openai.files.content(whole).content == b"whole"
        assert server.http.get(f"/v1/files/{file_id}").json()["bytes"] == len(jsonl(LINES))


@pytest.mark.parametrize("harm", [grow, make_pipe, change])
def test_of_an_input_that_is_not_whole_no_batch_begins(
    tokenizer: Tokenizer, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    with batching(tokenizer, tmp_path / "state") as server:
        file_id = server.upload(jsonl(LINES))
        harm(tmp_path / "state" / "files" / file_id)
        made = server.openai.batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        )
        check_failed(server, made.id, done=0, total=0)


def check_failed(
    server: Batching, batch_id: str, *, done: int | None, total: int = len(LINES)
) -> None:
    """By the input, with the rows that there were. done: None: some."""
    batch = server.until_over(batch_id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "file_damaged")
    assert batch.errors.data[0].message.startswith(
        "of the batch's input: this file is damaged on the server's disk ("
    )
    counts, rows = batch.request_counts, server.rows(batch.output_file_id)
    assert counts.total == total and counts.completed == len(rows) and counts.failed == 0
    assert 0 < len(rows) < total if done is None else len(rows) == done


def half_done(tokenizer: Tokenizer, folder: Path) -> tuple[str, Path]:
    """A batch that a server's end came amid, and its input."""
    with batching(tokenizer, folder) as server:
        server.engine.step_seconds = 0.05
        batch_id = server.submit(jsonl(LINES))
        while server.openai.batches.retrieve(batch_id).request_counts.completed < 5:
            pass
        return batch_id, folder / "files" / server.openai.batches.retrieve(batch_id).input_file_id


@pytest.mark.parametrize("harm", [cut_at_a_line, take_away, link, change])
def test_a_batch_whose_input_changed_meanwhile_fails_by_name(
    tokenizer: Tokenizer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
) -> None:
    batch_id, path = half_done(tokenizer, tmp_path / "state")
    harm(path)
    with batching(tokenizer, tmp_path / "state") as server:
        check_failed(server, batch_id, done=None)
        assert not server.engine.submitted
    assert (
        f"penstock: {batch_id} cannot go on: of its input, this file is damaged"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("cancelled", [False, True])
def test_lines_that_go_while_a_batch_runs_are_missed(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """The input is read again for what a cancel left, and after lines that the engine died with."""
    plain, paths = batch_job.check_content, []

    def check(path: Path, *rest: object) -> None:
        plain(path, *rest)  # type: ignore[arg-type]
        paths.append(path)
        if len(paths) == 2 and not cancelled:
            cut_at_a_line(path)

    monkeypatch.setattr(batch_job, "check_content", check)
    with batching(tokenizer, tmp_path / "state") as server:
        server.engine.step_seconds = 0.05 if cancelled else 0.0
        batch_id = server.submit(jsonl(LINES))
        if cancelled:
            while server.openai.batches.retrieve(batch_id).request_counts.completed < 5:
                pass
            cut_at_a_line(paths[0])
            server.openai.batches.cancel(batch_id)
        batch = server.until_over(batch_id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "file_damaged")
        assert f"(397 of its {len(LINES)} lines were found)" in batch.errors.data[0].message
        rows = [*server.rows(batch.output_file_id), *server.rows(batch.error_file_id)]
        assert sorted(int(row["custom_id"]) for row in rows) == list(range(397))
        counts = batch.request_counts
        assert (counts.total, counts.completed + counts.failed) == (len(LINES), 397)

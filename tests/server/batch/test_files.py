"""Files as the official client keeps them, and uploads that are not what they should be."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from bare_http import connect, read_one, request
from batch_fake import Batching, batching, jsonl, line

from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

MOST = 4 << 20


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Batching]:
    with batching(tokenizer, tmp_path / "state", BatchJobLimits(max_file_bytes=MOST)) as running:
        yield running


def on_disk(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "state" / "files"))


def test_a_file_comes_and_goes(server: Batching, tmp_path: Path) -> None:
    content = random.randbytes(3 << 20)
    made = server.openai.files.create(file=("night.jsonl", content), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.purpose) == (
        "file",
        len(content),
        "night.jsonl",
        "batch",
    )
    assert made.id.startswith("file-") and made.status == "processed"
    assert server.openai.files.retrieve(made.id) == made
    assert server.openai.files.content(made.id).content == content
    assert on_disk(tmp_path) == [made.id]
    gone = server.openai.files.delete(made.id)
    assert gone.deleted and gone.id == made.id and on_disk(tmp_path) == []
    for ask in (
        server.openai.files.retrieve,
        server.openai.files.content,
        server.openai.files.delete,
    ):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, (1 << 20) - 1, 1 << 20, MOST])
def test_sizes_come_back_byte_for_byte(server: Batching, size: int) -> None:
    content = random.randbytes(size)
    assert server.openai.files.content(server.upload(content)).content == content


def test_files_are_listed_in_pages(server: Batching) -> None:
    ids = [server.upload(b"%d" % i) for i in range(5)]
    assert [file.id for file in server.openai.files.list()] == ids[::-1]
    assert [file.id for file in server.openai.files.list(order="asc", limit=2)] == ids
    assert [file.id for file in server.openai.files.list(after=ids[2])] == ids[:2][::-1]
    assert [file.id for file in server.openai.files.list(purpose="batch", limit=1).data] == [
        ids[-1]
    ]
    assert list(server.openai.files.list(purpose="fine-tune")) == []


def test_a_list_behind_what_is_gone_is_no_list_s_end(server: Batching) -> None:
    """Whoever deletes what they list hears of it: an empty page would leave the rest without a
    word."""
    ids = [server.upload(b"%d" % i) for i in range(5)]
    with pytest.raises(
        openai.NotFoundError, match=r"no file of this id.*list from the start again"
    ) as gone:
        for file in server.openai.files.list(limit=2):
            server.openai.files.delete(file.id)
    assert gone.value.param == "after" and gone.value.code == "not_found"
    assert [file.id for file in server.openai.files.list()] == ids[:3][::-1]
    for order in ("asc", "desc"):
        with pytest.raises(openai.NotFoundError):
            server.openai.files.list(after=ids[4], order=order)  # type: ignore[arg-type]
    assert server.openai.files.list(after=ids[0]).data == []  # behind the last of them
    with pytest.raises(openai.NotFoundError, match="no batch of this id") as unknown:
        server.openai.batches.list(after=ids[0])
    assert unknown.value.param == "after"


def test_a_file_that_a_batch_reads_stays(server: Batching) -> None:
    server.running.hold(True)
    file_id = server.upload(jsonl([line("a")]))
    batch = server.openai.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )
    with pytest.raises(openai.ConflictError, match=batch.id):
        server.openai.files.delete(file_id)
    server.running.hold(False)
    server.until_over(batch.id)
    assert server.openai.files.delete(file_id).deleted


def form(
    *parts: tuple[str, str | None, bytes], boundary: bytes = b"edge", end: bytes = b"--\r\n"
) -> bytes:
    """parts: (name, filename or None, content)."""
    pieces = []
    for name, filename, content in parts:
        named = f'; filename="{filename}"' if filename is not None else ""
        head = f'Content-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode(
            "utf-8", "surrogateescape"
        )
        pieces.append(b"--" + boundary + b"\r\n" + head + content + b"\r\n")
    return b"".join(pieces) + b"--" + boundary + end


KIND = "multipart/form-data; boundary=edge"
FILE, PURPOSE = ("file", "a.jsonl", b"x"), ("purpose", None, b"batch")


@pytest.mark.parametrize(
    ("body", "kind", "status", "param"),
    [
        (form(FILE), KIND, 400, "purpose"),
        (form(PURPOSE), KIND, 400, "file"),
        (form(FILE, ("purpose", None, b"fine-tune")), KIND, 400, "purpose"),
        (form(FILE, ("purpose", None, b"batch\xff")), KIND, 400, "purpose"),
        (
            form(FILE, PURPOSE, ("expires_after[seconds]", None, b"3600")),
            KIND,
            400,
            "expires_after",
        ),
        (form(FILE, PURPOSE, ("colour", None, b"red")), KIND, 400, "colour"),
        (form(FILE, FILE, PURPOSE), KIND, 400, "file"),
        (form(FILE, PURPOSE, PURPOSE), KIND, 400, "purpose"),
        (form(("file", None, b"x"), PURPOSE), KIND, 400, "file"),
        (form(FILE, ("purpose", None, b"b" * 2000)), KIND, 400, "purpose"),
        (form(FILE, PURPOSE, *[(f"f{i}", None, b"") for i in range(20)]), KIND, 400, None),
        (form(FILE, PURPOSE)[:-20], KIND, 400, None),
        (form(FILE, PURPOSE, end=b""), KIND, 400, None),
        (b"", KIND, 400, None),
        (b"\x00" * 100, KIND, 400, None),
        (form(FILE, PURPOSE), "multipart/form-data", 400, None),
        (form(FILE, PURPOSE), "multipart/form-data; boundary=" + "x" * 5000, 400, None),
        (form(FILE, PURPOSE), "application/json", 400, None),
        (form(FILE, PURPOSE), "", 400, None),
        (b'{"file": "a", "purpose": "batch"}', "application/json", 400, None),
        (form(FILE, PURPOSE).replace(b"form-data", b"attachment"), KIND, 400, None),
        (form(FILE, PURPOSE).replace(b'; name="file"', b""), KIND, 400, None),
        (form(FILE, PURPOSE).replace(b"Content-Disposition", b"X" * 5000), KIND, 400, None),
        (
            form(FILE, PURPOSE).replace(b"Content-Disposition:", b"Content-Disposition"),
            KIND,
            400,
            None,
        ),
        (form(("file", "a", b"x" * (MOST + 1)), PURPOSE), KIND, 413, "file"),
        (form(("file", "a", b"x" * (MOST + (1 << 20))), PURPOSE), KIND, 413, "file"),
    ],
)
def test_bad_uploads(
    server: Batching, tmp_path: Path, body: bytes, kind: str, status: int, param: str | None
) -> None:
    answer = server.http.post("/v1/files", content=body, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert on_disk(tmp_path) == [], "nothing is left of it"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\\\Users\\\\me\\\\in.jsonl", "in.jsonl"),
        ("/", ""),
        ("..", ".."),
        ("a\x00b\x1b[31m.jsonl", "ab[31m.jsonl"),
        ("n" * 1000, "n" * 255),
        ("名前.jsonl", "名前.jsonl"),
        ("\udcff", "\ufffd"),
    ],
)
def test_a_filename_is_for_showing_alone(
    server: Batching, tmp_path: Path, given: str, kept: str
) -> None:
    body = form(("file", given, b"x"), PURPOSE)
    answer = server.http.post("/v1/files", content=body, headers={"content-type": KIND})
    assert answer.status_code == 200 and answer.json()["filename"] == kept
    assert on_disk(tmp_path) == [answer.json()["id"]]


def head(size: int) -> bytes:
    return request(b"", f"content-type: {KIND}", f"content-length: {size}", path="/v1/files")


def test_a_size_that_is_too_much_is_refused_before_it_comes(server: Batching) -> None:
    with connect(server.url) as connection:
        connection.sendall(head(1 << 40))
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_an_upload_that_breaks_off_leaves_nothing(server: Batching, tmp_path: Path) -> None:
    with connect(server.url) as connection:
        connection.sendall(head(3_000_000) + form(("file", "a", b"x" * 2_500_000), end=b""))
        server.running.wait_for(lambda: on_disk(tmp_path))
    server.running.wait_for(lambda: not on_disk(tmp_path))
    assert list(server.openai.files.list()) == []


def test_an_upload_that_hardly_comes_is_ended(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with batching(
        tokenizer, tmp_path / "state", server_limits=HttpLimits(body_seconds=0.2)
    ) as server:
        with connect(server.url) as connection:
            connection.sendall(head(3_000_000) + form(FILE, end=b""))
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
        server.running.wait_for(lambda: not on_disk(tmp_path))


def test_an_upload_under_way_hears_of_the_servers_end(server: Batching, tmp_path: Path) -> None:
    with connect(server.url) as connection:
        connection.sendall(head(3_000_000) + form(("file", "a", b"x" * 300_000), end=b""))
        server.running.wait_for(
            lambda: any(path.stat().st_size for path in (tmp_path / "state" / "files").iterdir())
        )
        server.running.loop.call_soon_threadsafe(server.running.service.close)
        answer, body = read_one(connection)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in body
    server.running.wait_for(lambda: not on_disk(tmp_path))


def test_a_start_sweeps_what_a_kill_left(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with batching(tokenizer, tmp_path / "state") as server:
        kept = server.upload(b"kept")
    left = [
        tmp_path / "state" / "files" / name
        for name in ("file-" + "0" * 32, "file-" + "1" * 32 + ".part")
    ]
    for path in left:
        path.write_bytes(b"nobody's")
    (tmp_path / "state" / "batches" / ("batch_" + "0" * 32)).mkdir()
    with batching(tokenizer, tmp_path / "state") as server:
        assert on_disk(tmp_path) == [kept] and server.openai.files.content(kept).content == b"kept"
        assert os.listdir(tmp_path / "state" / "batches") == []

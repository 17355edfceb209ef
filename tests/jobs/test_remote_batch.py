"""`penstock batch` against a server: files up and rows down, a server that goes and comes back,
faults in one line."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_fake import Batching, batching, jsonl, line
from server_fake import make_tokenizer

from penstock.cli import main
from penstock.errors import JournalError, UsageError
from penstock.jobs.remote import NoAnswerError, Remote, RemoteError
from penstock.jobs.remote_batch import fetch, submit, watch
from penstock.journal import Journal
from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

MOST = 4 << 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Batching]:
    with batching(tokenizer, tmp_path / "state", BatchJobLimits(max_file_bytes=MOST)) as running:
        yield running


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr("sys.argv", ["penstock", "batch", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def written(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(jsonl(lines))
    return path


def test_submit_watch_fetch(
    server: Batching,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, out, url = (
        written(tmp_path, [line("a"), line("b", prompt="x" * 300)]),
        tmp_path / "out.jsonl",
        server.url,
    )
    assert run(monkeypatch, "submit", path, "--url", url) == 0
    batch_id = capsys.readouterr().out.strip()
    assert run(monkeypatch, "watch", batch_id, "--url", f"{url}/v1/") == 0
    assert capsys.readouterr().err.splitlines()[-1] == "completed, 2 of 2, 1 failed"
    assert run(monkeypatch, "fetch", batch_id, out, "--url", url) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: 1 rows",
        f"{tmp_path / 'out.errors.jsonl'}: 1 rows",
    ]
    assert json.loads(out.read_text())["custom_id"] == "a"
    assert json.loads((tmp_path / "out.errors.jsonl").read_text())["custom_id"] == "b"
    assert run(monkeypatch, "cancel", batch_id, "--url", url) == 1
    said = capsys.readouterr().err
    assert said == "penstock: the server refused: a batch that is completed cannot be cancelled\n"


def test_bad_lines_are_named(
    server: Batching,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch_id = submit(
        Remote(server.url), written(tmp_path, [line(str(i), n=0) for i in range(30)]), None
    )
    assert server.until_over(batch_id).status == "failed"
    assert run(monkeypatch, "watch", batch_id, "--url", server.url) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "failed" and len(said) == 22
    assert said[1].startswith("penstock: line 1: n must be between 1 and 65536") and said[
        1
    ].endswith(" (body.n)")
    assert said[-1].startswith("penstock: and 10 more")
    with pytest.raises(RemoteError, match="is failed and left no rows"):
        fetch(Remote(server.url), batch_id, tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"x", b"[]", b"{}", b'{"url": 3}', b"\xff"])
def test_a_file_that_says_no_url_needs_one(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="url"):
        submit(Remote("http://127.0.0.1:1"), path, None)


@pytest.mark.parametrize("endpoint", [None, "/v1/completions"])
def test_what_is_no_plain_file_of_lines_is_refused_before_it_is_sent(
    endpoint: str | None, tmp_path: Path
) -> None:
    nobody = Remote("http://127.0.0.1:1")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="is no file: name a file of JSON lines"):
        submit(nobody, tmp_path / "fifo", endpoint)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(jsonl([line("a")])))
    with pytest.raises(
        UsageError, match="is gzip, and servers take plain lines: gunzip -k it first"
    ):
        submit(nobody, tmp_path / "in.jsonl.gz", endpoint)


def test_a_refused_submit_takes_its_upload_back(server: Batching, tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="endpoint"):
        submit(Remote(server.url), written(tmp_path, [line("a")]), "/v1/embeddings")
    assert server.openai.files.list().data == []


def test_an_upload_of_which_a_batch_may_be_stays(server: Batching, tmp_path: Path) -> None:
    class Torn(Remote):
        def create(self, file_id: str, endpoint: str) -> Any:
            super().create(file_id, endpoint)
            raise NoAnswerError("the server broke off")

    with pytest.raises(NoAnswerError):
        submit(Torn(server.url), written(tmp_path, [line("a")]), None)
    assert server.until_over(server.openai.batches.list().data[0].id).status == "completed"


def test_fetch_writes_over_nothing_else(
    server: Batching,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    out, errors = folder / "out.jsonl", folder / "out.errors.jsonl"
    both, one = server.submit(jsonl([line("a"), line("b", n=0)])), server.submit(jsonl([line("c")]))
    for batch_id in (both, one):
        server.until_over(batch_id)
    errors.write_bytes(b"mine")
    assert run(monkeypatch, "fetch", one, out, "--url", server.url) == 2
    assert (
        capsys.readouterr().err
        == f"penstock: {errors} is there already: name another OUT, or replace it with"
        " --overwrite\n"
    )
    assert list(folder.iterdir()) == [errors] and errors.read_bytes() == b"mine"
    assert run(monkeypatch, "fetch", both, out, "--url", server.url, "--overwrite") == 0
    assert (out.read_bytes().count(b"\n"), errors.read_bytes().count(b"\n")) == (1, 1)
    with pytest.raises(JournalError, match=r"out\.jsonl is there already"):
        fetch(Remote(server.url), one, out)
    assert fetch(Remote(server.url), one, out, overwrite=True) == [(out, 1)]
    assert list(folder.iterdir()) == [out]


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_fetch_takes_no_name_of_a_run(tmp_path: Path, name: str, overwrite: bool) -> None:
    """An OUT without a byte is as free as any, were it not for its journal."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / name).symlink_to(tmp_path / name)
    with Journal(tmp_path / name, {}) as journal:
        for folder in (tmp_path, tmp_path / "elsewhere"):
            with pytest.raises(
                JournalError,
                match=rf"{name} belongs to the run of {name}\.journal: name another OUT",
            ):
                fetch(
                    Remote("http://127.0.0.1:1"),
                    "batch_x",
                    folder / "out.jsonl",
                    overwrite=overwrite,
                )
        journal.add(1, {"id": 1})
    assert json.loads((tmp_path / name).read_text()) == {"id": 1}


def test_large_files_go_up_and_come_down(server: Batching, tmp_path: Path) -> None:
    content = random.randbytes(3_500_000)
    (tmp_path / 'odd "na\\me\n.bin').write_bytes(content)
    made = Remote(server.url).upload(tmp_path / 'odd "na\\me\n.bin')
    assert made["filename"] == "odd name.bin" and made["bytes"] == len(content)
    back = io.BytesIO()
    assert (
        Remote(server.url).download(made["id"], back) == len(content) and back.getvalue() == content
    )


def test_keys_are_sent(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with batching(
        tokenizer, tmp_path / "state", access=AccessPolicy(keys=gather_keys(["secret"], None, {}))
    ) as server:
        path = written(tmp_path, [line("a")])
        assert submit(Remote(server.url, "secret"), path, None).startswith("batch_")
        for key in (None, "another"):
            with pytest.raises(RemoteError, match="set PENSTOCK_API_KEY, or OPENAI_API_KEY"):
                submit(Remote(server.url, key), path, None)


def test_a_server_that_goes_and_comes_back_is_watched_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    said = io.StringIO()
    with batching(tokenizer, tmp_path / "state") as first:
        first.running.hold(True)
        batch_id = submit(Remote(first.url), written(tmp_path, [line("a")]), None)
        first.running.wait_for(lambda: first.engine.open)
        seen = [Remote(first.url).batch(batch_id)]
    with batching(tokenizer, tmp_path / "state") as second:

        class GoneForAWhile(Remote):
            looks = 0

            def batch(self, name: str) -> Any:
                self.looks += 1
                where = "http://127.0.0.1:1" if self.looks <= 3 else second.url
                return seen[0] if self.looks == 1 else Remote(where).batch(name)

        assert watch(GoneForAWhile(second.url), batch_id, said, 0.01)["status"] == "completed"
    lines = said.getvalue().splitlines()
    assert lines[0].startswith("in_progress, 0 of 1") and lines[-1] == "completed, 1 of 1"
    assert (
        lines.count("the server does not answer; its batches go on when it is started again") == 1
    )


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://x/?a"],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UsageError, match="is no address of a server"):
        Remote(url)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "watch", "batch_x", "--url", "http://127.0.0.1:1") == 1
    assert (
        capsys.readouterr().err
        == "penstock: http://127.0.0.1:1 does not answer (connection refused): start a server with"
        " --state-dir there, or name another --url\n"
    )


ANSWERS = [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "no server of OpenAI"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "no server of OpenAI"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}", "broke off"),
    (
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\n<html>",
        "answered 404 Not Found and didn't say why",
    ),
    (
        b'HTTP/1.1 500 X\r\nContent-Length: 13\r\n\r\n{"error": 3}\n',
        "answered 500 X and didn't say why",
    ),
    (b"\x00\x01\x02\r\n\r\n", "does not answer"),
    (b"", "does not answer"),
]


@pytest.mark.parametrize(("answer", "says"), ANSWERS)
def test_servers_that_are_none(answer: bytes, says: str) -> None:
    class Odd(http.server.BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.request.recv(65_536)
            self.request.sendall(answer)

    with http.server.HTTPServer(("127.0.0.1", 0), Odd) as odd:
        threading.Thread(target=odd.handle_request, daemon=True).start()
        with pytest.raises(RemoteError, match=says) as error:
            Remote(f"http://127.0.0.1:{odd.server_port}").batch("batch_x")
        assert "\n" not in str(error.value)


def test_a_file_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    class Torn(http.server.BaseHTTPRequestHandler):
        def handle(self) -> None:
            batch = b'{"id": "batch_x", "status": "completed", "output_file_id": "file-x"}'
            whole = b"/batches/" in self.request.recv(65_536)
            size, content = (len(batch), batch) if whole else (3_000_000, bytes(1_500_000))
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + content)

    with http.server.HTTPServer(("127.0.0.1", 0), Torn) as torn:
        threading.Thread(
            target=lambda: [torn.handle_request() for _ in range(2)], daemon=True
        ).start()
        with pytest.raises(NoAnswerError, match="broke off"):
            fetch(Remote(f"http://127.0.0.1:{torn.server_port}"), "batch_x", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

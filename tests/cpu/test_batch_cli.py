"""`penstock batch` against a server: files up and rows down, a server that goes and comes back, faults in one line."""

from __future__ import annotations

import http.server
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_fake import CHAT, Batching, batching, jsonl, line
from server_fake import make_tokenizer

from penstock.cli import main
from penstock.errors import UsageError
from penstock.jobs.batch import fetch, line_of, submit, troubles_of, watch
from penstock.jobs.remote import NoAnswerError, Remote, RemoteError
from penstock.server.batch_lines import BatchLimits
from penstock.server.doors import Doors
from penstock.server.keys import gather_keys
from penstock.text.tokenizer import Tokenizer

MOST = 4 << 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Batching]:
    with batching(tokenizer, tmp_path / "state", BatchLimits(max_file_bytes=MOST)) as running:
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
    server: Batching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out, url = written(tmp_path, [line("a"), line("b", prompt="x" * 300)]), tmp_path / "out.jsonl", server.url
    assert run(monkeypatch, "submit", path, "--url", url) == 0
    batch_id = capsys.readouterr().out.strip()
    assert run(monkeypatch, "watch", batch_id, "--url", f"{url}/v1/") == 0
    assert capsys.readouterr().err.splitlines()[-1] == "completed, 2 of 2, 1 failed"
    assert run(monkeypatch, "fetch", batch_id, out, "--url", url) == 0
    assert capsys.readouterr().out.splitlines() == [f"{out}: 1 rows", f"{tmp_path / 'out.errors.jsonl'}: 1 rows"]
    assert json.loads(out.read_text())["custom_id"] == "a"
    assert json.loads((tmp_path / "out.errors.jsonl").read_text())["custom_id"] == "b"
    assert run(monkeypatch, "cancel", batch_id, "--url", url) == 1
    said = capsys.readouterr().err
    assert said == "penstock: the server refused: a batch that is completed cannot be cancelled\n"


def test_bad_lines_are_named(
    server: Batching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch_id = submit(Remote(server.url), written(tmp_path, [line(str(i), n=0) for i in range(30)]), None)
    assert server.until_over(batch_id).status == "failed"
    assert run(monkeypatch, "watch", batch_id, "--url", server.url) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "failed" and len(said) == 22
    assert said[1].startswith("penstock: line 1: n must be between 1 and 65536") and said[1].endswith(" (body.n)")
    assert said[-1].startswith("penstock: and 10 more")
    with pytest.raises(RemoteError, match="is failed and left no rows"):
        fetch(Remote(server.url), batch_id, tmp_path / "out")


def test_bad_lines_among_good_ones_are_named_once(
    server: Batching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, [line("a"), line("b", n=0), line("a"), line("c")])
    batch_id, out = submit(Remote(server.url), path, None), tmp_path / "out.jsonl"
    assert run(monkeypatch, "watch", batch_id, "--url", server.url) == 0
    said = [each for each in capsys.readouterr().err.splitlines() if each.startswith("penstock: ")]
    assert said[0] == "penstock: bad lines are not run and go to the error file:" and len(said) == 3
    assert said[1].startswith("penstock: line 2: n must be between 1 and 65536") and said[1].endswith(" (body.n)")
    assert said[2] == "penstock: line 3: an earlier line has this custom_id: give every line its own (custom_id)"
    assert run(monkeypatch, "fetch", batch_id, out, "--url", server.url) == 0
    assert capsys.readouterr().out.splitlines() == [f"{out}: 2 rows", f"{tmp_path / 'out.errors.jsonl'}: 2 rows"]


def test_the_endpoint_is_the_first_lines_or_as_said(server: Batching, tmp_path: Path) -> None:
    remote = Remote(server.url)
    path = written(tmp_path, [line("a", CHAT)])
    assert watch(remote, submit(remote, path, None), io.StringIO(), 0.01)["endpoint"] == CHAT
    assert watch(remote, submit(remote, path, "/v1/completions"), io.StringIO(), 0.01)["status"] == "failed"


@pytest.mark.parametrize("content", [b"", b"x", b"[]", b"{}", b'{"url": 3}', b"\xff"])
def test_a_file_that_says_no_url_needs_one(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="url"):
        submit(Remote("http://127.0.0.1:1"), path, None)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        for endpoint in (None, "/v1/completions"):
            with pytest.raises(UsageError, match="cannot be read"):
                submit(Remote("http://127.0.0.1:1"), path, endpoint)


def test_large_files_go_up_and_come_down(server: Batching, tmp_path: Path) -> None:
    content = os.urandom(3_500_000)
    (tmp_path / 'odd "na\\me\n.bin').write_bytes(content)
    made = Remote(server.url).upload(tmp_path / 'odd "na\\me\n.bin')
    assert made["filename"] == "odd name.bin" and made["bytes"] == len(content)
    assert Remote(server.url).download(made["id"], tmp_path / "back") == len(content)
    assert (tmp_path / "back").read_bytes() == content and not list(tmp_path.glob("*.part"))


def test_a_file_that_is_too_large_is_refused_in_words(server: Batching, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(MOST * 3))
    with pytest.raises(RemoteError, match=f"the file is larger than {MOST} bytes"):
        Remote(server.url).upload(tmp_path / "large")


def test_keys_are_sent(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with batching(tokenizer, tmp_path / "state", doors=Doors(keys=gather_keys(["secret"], None, {}))) as server:
        path = written(tmp_path, [line("a")])
        assert submit(Remote(server.url, "secret"), path, None).startswith("batch_")
        with pytest.raises(RemoteError, match="API key"):
            submit(Remote(server.url), path, None)


def test_a_server_that_goes_and_comes_back_is_watched_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
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
    assert lines[0] == "in_progress, 0 of 1" and lines[-1] == "completed, 1 of 1"
    assert lines.count("the server does not answer; its batches go on when it is started again") == 1


def test_fetching_too_early_says_so(server: Batching, tmp_path: Path) -> None:
    server.running.hold(True)
    batch_id = server.submit(jsonl([line("a")]))
    with pytest.raises(RemoteError, match=f"is not over .*penstock batch watch {batch_id}"):
        fetch(Remote(server.url), batch_id, tmp_path / "out")
    server.running.hold(False)
    server.until_over(batch_id)
    with pytest.raises(UsageError, match="folder that exists"):
        fetch(Remote(server.url), batch_id, tmp_path / "none" / "out")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://x/?a"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UsageError, match="is no address of a server"):
        Remote(url)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "watch", "batch_x", "--url", "http://127.0.0.1:1") == 1
    assert capsys.readouterr().err == (
        "penstock: http://127.0.0.1:1 does not answer (connection refused): start a server with --state-dir there, or "
        "name another --url\n"
    )


ANSWERS = [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "no server of OpenAI"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "no server of OpenAI"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}", "broke off"),
    (b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\n<html>", "answered 404 Not Found and didn't say why"),
    (b'HTTP/1.1 500 X\r\nContent-Length: 13\r\n\r\n{"error": 3}\n', "answered 500 X and didn't say why"),
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
            self.request.recv(65_536)
            self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + bytes(1_500_000))

    with http.server.HTTPServer(("127.0.0.1", 0), Torn) as torn:
        threading.Thread(target=torn.handle_request, daemon=True).start()
        with pytest.raises(NoAnswerError, match="broke off"):
            Remote(f"http://127.0.0.1:{torn.server_port}").download("file-x", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_words_of_a_batch() -> None:
    assert line_of({"status": "validating", "request_counts": {"total": 0}}) == "validating"
    assert line_of({"status": "in_progress", "request_counts": {"total": 1500, "completed": 7, "failed": 2}}) == (
        "in_progress, 9 of 1,500, 2 failed"
    )
    assert line_of({"status": "in_progress", "expected_at": int(time.time()) + 5_410}) == (
        "in_progress, done in about 1 h 30 min"
    )
    assert line_of({"status": "in_progress", "expected_at": 5}) == "in_progress, done in about 0 s"
    assert troubles_of({"errors": None}) == []

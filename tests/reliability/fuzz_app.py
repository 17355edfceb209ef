"""The server's whole application as a target of fuzzing: bytes of a body go in, a 5xx, a hang or a leak is raised.

It knows the routes and the fake engine; who draws the bytes is its callers'.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzz_bounds import bounded, strict
from fuzz_inputs import CANARY

COMPLETIONS, CHAT, FILES, BATCHES = "/v1/completions", "/v1/chat/completions", "/v1/files", "/v1/batches"


class App:
    """The server's application with files and batches over the fake engine, called without sockets.

    A fault of ours comes out as the exception that it is: Starlette raises it again behind its answer of 500.
    """

    def __init__(self, folder: Path) -> None:
        from server_fake import FakeEngine, make_tokenizer

        from penstock.server.batch.manager import BatchManager
        from penstock.server.batch.state_folder import StateFolder
        from penstock.server.online.app_state import AppState
        from penstock.server.online.metrics import Metrics
        from penstock.server.openai.http_limits import HttpLimits
        from penstock.server.process.app import build_app

        for name in ("tokenizer", "state"):
            (folder / name).mkdir()
        self._runner = asyncio.Runner()
        self.engine = FakeEngine(make_tokenizer(folder / "tokenizer"))
        self.service = AppState(
            client=self.engine,  # type: ignore[arg-type]
            model="fake",
            metrics=Metrics(self.engine, "fake"),  # type: ignore[arg-type]
            limits=HttpLimits(max_body_bytes=100_000),
        )
        self.state = StateFolder(folder / "state")
        self.shelf = folder / "state" / "files"
        self.manager = BatchManager(self.service, self.state)
        self._log = io.BytesIO()
        self._app = build_app(self.service, access_log=self._log, manager=self.manager)

    def close(self) -> None:
        self._runner.run(self.manager.end())
        self._runner.close()
        self.state.close()

    def ask(
        self, path: str, body: Sequence[bytes] = (), kind: bytes = b"application/json", method: str = "POST"
    ) -> tuple[int, bytes]:
        """(status, body) of a request whose body comes in these pieces. Whatever came of it, nothing is left open."""
        with bounded():
            status, answer = self._runner.run(self._ask(path, body, kind, method))
            self._runner.run(self._at_rest())
        assert status < 500, (status, answer[:600])
        if status != 200:
            self._check_refusal(answer)
        return status, answer

    async def _ask(self, path: str, body: Sequence[bytes], kind: bytes, method: str) -> tuple[int, bytes]:
        coming = deque(body or [b""])
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if not coming:
                await asyncio.Event().wait()  # the client waits for its answer
            return {"type": "http.request", "body": coming.popleft(), "more_body": bool(coming)}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode("utf-8", "replace"), "query_string": b"", "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", kind)], "client": None, "server": None,
        }  # fmt: skip
        await self._app(scope, receive, send)
        assert sent[0]["type"] == "http.response.start" and not sent[-1].get("more_body")
        return sent[0]["status"], b"".join(part["body"] for part in sent[1:])

    async def _at_rest(self) -> None:
        """What batches do in the background is not what this request left."""
        queue, intake = self.service.request_limits, self.service.intake
        left = queue.reqs.total, queue.tokens.total, intake.bytes, [s for s in self.engine.open if not s.background]
        assert left == (0, 0, 0, []), left
        self.engine.submitted.clear()
        self._log.seek(0)
        self._log.truncate()

    def _check_refusal(self, answer: bytes) -> None:
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 600, error

    def sample(self, path: str, body: Sequence[bytes]) -> int:
        """One of the two routes that make text."""
        status, answer = self.ask(path, body)
        assert status in (200, 400, 404, 408, 413), status
        if status == 200:
            self._check_sampled(answer)
        return status

    def _check_sampled(self, answer: bytes) -> None:
        if not answer.startswith(b"data: "):
            assert strict(answer)["choices"]
            return
        assert answer.endswith(b"\n\n")
        events = [event.removeprefix(b"data: ") for event in answer[:-2].split(b"\n\n")]
        if events[-1] != b"[DONE]":
            assert strict(events[-1])["error"]["code"] == "timeout", events[-1]
        for event in events[:-1]:
            assert "choices" in strict(event), event

    def upload(self, kind: bytes, body: Sequence[bytes]) -> int:
        status, answer = self.ask(FILES, body, kind)
        assert status in (200, 400, 413), status
        if status == 200:
            file_id = json.loads(answer)["id"]
            assert (self.shelf / file_id).stat().st_size == json.loads(answer)["bytes"]
            assert self.ask(f"{FILES}/{file_id}", method="DELETE")[0] == 200
        assert not list(self.shelf.glob("*.part")), "a draft was left"
        return status

    def keep(self, content: bytes) -> str:
        """The id of a file of this content."""
        form = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\ncontent-disposition: '
        form += b'form-data; name="file"; filename="a"\r\n\r\n' + content + b"\r\n--x--\r\n"
        status, answer = self.ask(FILES, [form], b"multipart/form-data; boundary=x")
        assert status == 200, answer
        return str(json.loads(answer)["id"])

    def batch(self, body: Sequence[bytes]) -> str | None:
        """The id of the batch that was made of it."""
        status, answer = self.ask(BATCHES, body)
        assert status in (200, 400, 404, 413), status
        return json.loads(answer)["id"] if status == 200 else None

    def until_over(self, batch_id: str) -> dict[str, Any]:
        """The batch, once it is over."""

        async def wait() -> dict[str, Any]:
            while True:
                found = json.loads((await self._ask(f"{BATCHES}/{batch_id}", (), b"", "GET"))[1])
                if found["status"] in ("completed", "failed", "cancelled"):
                    return dict(found)
                await asyncio.sleep(0.002)

        with bounded():
            return self._runner.run(wait())

    def content(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a batch's file."""
        if file_id is None:
            return []
        data = (self.shelf / file_id).read_bytes()
        assert data.endswith(b"\n")
        return [json.loads(line) for line in data.split(b"\n")[:-1]]

    def run_lines(self, lines: Sequence[bytes], endpoint: str) -> None:
        """A batch of these lines, which its check lets through: each has one outcome, none by a fault of ours."""
        asked = {"input_file_id": self.keep(b"\n".join(lines)), "endpoint": endpoint, "completion_window": "24h"}
        made = self.batch([json.dumps(asked).encode()])
        assert made is not None
        batch = self.until_over(made)
        assert batch["status"] == "completed", batch
        found = self.content(batch["output_file_id"]) + self.content(batch["error_file_id"])
        assert sorted(row["custom_id"] for row in found) == sorted(json.loads(line)["custom_id"] for line in lines)
        codes = [row["response"]["status_code"] for row in found]
        assert all(code < 500 for code in codes), found


def canary_free(answer: bytes) -> bool:
    """Whether an error says nothing of a value again."""
    return CANARY.encode() not in answer

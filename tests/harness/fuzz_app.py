"""The server's whole application as a target of fuzzing: bytes of a body go in, a 5xx, a hang or a
leak is raised.

It knows the routes and the fake engine; who draws the bytes is its callers'.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzz_bounds import bounded, strict
from fuzz_inputs import CANARY

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


class App:
    """The server's application over the fake engine, called without sockets.

    A fault of ours comes out as the exception that it is: Starlette raises it again behind its
    answer of 500.
    """

    def __init__(self, folder: Path) -> None:
        from server_fake import FakeEngine, make_tokenizer

        from penstock.server.api_server.routes import build_app
        from penstock.server.online.app_state import AppState
        from penstock.server.online.metrics import Metrics
        from penstock.server.openai.http_limits import HttpLimits
        from penstock.text.parsers.parser_registry import AnswerParsers

        self._runner = asyncio.Runner()
        self.engine = FakeEngine(make_tokenizer(folder))
        self.service = AppState(
            client=self.engine,  # type: ignore[arg-type]
            model="fake",
            metrics=Metrics(self.engine, "fake"),  # type: ignore[arg-type]
            limits=HttpLimits(max_body_bytes=100_000),
            admin_without_key=True,
            parsers=AnswerParsers(
                enable_auto_tool_choice=True,
                tool_call_parser="hermes",
                reasoning_parser="deepseek_r1",
            ),
        )
        self._app = build_app(self.service)

    def close(self) -> None:
        self._runner.close()

    def ask(self, path: str, body: Sequence[bytes]) -> tuple[int, bytes]:
        """(status, body) of a request whose body comes in these pieces. Whatever came of it,
        nothing is left open."""
        with bounded():
            status, answer = self._runner.run(self._ask(path, body))
            self._runner.run(self._at_rest())
        assert status < 500, (status, answer[:600])
        if status != 200:
            self._check_refusal(answer)
        return status, answer

    async def _ask(self, path: str, body: Sequence[bytes]) -> tuple[int, bytes]:
        coming = deque(body or [b""])
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if not coming:
                await asyncio.Event().wait()  # the client waits for its answer
            return {"type": "http.request", "body": coming.popleft(), "more_body": bool(coming)}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("utf-8", "replace"),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": None,
            "server": None,
        }
        await self._app(scope, receive, send)
        assert sent[0]["type"] == "http.response.start" and not sent[-1].get("more_body")
        return sent[0]["status"], b"".join(part["body"] for part in sent[1:])

    async def _at_rest(self) -> None:
        queue, intake = self.service.request_limits, self.service.intake
        left = queue.reqs.total, queue.tokens.total, intake.receiving.bytes, [*self.engine.open]
        assert left == (0, 0, 0, []), left
        self.engine.submitted.clear()

    def _check_refusal(self, answer: bytes) -> None:
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 600, (
            error
        )

    def sample(self, path: str, body: Sequence[bytes]) -> int:
        """One of the routes that make text."""
        status, answer = self.ask(path, body)
        assert status in (200, 400, 404, 408, 413), status
        if status == 200:
            self._check_sampled(answer)
        return status

    def _check_sampled(self, answer: bytes) -> None:
        if answer.startswith(b'{"id":"resp_'):
            assert strict(answer)["status"] in ("completed", "incomplete")
            return
        if answer.startswith(b"event: "):
            events = [
                strict(event.partition(b"\ndata: ")[2]) for event in answer[:-2].split(b"\n\n")
            ]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["type"].removeprefix("response.") in (
                "completed",
                "incomplete",
                "error",
            )
            return
        if not answer.startswith(b"data: "):
            assert strict(answer)["choices"]
            return
        assert answer.endswith(b"\n\n")
        events = [event.removeprefix(b"data: ") for event in answer[:-2].split(b"\n\n")]
        if events[-1] != b"[DONE]":
            assert strict(events[-1])["error"]["code"] == "timeout", events[-1]
        for event in events[:-1]:
            assert "choices" in strict(event), event


def canary_free(answer: bytes) -> bool:
    """Whether an error says nothing of a value again."""
    return CANARY.encode() not in answer

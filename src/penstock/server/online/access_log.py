"""AccessLog: writes a line of JSON per request. A line (docs/observing.md) contains nothing of the
prompt or answer: for the route the path's pattern, for an error its `code` and `param`. Health
probes and /metrics get no line. A line that cannot be written never fails a request. Knows HTTP
messages and a call's metrics; no bodies."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import IO, Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.children.lifetime import LossyFile
from penstock.errors import FaultError, UsageError
from penstock.server.online.auth import PROBES, key_of
from penstock.server.online.metrics import CallMetrics
from penstock.server.openai.http_errors import CLOSED_BY_CLIENT, FAILED, names_of, status_of

STDERR = "-"
STDERR_FILE = 2  # file descriptor of standard error
WHAT = "the access log"


def open_log(where: str | None) -> Any:
    """Returns a context manager of the log file, opened for appending. where: its path, `-` for
    standard error, None for no log. Raises UsageError if it cannot be opened."""
    if where is None:
        return nullcontext()
    try:
        if where == STDERR:
            return LossyFile(STDERR_FILE, "wb", WHAT, closefd=False)
        return LossyFile(where, "ab", WHAT)
    except OSError as error:
        raise UsageError(
            f"the access log cannot be written ({error.strerror}): check --access-log"
        ) from error


class AccessLog:
    """ASGI middleware around the whole application, so that refused requests are logged too."""

    def __init__(self, app: ASGIApp, file: IO[bytes]) -> None:
        self._app, self._file = app, file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(PROBES):
            await self._app(scope, receive, send)
            return
        began, seen = time.perf_counter(), {"status": CLOSED_BY_CLIENT, "id": None}

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = [value for name, value in message["headers"] if name == b"x-request-id"]
                seen["status"], seen["id"] = (
                    message["status"],
                    found[0].decode("latin-1") if found else None,
                )
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception:  # after a bug, the answer is made outside this middleware
            if seen["status"] == CLOSED_BY_CLIENT:
                fault = FaultError(FAILED)
                seen["status"], scope.setdefault("state", {})["refused"] = (
                    status_of(fault),
                    names_of(fault),
                )
            raise
        finally:
            line = _line(scope, seen["status"], seen["id"], time.perf_counter() - began)
            # one write per line, so that lines of several servers don't mix
            self._file.write(msgspec.json.encode(line) + b"\n")


def _line(scope: Scope, status: Any, request_id: Any, seconds: float) -> dict[str, Any]:
    state, key = scope.get("state", {}), key_of(scope)
    line: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "method": scope["method"],  # the HTTP parser accepts only known methods
        "route": getattr(scope.get("route"), "path", None),
        "status": status,
        "key": None if key is None else key.name,
        "request_id": request_id,
    }
    metrics: CallMetrics | None = state.get("call_metrics")
    if metrics is not None:
        line |= {
            "stream": metrics.stream,
            "n": metrics.n,
            "prompt_tokens": metrics.prompt_tokens,
            "output_tokens": metrics.made,
            "first_token_seconds": None if metrics.first is None else round(metrics.first, 6),
            "finish_reasons": metrics.ends,
        }
    if "refused" in state:
        line["code"], line["param"] = state["refused"]
    return line | {"seconds": round(seconds, 6)}

"""What a request may cost before it is a request: the bytes of its body, and who may ask at all.

It knows HTTP messages; no form, no engine.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.refusals import BadKeyError, BodyTooLargeError, body_of

OPEN_PATHS = ("/health", "/health/live")  # what a prober without a key may ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """max_body_bytes: of one body; 32 MiB holds about 4 million token ids. drain_seconds: what running requests get
    after the first signal."""

    max_body_bytes: int = 32 * 1024 * 1024
    drain_seconds: float = 5.0


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to be."""
    limit = limits.max_body_bytes
    declared = request.headers.get("content-length", "")
    too_large = BodyTooLargeError(f"the body is larger than {limit} bytes: send it in parts")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise too_large
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


class KeyGate:
    """Lets through what brings `Authorization: Bearer KEY`; liveness needs none. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._wanted = b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._knows(scope):
            error = BadKeyError("this server wants its API key: send it as Authorization: Bearer KEY")
            refusal = Response(body_of(error), status_code=error.status, media_type="application/json")
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)

"""What a request may cost before it is a request: the bytes of its body.

It knows HTTP messages; no form, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.server.refusals import BodyTooLargeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """max_body_bytes: of one body; 32 MiB holds about 4 million token ids. drain_seconds: what running requests get
    after the first signal. step_timeout: seconds that an engine with work gets for a step, before it is ended."""

    max_body_bytes: int = 32 * 1024 * 1024
    drain_seconds: float = 30.0
    step_timeout: float = STEP_TIMEOUT


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

"""Limits of one server's HTTP messages. Limits bytes and seconds of headers and bodies, the
contents of bodies, connections, and the memory of whole answers. Knows HTTP messages; no JSON
fields, no engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.errors import UsageError

# bytes above which the event loop doesn't parse a body or a line itself, since many small values
# take up to 0.5 s per MB
LONG_BODY = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """The limits of one server. docs/http.md lists the error answer of each limit."""

    # bytes of one body; enough for 5 to 6 million token ids
    max_body_bytes: int = 32 * 1024 * 1024
    # values in one body's JSON; this and the next two are counted before it is parsed
    max_values: int = 8 * 1024 * 1024
    max_texts: int = 1024 * 1024  # most strings and field names in one body's JSON
    max_lists: int = 128 * 1024  # most lists and objects in one body's JSON
    max_prompts: int = 8_192  # most prompts of one body
    max_messages: int = 16_384
    max_parts: int = 65_536  # most content parts of all messages of one body
    # bytes of all buffered answers; above it the largest one is given up
    max_answer_bytes: int = 2 * 1024 * 1024 * 1024
    max_reading_bytes: int = 512 * 1024 * 1024  # most bytes of all bodies that are being received
    # bytes of all large bodies together, from their headers until they are token ids
    max_large_bytes: int = 64 * 1024 * 1024
    body_seconds: float = 30.0  # seconds to receive a body, plus one second per 16 KiB
    drain_seconds: float = 30.0  # seconds that running requests get after the first stop signal
    # seconds after which an engine that has work but completes no step is ended
    step_timeout: float = STEP_TIMEOUT
    # samples that wait or run; None: eight for each of the engine's rows
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None  # prompt tokens that wait or run; None: 16 Mi
    # seconds that a request may take; None: no limit
    request_seconds: float | None = None
    max_header_bytes: int = 64 * 1024  # most bytes of a request line and its headers
    header_seconds: float = 10.0  # seconds to receive the request line and headers
    stall_seconds: float = 60.0  # seconds that a client may leave 48 KiB of its answer unread
    max_connections: int | None = None  # open connections; None: as many as file descriptors allow
    # Work done in one turn of the event loop, while all other streams wait.
    turn_ids: int = 32_768  # token ids of a body that are checked in one turn; about 3 ms
    # tokens, and their likely alternatives, that are encoded in one turn; 2 to 4 ms
    turn_tokens: int = 8_192
    turn_events: int = 64  # events that are made before their bytes are counted
    piece_bytes: int = 256 * 1024  # bytes of an answer that are passed to the connection at once

    def check(self) -> None:
        """Raises UsageError for an invalid limit."""
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1", param=name)
        if self.request_seconds is not None and not 0 < self.request_seconds < math.inf:
            raise UsageError("request_timeout must be above 0 seconds", param="request_timeout")


USUAL = HttpLimits()

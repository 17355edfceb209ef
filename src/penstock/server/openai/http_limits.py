"""Limits of one server: bytes and seconds of headers and bodies, contents of bodies, connections,
and memory of whole answers. Knows HTTP messages; no form, no engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.errors import UsageError

# bytes of a body or a line that the event loop doesn't parse itself: many small parts take up to
# 0.5 s per MB
LONG_BODY = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """The limits of one server; `docs/http.md` lists the answer past each of them."""

    # bytes of one body; enough for 5 to 6 million token ids of usual length
    max_body_bytes: int = 32 * 1024 * 1024
    # limits of one body's JSON, counted before it is parsed; first, its values
    max_values: int = 8 * 1024 * 1024
    max_texts: int = 1024 * 1024  # texts and names
    max_lists: int = 128 * 1024  # lists and objects
    max_prompts: int = 8_192  # prompts of one body
    max_messages: int = 16_384
    max_parts: int = 65_536  # parts of all messages of one body
    # bytes of all buffered answers; above it the largest one is given up
    max_answer_bytes: int = 2 * 1024 * 1024 * 1024
    max_reading_bytes: int = 512 * 1024 * 1024  # bytes of all bodies being received
    # bytes of all large bodies, from their heads until they are token ids
    max_large_bytes: int = 64 * 1024 * 1024
    body_seconds: float = 30.0  # seconds for a body, and one more per 16 KiB
    drain_seconds: float = 30.0  # seconds that running requests get after the first signal
    # seconds after which an engine that has work but completes no step is ended
    step_timeout: float = STEP_TIMEOUT
    # open samples; None: eight for each of the engine's rows
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None  # open prompt tokens; None: 16 Mi
    # seconds that a request may take; None: no limit
    request_seconds: float | None = None
    max_header_bytes: int = 64 * 1024  # bytes of a request line and its headers
    header_seconds: float = 10.0  # seconds for the request line and headers
    stall_seconds: float = 60.0  # seconds that a client may leave 48 KiB of its answer unread
    max_connections: int | None = None  # None: as many as file descriptors allow
    # Work done in one turn of the event loop, during which all other streams wait.
    turn_ids: int = 32_768  # token ids of a body that are checked; about 3 ms
    turn_tokens: int = 8_192  # tokens, and likely alternatives, that are written; 2 to 4 ms
    turn_events: int = 64  # events made before their bytes are counted
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

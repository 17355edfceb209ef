"""What a request may cost before it is a request: bytes and seconds of headers and body, what a
body may hold, connections; and what whole answers may take. It knows HTTP messages; no form, no
engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.errors import UsageError

# Bytes of a body, or a line, that the loop doesn't read itself: up to 0.5 s a MB, where it has many
# small parts.
LONG_BODY = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one server takes; `docs/http.md` says what past each limit is answered."""

    # of one body; holds 5 to 6 million token ids as models have them
    max_body_bytes: int = 32 * 1024 * 1024
    # of one body's JSON, counted before it is parsed: what stands between commas
    max_values: int = 8 * 1024 * 1024
    max_texts: int = 1024 * 1024  # ... texts and names
    max_lists: int = 128 * 1024  # ... lists and objects
    max_prompts: int = 8_192  # of one body
    max_messages: int = 16_384
    max_parts: int = 65_536  # of all messages of one body
    # of all buffered answers; past it the largest is given up
    max_answer_bytes: int = 2 * 1024 * 1024 * 1024
    max_reading_bytes: int = 512 * 1024 * 1024  # of all bodies that are being received
    # of all large bodies, from their heads until they are token ids
    max_large_bytes: int = 64 * 1024 * 1024
    body_seconds: float = 30.0  # that a body may take, and one more for each 16 KiB of it
    drain_seconds: float = 30.0  # that running requests get after the first signal
    step_timeout: float = (
        STEP_TIMEOUT  # seconds that an engine with work gets for a step, before it is ended
    )
    max_num_queued_reqs: int | None = (
        None  # samples that may be open; None: eight for each of the engine's rows
    )
    max_num_queued_tokens: int | None = None  # prompt tokens that may be open; None: 16 Mi
    request_seconds: float | None = (
        None  # the longest that a request may take; None: as long as it does
    )
    max_header_bytes: int = 64 * 1024  # of a request line and its headers
    header_seconds: float = 10.0  # that they may take
    stall_seconds: float = 60.0  # that a reader may leave 48 KiB of its answer untaken
    max_connections: int | None = None  # None: as many as the process may have
    # What is done at once between two turns of the loop, on which every other client's stream is.
    turn_ids: int = 32_768  # token ids of a body that are looked at; about 3 ms
    turn_tokens: int = 8_192  # tokens, and likely ones, that are written; 2 to 4 ms
    turn_events: int = 64  # events that are made before it is looked at how many bytes they are
    piece_bytes: int = 256 * 1024  # of an answer that are handed to the connection

    def check(self) -> None:
        """Raises UsageError."""
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1", param=name)
        if self.request_seconds is not None and not 0 < self.request_seconds < math.inf:
            raise UsageError("request_timeout must be above 0 seconds", param="request_timeout")


USUAL = HttpLimits()

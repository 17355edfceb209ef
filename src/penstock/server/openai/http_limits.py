"""What a request may cost before it is a request: bytes and seconds of its headers and its body, what a body may hold,
connections; and what whole answers may take.

It knows HTTP messages; no form, no engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """max_body_bytes: of one body. max_values, max_texts, max_lists: of one body's JSON: what stands between commas;
    texts and names; lists and objects. They are counted before it is parsed (values.py); 32 MiB hold 5 to 6 million
    token ids as models have them. max_prompts, max_messages, max_parts: of one body; parts are those of all messages.
    max_answer_bytes: of all whole answers that are being written or are on their way; past it the largest is given up.
    max_reading_bytes: of all bodies that are being received. max_large_bytes: of all bodies above LARGE, from their
    heads until they are token ids; past it they are told 503 by their heads. body_seconds: that a body may take, and
    one more for each 16 KiB of it. drain_seconds: what running requests get after the first signal. step_timeout:
    seconds that an engine with work gets for a step, before it is ended. max_num_queued_reqs, max_num_queued_tokens:
    admission.py's bounds; None: eight samples a row, and 16 Mi tokens. request_seconds: the longest that a request may
    take; None: as long as it does. max_header_bytes, header_seconds: of a request line and its headers. stall_seconds:
    that a reader may leave 48 KiB of its answer untaken. max_connections: None: as many as the process may have.
    """

    max_body_bytes: int = 32 * 1024 * 1024
    max_values: int = 8 * 1024 * 1024
    max_texts: int = 1024 * 1024
    max_lists: int = 128 * 1024
    max_prompts: int = 8_192
    max_messages: int = 16_384
    max_parts: int = 65_536
    max_answer_bytes: int = 2 * 1024 * 1024 * 1024
    max_reading_bytes: int = 512 * 1024 * 1024
    max_large_bytes: int = 64 * 1024 * 1024
    body_seconds: float = 30.0
    drain_seconds: float = 30.0
    step_timeout: float = STEP_TIMEOUT
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    request_seconds: float | None = None
    max_header_bytes: int = 64 * 1024
    header_seconds: float = 10.0
    stall_seconds: float = 60.0
    max_connections: int | None = None

    def check(self) -> None:
        """Raises UsageError."""
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1", param=name)
        if self.request_seconds is not None and not 0 < self.request_seconds < math.inf:
            raise UsageError("request_timeout must be above 0 seconds", param="request_timeout")


USUAL = HttpLimits()

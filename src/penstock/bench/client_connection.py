"""One HTTP connection of a client process. It sends a request and reads its answer (httptools,
response_reader.py); times are stamped as bytes arrive. Knows one request at a time; not which one
comes next.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import cast

import httptools

from penstock.bench.response_reader import ErrorReader, StreamReader, judge
from penstock.bench.worker_protocol import PlannedRequest

# seconds: if a reused connection ends this soon after a send, without a byte, the server closed it
# because it was idle; the request is sent again
RACE = 0.25
LONGEST_HEAD = 64 << 10  # most bytes of an answer outside its body (HTTP heads, chunk lengths)
# an answer is cut off after twice its requested tokens and this many more events; `judge` reports
# answers that are slightly too long
EVENTS_OVER = 1000
NEVER = float("nan")


@dataclass(slots=True, eq=False)
class SentRequest:
    """A request and its result. Instants are on the monotonic clock; `outcome` is None while the
    request runs."""

    number: int
    ask: PlannedRequest
    intended: float
    window: bool = False
    # instant at which the client began to send it; minus `intended` it is the client's lateness
    taken: float = NEVER
    actual: float = NEVER
    heard: float = NEVER  # instant at which the answer's last byte arrived
    end: float = NEVER
    answer: StreamReader | None = None
    connection: ClientConnection | None = None
    outcome: str | None = None
    message: str = ""
    again: bool = False  # True once it has been sent a second time: see RACE


class ClientConnection(asyncio.Protocol):
    """Carries one request at a time. head: the constant part of every request's head. ended: called
    when a request has an outcome; the connection can be used again if it is `reusable`. httptools
    calls on_header, on_headers_complete, on_body and on_message_complete.
    """

    def __init__(self, head: bytes, ended: Callable[[ClientConnection, SentRequest], None]) -> None:
        self._head, self._ended = head, ended
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._post: SentRequest | None = None
        self._answer: StreamReader | None = None
        # True if the answer's length is known, so that the connection can be used again
        self._framed = False
        self._whole = False
        self._beside = 0  # bytes since the last body bytes: heads, trailers, chunk lengths
        # most streamed events of an answer; after more, the client gives it up
        self._most = math.inf
        self._now = 0.0
        self.used = 0  # number of requests sent over this connection
        self.kept = False  # True if the connection was idle before this request
        self.reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # cast, since uvloop's class does not derive from asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def send(self, post: SentRequest) -> None:
        assert self._transport is not None and self._post is None
        self._post, post.connection = post, self
        self._answer, self._framed, self._whole, self._beside = None, False, False, 0
        asked = max(post.ask.asked_output, post.ask.most_output)
        self._most = math.inf if asked < 0 else EVENTS_OVER + 2 * asked
        self.used += 1
        words = b"%b%d\r\n\r\n%b" % (self._head, len(post.ask.body), post.ask.body)
        # stamp before writing: a process descheduled after the write would make the server look
        # faster
        post.actual = post.heard = monotonic()
        self._transport.write(words)

    def data_received(self, data: bytes) -> None:
        self._now = now = monotonic()
        post = self._post
        if post is None:
            self.close()  # bytes came while no request is open
            return
        post.heard = now
        self._beside += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # a fault of the client's code, not the server's
            raise RuntimeError("a callback of the parser failed") from error
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._settle("broken", f"no HTTP ({error}): {data[:200]!r}")
            return
        answer = self._answer
        if self._whole:
            self._complete(post)
        elif answer is not None and answer.fault is not None:
            self._settle(*answer.fault)
        elif self._beside > LONGEST_HEAD:
            self._settle(
                "broken", f"{self._beside} bytes that are no part of a body: {data[:200]!r}"
            )
        elif answer is not None and len(answer.times) > self._most:
            self._settle(
                "usage",
                f"{len(answer.times)} events with output, and far fewer tokens were asked for",
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        self.reusable = self._parser.should_keep_alive()
        self._answer = ErrorReader(status) if status != 200 else StreamReader()
        if self._post is not None:
            self._post.answer = self._answer

    def on_body(self, data: bytes) -> None:
        self._beside = 0
        if self._answer is not None:
            self._answer.feed(data, self._now)

    def on_message_complete(self) -> None:
        self._whole = self._answer is not None  # False for a 100 Continue, which is no answer

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self.reusable = None, False
        post = self._post
        if post is None:
            return  # the connection was idle; its next user checks `reusable`
        if self._answer is not None and not self._framed and error is None:
            self._whole = True
            self._complete(post)  # without a stated length, the connection's end ends the answer
        else:
            told = (
                "nothing of an answer had come"
                if self._answer is None
                else "in the middle of the answer"
            )
            self._settle("cut", f"the connection ended, {told} ({error or 'closed by the server'})")

    def abandon(self, outcome: str, message: str) -> None:
        """Ends the current request, if any, and the connection."""
        if self._post is None:
            self.close()
        else:
            self._settle(outcome, message)

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def was_raced(self, post: SentRequest) -> bool:
        """Returns True if the server may have closed the idle connection before it saw this
        request."""
        return (
            self._answer is None and self.kept and not post.again and post.end - post.actual < RACE
        )

    def _complete(self, post: SentRequest) -> None:
        assert self._answer is not None
        self._answer.finish()
        verdict = judge(
            self._answer, post.ask.asked_prompt, post.ask.asked_output, post.ask.most_output
        )
        self._settle(*(verdict or ("ok", "")))

    def _settle(self, outcome: str, message: str) -> None:
        post = self._post
        assert post is not None
        self._post, post.connection = None, None
        if self._answer is not None:
            self._answer.let_go()
        post.outcome, post.message = outcome, message
        post.end = post.heard if self._whole else monotonic()
        if not self._whole:
            self.close()  # further bytes on this connection could belong to the old answer
        self._ended(self, post)

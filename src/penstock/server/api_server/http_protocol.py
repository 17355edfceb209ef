"""A connection's limits before uvicorn's: bytes and seconds of a request's head, seconds that a
reader may take nothing, and how many connections there are. What goes past one ends, with an answer
in OpenAI's shape where one can still be given. pyproject.toml bounds uvicorn to the versions whose
protocol this was tried on. It knows HTTP on the wire; no routes.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from penstock.server.online.auth import PROBES, AccessPolicy
from penstock.server.online.buffered import JSON
from penstock.server.openai.http_errors import HttpError, body_of
from penstock.server.openai.http_limits import HttpLimits

# connections beyond the most: for probes, for those that haven't asked yet, and to tell the others
SPARE = 64
# seconds that what a client still sends is read and thrown away, so that it gets to its answer
LINGER = 1.0
OTHER_FILES = 256  # descriptors that are no connections
_PROBES = tuple(path.encode() for path in PROBES)


def most_connections(limits: HttpLimits, *, files: bool) -> int:
    """What was said, else what the process may have: its limit on descriptors is raised as far as
    it goes. files: a connection may hold a second one, of the file that it sends or gets."""
    if limits.max_connections is not None:
        return limits.max_connections
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1_048_576 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max((most - OTHER_FILES - SPARE) // (1 + files), 16)


def http_protocol(
    limits: HttpLimits, *, files: bool = False, access: AccessPolicy | None = None
) -> type[asyncio.Protocol]:
    """The protocol class for uvicorn. files: as above; access: whose pages may read what is refused
    here."""
    most = most_connections(limits, files=files)
    parts = {"limits": limits, "most": most, "idle": {}, "access": access or AccessPolicy()}
    return type("LimitedConnection", (HttpProtocol,), parts | {"__slots__": ()})


def _no_http(message: str) -> HttpError:
    return HttpError(message, code="invalid_http")


def _nothing() -> None:
    """What an answer that never comes does at its end."""


class _RefusedError(Exception):
    """Ends the parser: what is behind a refusal isn't looked at."""


class HttpProtocol(HttpToolsProtocol):
    """One client's connection. A head is the request line and the headers."""

    limits: HttpLimits
    access: AccessPolicy
    most: int  # that may wait for an answer
    # those that wait for none; first the one that has for the longest
    idle: dict[HttpProtocol, None]
    # uvicorn's attributes are 28, and of more than 30 CPython makes a dict of its own for each
    # connection.
    __slots__ = (
        "_answering",
        "_head_bytes",
        "_head_open",
        "_head_timer",
        "_progress",
        "_refused",
        "_upgrade",
        "_write_timer",
    )

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_open = True  # no head has come whole since the last request did
        self._head_bytes = (
            0  # of the head that is coming, or of what came since the body's last byte
        )
        self._progress = False  # what is being parsed has more in it than a piece of one of these
        self._refused = False  # answered by us: what still comes is thrown away
        self._upgrade = False  # the head asks for another protocol, which isn't served
        self._answering: RequestResponseCycle | None = (
            None  # what was begun last; `cycle` is what was read last
        )
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # -- the transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # An answer is two writes. asyncio sets this for sockets that name their protocol, which not
        # all do; without it each answer on a kept connection took 44 ms (Nagle's algorithm against
        # delayed acknowledgements).
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport = _Lingering(transport, self)  # type: ignore[assignment]  # a transport but for its close()
        self.idle[self] = None
        self._wait_for_head()
        if len(self.connections) > self.most + SPARE:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self.idle.pop(self, None)
        super().connection_lost(exc)
        self._disconnect()
        # What is left must not hold itself together: it would lie there until the collector comes,
        # which is seldom.
        self._unset_keepalive_if_required()
        for waiting, _ in self.pipeline:
            waiting.on_response = _nothing  # they are never begun
        self.pipeline.clear()
        if isinstance(self.transport, _Lingering):
            self.transport.connection = None

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._progress = False
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._refused or self.transport.is_closing():
            return
        # Of a mixed read its part isn't known; a read is 256 KB at most, and the next counts whole.
        if not self._progress:
            self._head_bytes += len(data)
        if self._head_bytes > self.limits.max_header_bytes:
            self._refuse(self._too_large())
        elif self._head_open and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()

    def _parse(self, data: bytes) -> None:
        """Parses all of it: behind a request that asks for another protocol the parser stops, and
        begins anew."""
        coming: list[bytes | memoryview] = [data]
        while coming and not self._refused:
            piece = coming.pop()
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                coming += [memoryview(piece)[upgrade.args[0] :], self._without_upgrade()]
            except httptools.HttpParserError:
                self._refuse(_no_http("these bytes are no HTTP request: send HTTP/1.1"))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:  # one that takes nothing is cancelled, as one that goes away
            self._write_timer = self.loop.call_later(
                self.limits.stall_seconds, self.transport.abort
            )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
            self.flow.resume_reading()

    # -- the parser's calls

    def on_message_begin(self) -> None:
        if self._refused:
            raise _RefusedError
        super().on_message_begin()
        self._head_bytes = 1

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_open:  # else it stands behind a body, and nobody reads it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self.idle.pop(self, None)
        if (error := self._beyond()) is not None:
            self._refuse(error)
            return
        self._head_open, self._head_bytes, self._progress = False, 0, True
        if self.parser.should_upgrade():
            self._upgrade = True
        else:
            super().on_headers_complete()
            if not self.pipeline:
                self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._head_bytes, self._progress = 0, True
        if not (self._refused or self._upgrade):
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refused or self._upgrade:
            return
        self._head_open, self._head_bytes, self._progress = True, 0, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        else:
            self.idle[self] = None
        super().on_response_complete()

    def still_sending(self) -> bool:
        """Asked when the connection is to be closed: whether the client may still send. From here
        on that is thrown away."""
        sending = self._refused or not self._head_open
        self._refused = True
        return sending

    # -- what goes past a limit

    def _beyond(self) -> HttpError | None:
        """Returns why the head that is here is refused."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            return self._too_large()
        if len(self.connections) - len(self.idle) > self.most and not self.url.startswith(_PROBES):
            message = "the server has as many connections as it takes: send this again in a moment"
            return HttpError(
                message, status=429, code="too_many_connections", headers={"retry-after": "1"}
            )
        return None

    def _make_room(self) -> None:
        """Ends the connection that has waited for no answer for the longest; this one, where all
        others wait."""
        oldest = next((each for each in self.idle if each is not self), self)
        del self.idle[oldest]
        self.connections.discard(oldest)  # it goes when the loop has turned
        oldest.transport.abort()

    def _without_upgrade(self) -> bytes:
        """Returns the request's head again, as if it had not asked for another protocol, for a new
        parser: some clients (Java's) always do, and their bodies are behind it. Nothing where it is
        refused."""
        if not self._upgrade or self._refused:
            return b""
        self._upgrade, self._head_open = False, True
        method = self.parser.get_method()
        dropped = (b"upgrade", b"connection", b"http2-settings")
        kept = b"".join(
            b"%b: %b\r\n" % (name, value) for name, value in self.headers if name not in dropped
        )
        self.parser = httptools.HttpRequestParser(self)
        if method == b"CONNECT":
            self._refuse(_no_http("this is no proxy: send a request of its own"))
            return b""
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, self.url, kept)

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_seconds, self._head_too_slow)

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if not self._head_bytes:
            self.transport.close()  # it never asked for anything
        else:
            message = (
                f"the headers took longer than {self.limits.header_seconds:g} s: send them at once"
            )
            self._refuse(HttpError(message, status=408, code="headers_too_slow"))

    def _too_large(self) -> HttpError:
        message = f"the headers are larger than {self.limits.max_header_bytes} bytes: send fewer"
        return HttpError(message, status=431, code="headers_too_large")

    def _refuse(self, error: HttpError) -> None:
        """Answers, where there is still place for an answer, and closes. What waited for its turn
        is never begun."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self.idle[self] = None
        begun = self._answering
        answered = begun is not None and begun.response_complete and not self._head_open
        if begun is not None and not begun.response_complete:
            # in the middle of an answer there is no place for another
            answered = begun.response_started
            self._disconnect()
        if not answered:
            self._answer(error)
        self.transport.close()

    def _disconnect(self) -> None:
        """Tells the request that was begun that nobody waits for it: uvicorn tells the one that was
        read last."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _answer(self, error: HttpError) -> None:
        body = body_of(error)
        page = self.access.answer_headers(self.headers if self.headers is not None else ())
        fields = {
            **error.headers,
            **page,
            "content-type": JSON,
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = [f"{name}: {value}\r\n".encode() for name, value in fields.items()]
        self.transport.write(b"".join((STATUS_LINE[error.status], *lines, b"\r\n", body)))


class _Lingering:
    """A transport that doesn't close on a client that still sends: that would take from it the
    answer that it hasn't read. It hears the end, and gets LINGER to come to it."""

    def __init__(self, transport: asyncio.Transport, connection: HttpProtocol) -> None:
        self._transport = transport
        self.connection: HttpProtocol | None = connection  # until it is lost
        self._ending = False
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._ending or self._transport.is_closing()

    def close(self) -> None:
        if self.connection is None or self.is_closing():
            return
        if not self.connection.still_sending():
            self._transport.close()
            return
        self._ending = True
        self._transport.resume_reading()
        if self._transport.can_write_eof():  # TLS has no end of one side alone
            self._transport.write_eof()
        self.connection.loop.call_later(LINGER, self._transport.close)

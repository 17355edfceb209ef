"""Uvicorn's HTTP protocol with limits per connection. Limits the bytes and seconds of a request's
head (request line and headers), the seconds that a client may read nothing, and the number of
connections. A connection past a limit is closed, with an error in OpenAI's format if an answer is
still possible. Other bounds are a reverse proxy's (docs/open_server.md). pyproject.toml allows only
the versions of uvicorn that this was tested with. Knows HTTP on the wire; no routes."""

from __future__ import annotations

import asyncio
import resource
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

# connections accepted beyond the limit: health probes, clients before their first request, and
# clients that get an error
SPARE = 64
# seconds in which a closing connection still reads and drops bytes, so that the client can read its
# answer
LINGER = 1.0
OTHER_FILES = 256  # file descriptors left for other uses than connections
_PROBES = tuple(path.encode() for path in PROBES)


def most_connections(limits: HttpLimits, *, files: bool) -> int:
    """Returns the configured limit of connections, or as many as file descriptors allow. Raises the
    process's limit of descriptors first. files: True if a connection may need a second descriptor,
    for a file that it uploads or downloads."""
    if limits.max_connections is not None:
        return limits.max_connections
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1_048_576 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max((most - OTHER_FILES - SPARE) // (1 + files), 16)


def http_protocol(
    limits: HttpLimits, *, files: bool = False, access: AccessPolicy | None = None
) -> type[asyncio.Protocol]:
    """Returns the protocol class for uvicorn. files: see most_connections. access: the policy that
    gives the CORS headers of error answers."""
    most = most_connections(limits, files=files)
    parts = {"limits": limits, "most": most, "idle": {}, "access": access or AccessPolicy()}
    return type("LimitedConnection", (HttpProtocol,), parts)


def _no_http(message: str) -> HttpError:
    return HttpError(message, code="invalid_http")


class HttpProtocol(HttpToolsProtocol):
    """One client's connection. "Head" means the request line and the headers."""

    transport: Any
    limits: HttpLimits
    access: AccessPolicy
    most: int  # most connections that wait for an answer
    # all connections that wait for no answer, the longest idle first
    idle: dict[HttpProtocol, None]

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_open = True  # True until the headers of the next request are complete
        # bytes received since the last complete head or part of a body
        self._head_bytes = 0
        # True once a request was refused, after which further bytes are dropped
        self._refused = False
        # the request being answered; `cycle` is the last one read
        self._answering: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # -- callbacks of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # behaves like the transport, except for close()
        self.transport = _Lingering(transport, self)
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
        # Break reference cycles: the garbage collector, which runs rarely, would free them late.
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]
        self.transport.connection = None

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        # A complete head or part of a body in this read sets it to 0. What the read holds of the
        # next head is then not counted: 256 KB at most.
        self._head_bytes += len(data)
        self._parse(data)
        if self._refused or self.transport.is_closing():
            return
        if self._head_bytes > self.limits.max_header_bytes:
            self._refuse(self._too_large())
        elif self._head_open and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()

    def _parse(self, data: bytes) -> None:
        """Parses all of `data`. After a request that asks for another protocol (Upgrade) the parser
        stops, and a new one continues."""
        coming = [memoryview(data)]
        while coming and not self._refused:
            piece = coming.pop()
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                coming += [piece[upgrade.args[0] :], memoryview(self._without_upgrade())]
            except httptools.HttpParserError:
                self._refuse(_no_http("these bytes are no HTTP request: send HTTP/1.1"))

    def pause_writing(self) -> None:
        super().pause_writing()
        # closes the connection of a client that reads nothing, as if it had left
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(
                self.limits.stall_seconds, self.transport.abort
            )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # -- callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_open:  # trailers after a body are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._refused or self.parser.should_upgrade():
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self.idle.pop(self, None)
        if (error := self._beyond()) is not None:
            self._refuse(error)
            return
        self._head_open, self._head_bytes = False, 0
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refused or self.parser.should_upgrade():
            return
        self._head_open, self._head_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        else:
            self.idle[self] = None
        super().on_response_complete()

    def still_sending(self) -> bool:
        """Returns True if the client may still be sending. Called before the connection closes;
        further bytes are dropped."""
        sending = self._refused or not self._head_open
        self._refused = True
        return sending

    # -- refusing requests

    def _beyond(self) -> HttpError | None:
        """Returns the error of a complete head that exceeds a limit, or None."""
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
        """Closes the longest idle connection, or this one if all others wait for an answer."""
        oldest = next((each for each in self.idle if each is not self), self)
        del self.idle[oldest]
        self.connections.discard(oldest)  # uvicorn would remove it only on the loop's next turn
        oldest.transport.abort()

    def _without_upgrade(self) -> bytes:
        """Returns the request's head without its Upgrade header, for a new parser. Some clients
        (Java's) always send that header, and their body after it."""
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
            self.transport.close()  # the client has sent no request at all
        else:
            message = (
                f"the headers took longer than {self.limits.header_seconds:g} s: send them at once"
            )
            self._refuse(HttpError(message, status=408, code="headers_too_slow"))

    def _too_large(self) -> HttpError:
        message = f"the headers are larger than {self.limits.max_header_bytes} bytes: send fewer"
        return HttpError(message, status=431, code="headers_too_large")

    def _refuse(self, error: HttpError) -> None:
        """Sends the error, if an answer is still possible, and closes the connection. Pipelined
        requests are not begun."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self.idle[self] = None
        begun = self._answering
        answered = begun is not None and begun.response_complete and not self._head_open
        if begun is not None and not begun.response_complete:
            # an answer that has begun cannot be replaced by an error
            answered = begun.response_started
            self._disconnect()
        if not answered:
            self._answer(error)
        self.transport.close()

    def _disconnect(self) -> None:
        """Tells the request being answered that its client has left. uvicorn tells only the request
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
    """A transport whose close() waits up to LINGER seconds while the client still sends. Closing at
    once could destroy the answer before the client has read it. The client gets an end of file
    meanwhile."""

    def __init__(self, transport: asyncio.Transport, connection: HttpProtocol) -> None:
        self._transport = transport
        self.connection: HttpProtocol | None = connection  # None once the connection is closed
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
        if self._transport.can_write_eof():  # TLS cannot close one direction alone
            self._transport.write_eof()
        self.connection.loop.call_later(LINGER, self._transport.close)

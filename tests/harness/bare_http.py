"""HTTP over a bare socket, for what no client library sends or hears. It knows no route."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CLOSE = "connection: close"


def request(
    body: bytes | dict[str, Any] = b"",
    *headers: str,
    path: str = COMPLETIONS,
    method: str = "POST",
    version: str = "1.1",
) -> bytes:
    """A request's bytes; the length is said unless a header says one or chunks."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "host: localhost", *headers]
    if not any(
        line.lower().startswith(("content-length", "transfer-encoding")) for line in headers
    ):
        lines.append(f"content-length: {len(data)}")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + data


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    # ends a test that would never end
    return socket.create_connection((host, int(port)), timeout=600)


def exchange(url: str, data: bytes) -> tuple[int, bytes]:
    """Sends all of it, whatever comes meanwhile, and reads to the connection's end -> status,
    body."""

    def send() -> None:
        with contextlib.suppress(OSError):  # it had its answer already
            connection.sendall(data)

    with connect(url) as connection:
        sender = threading.Thread(target=send)
        sender.start()
        whole = read_all(connection)
        sender.join(30)
    return int(whole.split()[1]), whole.partition(b"\r\n\r\n")[2]


def read_one(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one answer, on a connection that stays open; nothing may follow it."""
    whole = b""
    while b"\r\n\r\n" not in whole:
        piece = connection.recv(65_536)
        assert piece, whole
        whole += piece
    head, _, body = whole.partition(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(body) < size:
        body += connection.recv(65_536)
    assert len(body) == size, body
    return head, body


def read_all(connection: socket.socket) -> bytes:
    """To the end of the connection."""
    whole = b""
    while piece := connection.recv(65_536):
        whole += piece
    return whole

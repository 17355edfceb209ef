"""HTTP over a bare socket, for what no client library sends or hears. It knows no path and no body."""

from __future__ import annotations

import socket

from server_fake import Running


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def read_one(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one answer, on a connection that stays open; nothing may follow it."""
    whole = b""
    while b"\r\n\r\n" not in whole:
        whole += connection.recv(65_536)
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

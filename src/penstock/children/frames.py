"""Frames: words of msgpack over a socket between two processes, each behind its length.

    blocking    send, receive
    polled      Frames.read, when the socket is ready
    by an event loop    frame, and missing_of what has come so far

It knows bytes and sockets; no words.
"""

from __future__ import annotations

import socket

import msgspec

HEADER = 8  # bytes of a frame's length, little-endian, before it
PIECE = 65_536  # bytes that are received at once, or more


def frame(word: msgspec.Struct) -> bytearray:
    """Returns the word's bytes with their length before them."""
    data = bytearray(HEADER)
    msgspec.msgpack.Encoder().encode_into(word, data, HEADER)
    data[:HEADER] = (len(data) - HEADER).to_bytes(HEADER, "little")
    return data


def send(channel: socket.socket, data: bytes | bytearray) -> None:
    """Sends a word's bytes, their length before them. Raises OSError where nobody takes them."""
    channel.sendall(len(data).to_bytes(HEADER, "little"))
    channel.sendall(data)


def receive(channel: socket.socket) -> bytearray | None:
    """Waits for a word's bytes. Returns None at the socket's end, or where the other side has gone
    amid a word."""
    head = _exactly(channel, HEADER)
    return None if head is None else _exactly(channel, int.from_bytes(head, "little"))


def missing_of(data: bytearray) -> int:
    """Returns how many bytes, at least, a frame lacks of which so much has come, its length too."""
    size = int.from_bytes(data[:HEADER], "little") if len(data) >= HEADER else 0
    return HEADER + size - len(data)


class Frames:
    """Cuts what comes out of a socket into words' bytes."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._data = channel, bytearray()

    def read(self) -> list[bytes]:
        """Receives once. Returns the words that are whole. Raises EOFError at the socket's end,
        OSError."""
        piece = self._channel.recv(PIECE)
        if not piece:
            raise EOFError
        self._data += piece
        found = []
        while missing_of(self._data) <= 0:
            end = HEADER + int.from_bytes(self._data[:HEADER], "little")
            found.append(bytes(self._data[HEADER:end]))
            del self._data[:end]
        return found


def _exactly(channel: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    rest = memoryview(data)
    while rest.nbytes:
        try:
            got = channel.recv_into(rest)
        except ConnectionError:
            return None
        if not got:
            return None
        rest = rest[got:]
    return data

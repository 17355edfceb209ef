"""Frames: length-prefixed msgpack messages over a socket.

    blocking    send, receive
    polled      Frames.read, when the socket is ready
    asyncio     frame to send; missing_of says how many bytes to read next

Knows bytes and sockets; not what the messages mean.
"""

from __future__ import annotations

import socket

import msgspec

HEADER = 8  # bytes of the length prefix of each message, little-endian
PIECE = 65_536  # most bytes that one call of `recv` reads


def frame(word: msgspec.Struct) -> bytearray:
    """Returns the message's msgpack bytes after their length prefix."""
    data = bytearray(HEADER)
    msgspec.msgpack.Encoder().encode_into(word, data, HEADER)
    data[:HEADER] = (len(data) - HEADER).to_bytes(HEADER, "little")
    return data


def send(channel: socket.socket, data: bytes | bytearray) -> None:
    """Sends the length prefix and a message's bytes. Raises OSError if the peer is gone."""
    channel.sendall(len(data).to_bytes(HEADER, "little"))
    channel.sendall(data)


def receive(channel: socket.socket) -> bytearray | None:
    """Waits for a message and returns its bytes. Returns None if the peer closes the socket, also
    in the middle of a message."""
    head = _exactly(channel, HEADER)
    return None if head is None else _exactly(channel, int.from_bytes(head, "little"))


def missing_of(data: bytearray) -> int:
    """Returns the least number of further bytes that complete the first frame of `data`."""
    size = int.from_bytes(data[:HEADER], "little") if len(data) >= HEADER else 0
    return HEADER + size - len(data)


class Frames:
    """Splits the bytes received from a socket into messages."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._data = channel, bytearray()

    def read(self) -> list[bytes]:
        """Calls `recv` once and returns the messages that are now complete. Raises EOFError if the
        peer has closed the socket, and OSError."""
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

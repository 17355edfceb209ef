"""Frames: words that come over a socket, each behind its length. It knows bytes."""

from __future__ import annotations

import socket

from penstock.text.sandbox_process import HEADER, PIECE, missing_of


class Frames:
    """What comes out of a socket, cut into frames."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._data = channel, bytearray()

    def read(self) -> list[bytes]:
        """Receives once. Returns the frames that are whole. Raises EOFError at the socket's end, OSError."""
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

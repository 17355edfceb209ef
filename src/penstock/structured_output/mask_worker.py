"""MaskWorker: one of the processes that make masks or try forms, as the engine knows it: its
places, the forms that it was handed, and words on their way to it.

A process that is busy, or stopped, doesn't read; its socket is full then, and whoever sends more
would stand still. So words wait here, in their order, until there is room. It knows words and
sockets; no rows.
"""

from __future__ import annotations

import contextlib
import socket

import msgspec

from penstock.children.frames import Frames, frame

UNSENT = (
    128 * 2**20
    # bytes of words that wait, from which on a process is given up: all open requests send half of
    # it
)


class MaskWorker:
    """One process. unsent: what waits until its socket takes it."""

    def __init__(self, index: int, channel: socket.socket, places: range) -> None:
        self.index, self.places = index, places
        self.free = list(places)
        self.compiling: set[int] = set()  # forms that are known nowhere yet
        self.connect(channel)

    def connect(self, channel: socket.socket) -> None:
        """Takes the socket of a process that has begun."""
        self.channel, self.frames, self.died = channel, Frames(channel), False
        self.forms: set[int] = set()  # that it was handed
        self.unsent = bytearray()

    def send(self, word: msgspec.Struct) -> None:
        """Sends a word behind those that wait, or has it wait. Where too much does, the process is
        given up: whoever reads finds the socket's end, as of one that has died."""
        if self.died:
            return
        self.unsent += frame(word)
        self.flush()
        if len(self.unsent) > UNSENT:
            self.unsent.clear()
            with contextlib.suppress(OSError):
                self.channel.shutdown(socket.SHUT_RDWR)

    def flush(self) -> None:
        """Sends what the socket takes at once."""
        while self.unsent and not self.died:
            try:
                del self.unsent[: self.channel.send(self.unsent, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                return
            except OSError:  # who reads finds the socket's end
                self.unsent.clear()

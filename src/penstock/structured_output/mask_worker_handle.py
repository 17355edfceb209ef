"""MaskWorker: the engine's handle of a mask process. Also of the trial process. Has its places, its
grammars, and the messages to it.

A busy or stopped process doesn't read; its socket fills up, and sending would block. So messages
wait here, in order, until the socket has room. Knows messages and sockets; no rows.
"""

from __future__ import annotations

import contextlib
import socket

import msgspec

from penstock.children.frames import Frames, frame

UNSENT = (
    128 * 2**20
    # most bytes of unsent messages; above it the process counts as dead. All open requests together
    # send at most half of this.
)


class MaskWorker:
    """One process, as seen by the engine. unsent: bytes that wait for room in the socket."""

    def __init__(self, index: int, channel: socket.socket, places: range) -> None:
        self.index, self.places = index, places
        self.free = list(places)
        self.compiling: set[int] = set()  # numbers of the grammars that this process is compiling
        self.connect(channel)

    def connect(self, channel: socket.socket) -> None:
        """Takes the socket of a newly started mask process."""
        self.channel, self.frames, self.died = channel, Frames(channel), False
        self.forms: set[int] = set()  # numbers of the grammars that were sent to the process
        self.unsent = bytearray()

    def send(self, word: msgspec.Struct) -> None:
        """Sends a message, or queues it behind waiting ones. If too much is unsent, closes the
        socket, and the process then counts as dead."""
        if self.died:
            return
        self.unsent += frame(word)
        self.flush()
        if len(self.unsent) > UNSENT:
            self.unsent.clear()
            with contextlib.suppress(OSError):
                self.channel.shutdown(socket.SHUT_RDWR)

    def flush(self) -> None:
        """Sends as much as the socket takes at once."""
        while self.unsent and not self.died:
            try:
                del self.unsent[: self.channel.send(self.unsent, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                return
            except OSError:  # a dead process is noticed when its socket is read
                self.unsent.clear()

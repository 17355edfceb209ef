"""The processes that compile grammars and make token masks: `python -m penstock.text.mask_process FD...`, started by
engine/mask_pool and by nobody else, with an end of a socket pair for each process.

The first reads the vocabulary and forks the others, which share it. Each keeps the states of its samples, each of which
has a place of the board that it shares with the engine (mask_board.py): what is asked for there, it makes.
Samples whose masks have taken long come last, so that no other waits for more than one of them. What is said by socket
is what else there is to do, and to look at the board. It knows grammars and places; no rows.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from penstock.errors import PenstockError
from penstock.mask_board import AS_IT_STANDS, FORCED, MaskBoard, fence
from penstock.request import StructuredOutputsParams
from penstock.text.grammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, grammar_text
from penstock.text.sandbox_process import HEADER, PIECE, ProcessMemory, bound, frame, missing_of
from penstock.text.tokenizer import Tokenizer

MEMORY = 4 * 2**30  # bytes of addresses that grammars and samples of a process may take
ROUND = 8  # masks between two looks at the board; none behind a slow one
OTHERS = 32  # masks that a slow one waits for, at most
AWAKE = 0.05  # seconds without work in which it looks by itself, each millisecond; then it waits for a word
SLOW = 5e-4  # seconds of a mask, from which on its sample comes behind others


class MaskStart(msgspec.Struct):
    """What processes are started with: those from `first` on, of so many in all, each of which has as many of the
    places. memory: the descriptor of the board's, of `places` masks of `words` int32."""

    folder: str
    vocab_size: int
    ends: list[int]
    memory: int
    places: int
    words: int
    first: int
    processes: int

    def mine(self, index: int) -> range:
        """Returns the places of a process."""
        each = self.places // self.processes
        return range(index * each, (index + 1) * each)


class Compile(msgspec.Struct, tag="compile"):
    """A form to compile, and its number, which samples name."""

    grammar: int
    asked: StructuredOutputsParams


class Begin(msgspec.Struct, tag="begin"):
    """A sample of a grammar that was compiled here; said before its first mask is asked for."""

    place: int
    grammar: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    forces: bool


class Look(msgspec.Struct, tag="look"):
    """Masks are asked for."""


class End(msgspec.Struct, tag="end"):
    """Places, int32, whose samples are over, and grammars that no new sample will name."""

    places: bytes = b""
    grammars: tuple[int, ...] = ()


class Compiled(msgspec.Struct, tag="compiled"):
    """A form was compiled, or why it cannot be served."""

    grammar: int
    refusal: str | None


Down = Compile | Begin | Look | End


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


class MaskDesk:
    """Grammars, and samples of the places `mine` of a board."""

    def __init__(self, compiler: GrammarCompiler | PenstockError, board: MaskBoard, mine: range) -> None:
        self._compiler, self._board, self._first = compiler, board, mine.start
        self._asked, self._made = (each[mine.start : mine.stop] for each in (board.asked, board.made))
        self._grammars: dict[int, CompiledGrammar] = {}
        self._samples: dict[int, GrammarMatcher] = {}  # by place
        self._slow: set[int] = set()  # places whose last mask took long: the next will too
        self._others = 0  # masks since one of these

    def due(self) -> list[tuple[int, int]]:
        """Returns the masks that are asked for, by place and number, slow ones last."""
        asked = self._asked.copy()
        fence()
        behind = np.flatnonzero(asked != self._made)
        found = list(zip((behind + self._first).tolist(), asked[behind].tolist(), strict=True))
        slow = [each for each in found if each[0] in self._slow] if self._slow else []
        if not slow:
            return found
        others = [each for each in found if each[0] not in self._slow]
        return slow[:1] if self._others >= OTHERS else others + slow

    def take(self, word: Down) -> Compiled | None:
        """Does what a word says."""
        if isinstance(word, Begin):
            grammar = self._grammars[word.grammar]
            row = self._board.words[word.place]
            matcher = grammar.matcher(word.min_tokens, word.stop_ids, forces=word.forces, out=row)
            self._samples[word.place] = matcher
        elif isinstance(word, End):
            for place in np.frombuffer(word.places, np.int32).tolist():
                del self._samples[place]
                self._slow.discard(place)
            for each in word.grammars:
                self._grammars.pop(each, None)
        elif isinstance(word, Compile):
            return self._compile(word)
        return None

    def make(self, place: int, ticket: int) -> bool:
        """Makes the mask that a place is asked for; of a sample that has ended none, and nobody waits for it. Returns
        whether it took long."""
        matcher, board = self._samples.get(place), self._board
        if matcher is None:
            board.made[place] = ticket
            return False
        begun, token = time.perf_counter(), int(board.token[place])
        if token != AS_IT_STANDS:
            matcher.accept(token)
        certain = matcher.forced()[:FORCED]
        for each in certain:
            matcher.accept(each)
        board.put(place, ticket, certain, matcher.mask())
        self._others = 0 if place in self._slow else self._others + 1
        slow = time.perf_counter() - begun > SLOW
        if slow:
            self._slow.add(place)
        else:
            self._slow.discard(place)
        return slow

    def _compile(self, word: Compile) -> Compiled:
        try:
            if isinstance(self._compiler, PenstockError):
                raise self._compiler
            special = self._compiler.special if word.asked.structural_tag is not None else ()
            self._grammars[word.grammar] = self._compiler.compile(grammar_text(word.asked, special))
        except PenstockError as error:
            return Compiled(word.grammar, str(error))
        return Compiled(word.grammar, None)


def serve(channel: socket.socket, desk: MaskDesk) -> NoReturn:
    """Works until the engine has gone, which raises EOFError or OSError."""
    decoder, frames, poll = msgspec.msgpack.Decoder(Down), Frames(channel), select.poll()
    poll.register(channel, select.POLLIN)
    worked = time.monotonic()
    while True:
        due = desk.due()  # before the words: a sample that is asked about has begun in one of them
        resting = not due and time.monotonic() - worked > AWAKE
        while poll.poll(None if resting else 0 if due else 1):
            resting = False
            due = due or desk.due()
            for data in frames.read():
                reply = desk.take(decoder.decode(data))
                if reply is not None:
                    channel.sendall(frame(reply))
        for place, ticket in due[:ROUND]:
            if desk.make(place, ticket):
                break
        if due:
            worked = time.monotonic()


def main() -> int:
    # Ctrl-C, a terminal's end and a service manager's SIGTERM reach the whole group: the engine says when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are forked
    start = msgspec.json.decode(sys.argv[1], type=MaskStart)
    channels = [socket.socket(fileno=int(text)) for text in sys.argv[2:]]
    compiler = _opened(start)
    index = 0
    for other in range(1, len(channels)):
        if not os.fork():
            index = other
            break
    for channel in channels[:index] + channels[index + 1 :]:
        channel.close()
    bound(resource.RLIMIT_CORE, 0)
    addresses, _ = ProcessMemory().read()
    if addresses:
        bound(resource.RLIMIT_AS, addresses + MEMORY)
    mine = start.mine(start.first + index)
    board = MaskBoard.over(np.frombuffer(mmap.mmap(start.memory, 0), np.int32), start.places, start.words)
    try:
        serve(channels[index], MaskDesk(compiler, board, mine))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the engine has gone
        return 0


def _opened(start: MaskStart) -> GrammarCompiler | PenstockError:
    try:
        return GrammarCompiler(Tokenizer.load(Path(start.folder), vocab_size=start.vocab_size), start.ends)
    except PenstockError as error:
        return error


if __name__ == "__main__":
    raise SystemExit(main())

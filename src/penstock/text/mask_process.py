"""The processes that compile grammars and make token masks: `python -m penstock.text.mask_process FD...`, started by
engine/mask_pool and by nobody else, with an end of a socket pair for each process.

The first reads the vocabulary and forks the others, which share it. Each keeps the states of samples and writes masks
into memory that it shares with the engine, a place a sample; what is done goes up in portions. Samples whose masks have
taken long come last, so that no other waits for more than one of them. It knows grammars and numbers; no rows.
"""

from __future__ import annotations

import heapq
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
from numpy.typing import NDArray

from penstock.errors import PenstockError
from penstock.request import StructuredOutputsParams
from penstock.text.grammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, grammar_text
from penstock.text.sandbox_process import HEADER, PIECE, ProcessMemory, bound, frame, missing_of
from penstock.text.tokenizer import Tokenizer

Words = NDArray[np.int32]
MEMORY = 4 * 2**30  # bytes of addresses that grammars and samples of a process may take
PORTION, PATIENCE = 16, 1e-3  # masks, and seconds, until what is done goes up
SLOW = 2e-3  # seconds of a mask, from which on its sample comes behind others


class MaskStart(msgspec.Struct):
    """What processes are started with. memory: the descriptor of what masks are written into, `words` int32 each."""

    folder: str
    vocab_size: int
    ends: list[int]
    memory: int
    words: int


class Compile(msgspec.Struct, tag="compile"):
    """A form to compile, and its number, which samples name."""

    grammar: int
    asked: StructuredOutputsParams


class Begin(msgspec.Struct, tag="begin"):
    """A sample of a grammar that was compiled here; its masks are written to a place."""

    number: int
    place: int
    grammar: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    forces: bool


class Next(msgspec.Struct, tag="next"):
    """Samples whose next mask is due: behind a token each, -1: as they stand. int64 and int32."""

    numbers: bytes
    tokens: bytes


class End(msgspec.Struct, tag="end"):
    """Samples, int64, that are over, and grammars that no new sample will name."""

    numbers: bytes = b""
    grammars: tuple[int, ...] = ()


class Compiled(msgspec.Struct, tag="compiled"):
    """A form was compiled, or why it cannot be served."""

    grammar: int
    refusal: str | None


class MadeMasks(msgspec.Struct, tag="made"):
    """Samples, int64, whose masks lie in their places, and the forced tokens ahead of each: a CSR, int32."""

    numbers: bytes
    start: bytes
    forced: bytes


Down = Compile | Begin | Next | End
Up = Compiled | MadeMasks


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
    """Grammars, samples, and the masks that are due."""

    def __init__(self, compiler: GrammarCompiler | PenstockError, pool: Words) -> None:
        """pool: masks by place [places, words]."""
        self._compiler, self._pool = compiler, pool
        self._grammars: dict[int, CompiledGrammar] = {}
        self._samples: dict[int, tuple[GrammarMatcher, int]] = {}
        self._seconds: dict[int, float] = {}  # that a sample's last mask took, where it was slow
        self._due: list[tuple[float, int, int, int]] = []  # a heap: slowness, turn, sample, token
        self._turn = 0

    @property
    def is_due(self) -> bool:
        return bool(self._due)

    def take(self, word: Down) -> Compiled | None:
        """Does what a word says, but for masks, which come due."""
        if isinstance(word, Next):
            tokens = np.frombuffer(word.tokens, np.int32).tolist()
            for number, token in zip(np.frombuffer(word.numbers, np.int64).tolist(), tokens, strict=True):
                self._turn += 1
                heapq.heappush(self._due, (self._seconds.get(number, 0.0), self._turn, number, token))
        elif isinstance(word, Begin):
            grammar = self._grammars[word.grammar]
            matcher = grammar.matcher(word.min_tokens, word.stop_ids, forces=word.forces)
            self._samples[word.number] = matcher, word.place
        elif isinstance(word, End):
            for number in np.frombuffer(word.numbers, np.int64).tolist():
                del self._samples[number]
                self._seconds.pop(number, None)
            for each in word.grammars:
                self._grammars.pop(each, None)
        elif isinstance(word, Compile):
            return self._compile(word)
        return None

    def make(self) -> tuple[int, list[int]] | None:
        """Makes the mask that is due first. Returns its sample and the tokens that are forced ahead of it; None where
        that sample has ended meanwhile."""
        _, _, number, token = heapq.heappop(self._due)
        if number not in self._samples:
            return None
        begun = time.perf_counter()
        matcher, place = self._samples[number]
        if token >= 0:
            matcher.accept(token)
        certain = matcher.forced()
        for each in certain:
            matcher.accept(each)
        self._pool[place] = matcher.mask()
        took = time.perf_counter() - begun
        if took > SLOW:
            self._seconds[number] = took
        else:
            self._seconds.pop(number, None)
        return number, certain

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
    made: list[tuple[int, list[int]]] = []
    since = 0.0
    while True:
        while poll.poll(0 if desk.is_due else None):
            for data in frames.read():
                reply = desk.take(decoder.decode(data))
                if reply is not None:
                    channel.sendall(frame(reply))
        if (done := desk.make()) is not None:
            since = since if made else time.perf_counter()
            made.append(done)
        if made and (not desk.is_due or len(made) >= PORTION or time.perf_counter() - since > PATIENCE):
            channel.sendall(frame(_told(made)))
            made = []


def _told(made: list[tuple[int, list[int]]]) -> MadeMasks:
    counts = np.array([0, *(len(forced) for _, forced in made)], np.int32)
    return MadeMasks(
        np.array([number for number, _ in made], np.int64).tobytes(),
        np.cumsum(counts, dtype=np.int32).tobytes(),
        np.array([token for _, forced in made for token in forced], np.int32).tobytes(),
    )


def main() -> int:
    # Ctrl-C, a terminal's end and a service manager's SIGTERM reach the whole group: the engine says when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are forked
    start = msgspec.json.decode(sys.argv[1], type=MaskStart)
    channels = [socket.socket(fileno=int(text)) for text in sys.argv[2:]]
    compiler = _opened(start)
    mine = channels[0]
    for other in channels[1:]:
        if not os.fork():
            mine = other
            break
    for channel in channels:
        if channel is not mine:
            channel.close()
    bound(resource.RLIMIT_CORE, 0)
    addresses, _ = ProcessMemory().read()
    if addresses:
        bound(resource.RLIMIT_AS, addresses + MEMORY)
    pool: Words = np.frombuffer(mmap.mmap(start.memory, 0), np.int32).reshape(-1, start.words)
    try:
        serve(mine, MaskDesk(compiler, pool))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the engine has gone
        return 0


def _opened(start: MaskStart) -> GrammarCompiler | PenstockError:
    try:
        return GrammarCompiler(Tokenizer.load(Path(start.folder), vocab_size=start.vocab_size), start.ends)
    except PenstockError as error:
        return error


if __name__ == "__main__":
    raise SystemExit(main())

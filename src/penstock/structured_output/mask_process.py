"""mask_process: the processes that make token masks. mask_pool.py starts them as `python -m
penstock.structured_output.mask_process START FD...`, with one end of a socket pair per process.

The first process reads the vocabulary and forks the others, which share it. Each process keeps the
grammar states of its samples. Each sample has a place on the board shared with the engine
(mask_board.py), where masks are requested and returned. Masks are made in the order of the
requests, but slow ones last, so that other samples wait for at most one of them. Sockets carry all
other messages, and wake-ups. Knows grammars and places; no rows.
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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np

from penstock.children.frames import Frames, frame
from penstock.children.lifetime import leave_signals
from penstock.children.process_limits import ProcessMemory, bound
from penstock.errors import PenstockError
from penstock.mask_board import AS_IT_STANDS, FORCED, MaskBoard, fence
from penstock.structured_output.form_trials import Compile, Compiled, FormTrials, compiled
from penstock.text.grammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, Words
from penstock.text.tokenizer import Tokenizer

MEMORY = 4 * 2**30  # bytes of address space for a process's grammars and samples
# masks made between two checks of the board; after a slow mask the board is checked at once
ROUND = 8
OTHERS = 32  # most other masks that a slow mask waits for
# seconds without work during which the process checks the board every millisecond; then it waits
# for a message
AWAKE = 0.05
SLOW = 5e-4  # seconds for a mask above which the sample's next mask is made after others
LONG = 0.02  # seconds of CPU time for a mask above which its grammar's masks are made in a thread
MOST = 0.25  # seconds of CPU time for a mask above which its sample ends with an error
GROWN = 256 * 2**20  # bytes of growth after which a process reports it to the pool
TELLING = 1.0  # seconds between two checks of the process's growth


class MaskStart(msgspec.Struct):
    """Settings of a group of processes, as the command line argument START. first: number of the
    group's first process. processes: number of all mask processes, each with an equal share of the
    places; the process with the next number is the trial process. memory: file descriptor of the
    board, with `places` masks of `words` int32 each."""

    folder: str
    vocab_size: int
    ends: list[int]
    memory: int
    places: int
    words: int
    first: int
    processes: int

    def mine(self, index: int) -> range:
        """Returns the places on the board that belong to process `index`."""
        each = self.places // self.processes
        return range(index * each, (index + 1) * each)


class Begin(msgspec.Struct, tag="begin"):
    """Message from the engine: begin a sample at `place` with grammar number `grammar`. Sent before
    its first mask is requested."""

    place: int
    grammar: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    forces: bool
    turn: int = 0  # value of the board's counter `begun` at this place for this sample


class Look(msgspec.Struct, tag="look"):
    """Message from the engine: masks are requested on the board."""


class End(msgspec.Struct, tag="end"):
    """Message from the engine: end the samples at these places (int32), and drop the grammars with
    these numbers, which no new sample will use."""

    places: bytes = b""
    grammars: tuple[int, ...] = ()


class Grown(msgspec.Struct, tag="grown"):
    """Message to the engine: this process has grown by more than GROWN bytes. How much memory
    samples add to a grammar is unknown when it is compiled."""


Down = Compile | Begin | Look | End
Up = Compiled | Grown


class NoMatcher:
    """Grammar state of a sample that can't go on. Its masks allow no token, which ends the sample
    with an error."""

    def __init__(self, out: Words) -> None:
        self._out = out

    def mask(self) -> Words:
        self._out[:] = 0
        return self._out

    def forced(self) -> list[int]:
        return []

    def accept(self, token: int) -> None:
        """Does nothing: no token changes this state."""


@dataclass(slots=True, eq=False)
class HeldSample:
    """State of one sample. grammar: number of its grammar."""

    grammar: int
    matcher: GrammarMatcher | NoMatcher


class MadeMask(NamedTuple):
    """A finished mask. certain: forced tokens before it. words: the mask's int32 words. seconds:
    CPU time taken."""

    certain: list[int]
    words: Words
    seconds: float


class MaskDesk:
    """Compiles grammars and makes masks for the places `mine` of a board. Slow work runs in two
    threads, which hold the interpreter's lock for little of it: one compiles grammars, the other
    compiles slow grammars and makes their masks."""

    def __init__(
        self, compiler: GrammarCompiler | PenstockError, board: MaskBoard, mine: range
    ) -> None:
        self._compiler, self._board, self._first = compiler, board, mine.start
        self._asked, self._made = (
            each[mine.start : mine.stop] for each in (board.asked, board.made)
        )
        # [places of this process]: number of the mask request seen at the last check
        self._seen = np.zeros(len(mine), np.int32)
        # [places of this process]: check at which that number was first seen
        self._since = np.zeros(len(mine), np.int64)
        self._looks = 0
        self._begun = board.begun[mine.start : mine.stop]
        # [places of this process]: `turn` of the last Begin message
        self._told = np.zeros(len(mine), np.int32)
        # grammars by number; None: could not be compiled here
        self._grammars: dict[int, CompiledGrammar | None] = {}
        self._samples: dict[int, HeldSample] = {}  # board index -> the sample that has begun there
        # places whose last mask was slow, so that the next one probably is too
        self._slow: set[int] = set()
        self._others = 0  # masks made since the last slow one
        # a thread for quick grammars (False) and one for slow grammars (True)
        self._lanes = {slow: ThreadPoolExecutor(1) for slow in (False, True)}
        self._compiling: dict[int, Future[CompiledGrammar | PenstockError]] = {}
        # numbers of grammars to drop once they are compiled
        self._let_go: set[int] = set()
        self._long: set[int] = set()  # numbers of grammars with a slow mask or slow compilation
        # samples, by place, that wait for their grammar and for the place's previous sample
        self._waiting: dict[int, Begin] = {}
        # By place, masks that are being made in threads: the sample, the number of the mask
        # request, and the result. The sample may end before the mask is made.
        self._working: dict[int, tuple[HeldSample, int, Future[MadeMask]]] = {}

    @property
    def busy(self) -> bool:
        """Returns True if threads have work."""
        return bool(self._compiling or self._working)

    def due(self) -> list[tuple[int, int]]:
        """Returns the masks to make, as (place, number of the request): the longest waiting first,
        slow ones last. Leaves out masks that threads are making."""
        asked = self._asked.copy()
        fence()
        self._looks += 1
        self._since[asked != self._seen] = self._looks
        self._seen = asked
        # A mask may be requested before the sample's Begin is read. It must not be made for the
        # place's previous sample.
        behind = np.flatnonzero((asked != self._made) & (self._begun == self._told))
        behind = behind[np.argsort(self._since[behind], kind="stable")]
        found = list(zip((behind + self._first).tolist(), asked[behind].tolist(), strict=True))
        if self._waiting or self._working:
            found = [
                each
                for each in found
                if each[0] not in self._waiting and each[0] not in self._working
            ]
        slow = [each for each in found if each[0] in self._slow] if self._slow else []
        if not slow:
            return found
        others = [each for each in found if each[0] not in self._slow]
        return slow[:1] if self._others >= OTHERS else others + slow

    def take(self, word: Down) -> None:
        """Handles a message from the engine."""
        if isinstance(word, Begin):
            self._waiting[word.place] = word
            self._told[word.place - self._first] = word.turn
            self._begin()
        elif isinstance(word, End):
            for place in np.frombuffer(word.places, np.int32).tolist():
                self._end(place)
            for each in word.grammars:
                if each in self._compiling:
                    self._let_go.add(each)
                self._grammars.pop(each, None)
                self._long.discard(each)
        elif isinstance(word, Compile):
            if word.slow:
                self._long.add(word.grammar)
            self._compiling[word.grammar] = self._lanes[word.slow].submit(self._compiled, word)

    def _begin(self) -> None:
        """Begins the waiting samples whose grammar is compiled and whose place is free."""
        for place, word in list(self._waiting.items()):
            if word.grammar not in self._compiling and place not in self._working:
                del self._waiting[place]
                row, grammar = self._board.words[place], self._grammars[word.grammar]
                how = (word.min_tokens, word.stop_ids)
                made = (
                    NoMatcher(row)
                    if grammar is None
                    else grammar.matcher(*how, forces=word.forces, out=row)
                )
                self._samples[place] = HeldSample(word.grammar, made)

    def _end(self, place: int) -> None:
        self._slow.discard(place)
        if self._waiting.pop(place, None) is None:
            del self._samples[place]

    def settle(self) -> list[Compiled]:
        """Takes over the finished work of the threads. Returns the results of compilations."""
        out = []
        for number in [number for number, work in self._compiling.items() if work.done()]:
            found = self._compiling.pop(number).result()
            self._grammars[number] = None if isinstance(found, PenstockError) else found
            out.append(Compiled(number, str(found) if isinstance(found, PenstockError) else None))
        for place in [place for place, (_, _, work) in self._working.items() if work.done()]:
            sample, ticket, work = self._working.pop(place)
            if self._samples.get(place) is sample:
                self._put(place, sample, ticket, work.result())
            else:
                self._board.made[place] = ticket
        if self._waiting:
            self._begin()
        for number in self._let_go - self._compiling.keys():
            self._let_go.discard(number)
            del self._grammars[number]
        return out

    def make(self, place: int, ticket: int) -> bool:
        """Makes the mask requested at a place, or has a thread make it if it is slow. ticket:
        number of the request. For an ended sample, only marks the request as done. Returns True if
        it took long."""
        if place in self._waiting:  # a new sample has taken the place since `due`
            return False
        sample, board = self._samples.get(place), self._board
        if sample is None:
            board.made[place] = ticket
            return False
        token = int(board.token[place])
        if sample.grammar in self._long:
            self._working[place] = (
                sample,
                ticket,
                self._lanes[True].submit(_make, sample.matcher, token),
            )
            return False
        begun, made = time.perf_counter(), _make(sample.matcher, token)
        self._put(place, sample, ticket, made)
        self._others = 0 if place in self._slow else self._others + 1
        slow = time.perf_counter() - begun > SLOW
        if slow:
            self._slow.add(place)
        else:
            self._slow.discard(place)
        return slow

    def _put(self, place: int, sample: HeldSample, ticket: int, made: MadeMask) -> None:
        if made.seconds > LONG:
            self._long.add(sample.grammar)
        if made.seconds > MOST:
            sample.matcher = NoMatcher(self._board.words[place])
            made = MadeMask([], sample.matcher.mask(), made.seconds)
        self._board.put(place, ticket, made.certain, made.words)

    def _compiled(self, word: Compile) -> CompiledGrammar | PenstockError:
        try:
            return compiled(self._compiler, word.asked)
        except PenstockError as error:
            return error


def _make(matcher: GrammarMatcher | NoMatcher, token: int) -> MadeMask:
    begun = time.thread_time()
    if token != AS_IT_STANDS:
        matcher.accept(token)
    certain = matcher.forced()[:FORCED]
    for each in certain:
        matcher.accept(each)
    return MadeMask(certain, matcher.mask(), time.thread_time() - begun)


class Growth:
    """Growth of this process's memory since the object was made, checked now and then."""

    def __init__(self) -> None:
        self._memory, self._looked = ProcessMemory(), time.monotonic()
        _, self._first = self._memory.read()

    def is_much(self) -> bool:
        """Returns True if the growth exceeds GROWN; False within TELLING seconds of the
        last check."""
        if (now := time.monotonic()) - self._looked < TELLING:
            return False
        self._looked = now
        return self._memory.read()[1] - self._first > GROWN


def serve(channel: socket.socket, desk: MaskDesk) -> NoReturn:
    """Serves the engine until it has gone; then raises EOFError or OSError."""
    decoder, frames, poll = msgspec.msgpack.Decoder(Down), Frames(channel), select.poll()
    poll.register(channel, select.POLLIN)
    worked, growth = time.monotonic(), Growth()
    while True:
        for reply in desk.settle():
            channel.sendall(frame(reply))
        if growth.is_much():
            channel.sendall(frame(Grown()))
        # read before the messages, which then include the Begin of each requested sample
        due = desk.due()
        resting = not due and not desk.busy and time.monotonic() - worked > AWAKE
        while poll.poll(None if resting else 0 if due else 1):
            resting = False
            due = due or desk.due()
            for data in frames.read():
                desk.take(decoder.decode(data))
        for place, ticket in due[:ROUND]:
            if desk.make(place, ticket):
                break
        if due:
            worked = time.monotonic()


def main() -> int:
    leave_signals()
    # the kernel removes ended forks, so this process need not wait for them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
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
    number = start.first + index
    try:
        if number == start.processes:
            # the trial process waits for its own forks
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            FormTrials(channels[index], compiler).serve()
        addresses, _ = ProcessMemory().read()
        if addresses:
            bound(resource.RLIMIT_AS, addresses + MEMORY)
        board = MaskBoard.over(
            np.frombuffer(mmap.mmap(start.memory, 0), np.int32), start.places, start.words
        )
        serve(channels[index], MaskDesk(compiler, board, start.mine(number)))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the engine has gone
        return 0


def _opened(start: MaskStart) -> GrammarCompiler | PenstockError:
    try:
        return GrammarCompiler(
            Tokenizer.load(Path(start.folder), vocab_size=start.vocab_size), start.ends
        )
    except PenstockError as error:
        return error


if __name__ == "__main__":
    raise SystemExit(main())

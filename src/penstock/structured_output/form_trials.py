"""FormTrials: compiles each grammar first in a killable process. A mask process compiles it
afterwards.

    Compile -> a fork, QUICK seconds of CPU time -> Compiled
            -> on timeout another fork, SLOW seconds, after other slow grammars -> Compiled

A grammar ("form") is the schema, regex or Lark of a request. A trial also makes the first masks.
The llguidance library limits its own work, but not all of it: `multipleOf` 999983 took 12 s and 400
MB, unnoticed by its limits. A grammar that passes its trial takes no longer in a mask process. One
quick and one slow grammar run at a time, so quick ones never wait for slow ones; grammars of
background requests come last. This process is forked from the one that read the vocabulary, and has
one thread, so that it can fork. Knows grammars; no samples.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
from collections import deque
from typing import NoReturn

import msgspec
import numpy as np

from penstock.children.frames import Frames, frame
from penstock.children.process_limits import ProcessMemory, bound
from penstock.errors import PenstockError
from penstock.request import StructuredOutputsParams
from penstock.text.grammar import CompiledGrammar, GrammarCompiler, grammar_text

QUICK = 0.02  # seconds of CPU time of a first trial; most grammars take a fifth of it
SLOW = 1.0  # seconds of CPU time for a grammar that did not finish in QUICK
# tokens of a text that a trial goes through; it makes a mask before each token and one after the
# last
FIRST = 2
MEMORY = 192 * 2**20  # bytes of address space that compiling may take
GROWN = 32 * 2**20  # bytes by which the process for quick grammars may grow before it is replaced
KINDER = 5  # niceness added to the process for slow grammars
TOO_LONG = (
    "structured_outputs cannot be served: to compile and to begin with this takes more than"
    f" {SLOW:g} s of processor time, or {MEMORY >> 20} MB: make it simpler"
)


class Compile(msgspec.Struct, tag="compile"):
    """A grammar to compile. grammar: its number, which samples refer to. slow: True if it took
    longer than QUICK. background: True if only background requests use it."""

    grammar: int
    asked: StructuredOutputsParams
    slow: bool = False
    background: bool = False


class Compiled(msgspec.Struct, tag="compiled"):
    """The result of compiling a grammar. grammar: its number. refusal: why it cannot be served, or
    None. slow: True if it took longer than QUICK. bytes: its memory."""

    grammar: int
    refusal: str | None
    slow: bool = False
    bytes: int = 0


def compiled(
    compiler: GrammarCompiler | PenstockError, asked: StructuredOutputsParams
) -> CompiledGrammar:
    """Compiles a grammar. Raises PenstockError; if `compiler` is an error, that one."""
    if isinstance(compiler, PenstockError):
        raise compiler
    return compiler.compile(
        grammar_text(asked, compiler.special if asked.structural_tag is not None else ())
    )


class _Trial:
    """A forked process that compiles many quick grammars, or a single slow one, so that its memory
    can be measured. word: the grammar being compiled."""

    def __init__(
        self, compiler: GrammarCompiler | PenstockError, others: list[socket.socket]
    ) -> None:
        """compiler: a compiler, or the error to report for every grammar. others: sockets of the
        parent that the fork closes."""
        self.word: Compile | None = None
        self.grown = 0  # bytes that the grammars compiled in this process take
        self.channel, theirs = socket.socketpair()
        self.process = os.fork()
        if not self.process:
            try:
                for each in (self.channel, *others):
                    each.close()
                _compile_forms(theirs, compiler)
            finally:
                os._exit(0)  # the fork must not return into the parent's loop
        theirs.close()
        self.frames = Frames(self.channel)

    def begin(self, word: Compile) -> None:
        self.word = word
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # a dead fork is noticed when its socket is read
            self.channel.sendall(frame(word))

    def end(self) -> None:
        self.channel.close()
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


def _compile_forms(channel: socket.socket, compiler: GrammarCompiler | PenstockError) -> None:
    """The main loop of the forked process. The kernel ends the process at a grammar's time limit;
    the library ends it by SIGABRT if it gets no memory."""
    memory, frames, decoder = ProcessMemory(), Frames(channel), msgspec.msgpack.Decoder(Compile)
    addresses, _ = memory.read()
    if addresses:
        bound(resource.RLIMIT_AS, addresses + MEMORY)
    with contextlib.suppress(EOFError):  # the parent has closed its end
        while True:
            while not (found := frames.read()):
                pass  # a long message comes in pieces
            word = decoder.decode(found[0])
            if word.slow:
                os.nice(KINDER)
            signal.setitimer(signal.ITIMER_PROF, SLOW if word.slow else QUICK)
            said = _tried(word, compiler, memory)
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.sendall(frame(said))


def _tried(
    word: Compile, compiler: GrammarCompiler | PenstockError, memory: ProcessMemory
) -> Compiled:
    _, before = memory.read()
    try:
        kept = compiled(compiler, word.asked)
        _make_first_masks(kept)
        taken = max(0, memory.read()[1] - before)
        del kept
    except PenstockError as error:
        return Compiled(word.grammar, str(error))
    return Compiled(word.grammar, None, word.slow, taken)


def _make_first_masks(grammar: CompiledGrammar) -> None:
    """Makes masks for the first tokens of a text allowed by the grammar. Some grammars compile fast
    but have slow masks, which must be found before a mask process uses them."""
    matcher = grammar.matcher()
    for _ in range(FIRST):
        words = matcher.mask()
        there = np.flatnonzero(words)
        if not there.size:
            return
        word = int(there[0])
        bits = int(words[word]) & 0xFFFFFFFF
        matcher.accept(32 * word + (bits & -bits).bit_length() - 1)
    matcher.mask()


class _Line:
    """Grammars that wait for a trial. Background requests' grammars come last, and each kind keeps
    its order of arrival."""

    def __init__(self) -> None:
        # key: True for background requests
        self._forms: dict[bool, deque[Compile]] = {
            False: deque(),
            True: deque(),
        }

    def __bool__(self) -> bool:
        return any(self._forms.values())

    def put(self, word: Compile) -> None:
        self._forms[word.background].append(word)

    def take(self) -> Compile:
        return (self._forms[False] or self._forms[True]).popleft()


class FormTrials:
    """Runs the trials, one quick and one slow at a time."""

    def __init__(self, channel: socket.socket, compiler: GrammarCompiler | PenstockError) -> None:
        self._channel, self._compiler = channel, compiler
        self._waiting = {False: _Line(), True: _Line()}  # key: True for slow grammars
        self._trials: dict[bool, _Trial] = {}
        self._decoder = msgspec.msgpack.Decoder(Compiled)

    def serve(self) -> NoReturn:
        """Runs trials until the engine has gone; then raises EOFError or OSError."""
        frames, decoder = Frames(self._channel), msgspec.msgpack.Decoder(Compile)
        try:
            while True:
                self._begin()
                poll = select.poll()
                for channel in (self._channel, *(trial.channel for trial in self._trials.values())):
                    poll.register(channel, select.POLLIN)
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self._channel.fileno() in ready:
                    for data in frames.read():
                        self._waiting[False].put(decoder.decode(data))
                for slow, trial in list(self._trials.items()):
                    if trial.channel.fileno() in ready:
                        self._take(slow, trial)
        finally:
            for trial in self._trials.values():
                trial.end()

    def _begin(self) -> None:
        for slow, waiting in self._waiting.items():
            if not waiting:
                continue
            if slow not in self._trials:
                others = [self._channel, *(trial.channel for trial in self._trials.values())]
                self._trials[slow] = _Trial(self._compiler, others)
            if self._trials[slow].word is None:
                self._trials[slow].begin(waiting.take())

    def _take(self, slow: bool, trial: _Trial) -> None:
        """Handles the results of a trial process, or its end."""
        try:
            found = [self._decoder.decode(data) for data in trial.frames.read()]
        except (EOFError, ConnectionResetError):
            if (word := trial.word) is not None and not slow:
                self._waiting[True].put(msgspec.structs.replace(word, slow=True))
            elif word is not None:
                self._channel.sendall(frame(Compiled(word.grammar, TOO_LONG)))
            self._trials.pop(slow).end()
            return
        for said in found:
            self._channel.sendall(frame(said))
            trial.word = None
            trial.grown += said.bytes
        if trial.word is None and (slow or trial.grown > GROWN):
            self._trials.pop(slow).end()

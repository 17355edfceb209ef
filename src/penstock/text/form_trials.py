"""Trials of forms: each is compiled in a process that can be ended, before a process that makes masks compiles it.

    Compile -> a fork, QUICK seconds of processor time -> Compiled
                                                       -> else another, SLOW seconds, behind others -> Compiled

The library counts its own work, but not all of it: `multipleOf` 999983 took it 12 s and 400 MB, and no count said so.
What passes here takes no longer anywhere else. Forms that are compiled soon come first, however many others wait, and
of both kinds one runs at a time. The process is forked from the one that read the vocabulary, has one thread, and keeps
nothing of a form. It knows grammars; no samples.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
from collections import deque
from typing import NoReturn

import msgspec

from penstock.errors import PenstockError
from penstock.request import StructuredOutputsParams
from penstock.text.frames import Frames
from penstock.text.grammar import CompiledGrammar, GrammarCompiler, grammar_text
from penstock.text.sandbox_process import PIECE, ProcessMemory, bound, frame

QUICK = 0.05  # seconds of processor time; most forms take a tenth of it
SLOW = 1.0  # the same of a form that may take longer, and comes behind others
MEMORY = 192 * 2**20  # bytes of addresses that compiling may take
KINDER = 10  # by which a slow one leaves the processor to others
TOO_LONG = (
    f"structured_outputs cannot be served: they take more than {SLOW:g} s of processor time, or {MEMORY >> 20} MB, to "
    "compile: make them simpler"
)


class Compile(msgspec.Struct, tag="compile"):
    """A form to compile, and its number, which samples name. slow: it took longer than QUICK."""

    grammar: int
    asked: StructuredOutputsParams
    slow: bool = False


class Compiled(msgspec.Struct, tag="compiled"):
    """A form was compiled, or why it cannot be served. slow: it took longer than QUICK. bytes: that it takes."""

    grammar: int
    refusal: str | None
    slow: bool = False
    bytes: int = 0


def compiled(compiler: GrammarCompiler | PenstockError, asked: StructuredOutputsParams) -> CompiledGrammar:
    """Compiles a form. Raises PenstockError."""
    if isinstance(compiler, PenstockError):
        raise compiler
    return compiler.compile(grammar_text(asked, compiler.special if asked.structural_tag is not None else ()))


class _Trial:
    """A fork that compiles one form."""

    def __init__(self, word: Compile, compiler: GrammarCompiler | PenstockError, channel: socket.socket) -> None:
        self.word = word
        self.pipe, theirs = os.pipe()
        self.process = os.fork()
        if not self.process:
            try:
                channel.close()
                os.close(self.pipe)
                os.write(theirs, msgspec.msgpack.encode(_tried(word, compiler)))
            finally:
                os._exit(0)  # no way back into the parent's loop
        os.close(theirs)

    def ended(self) -> Compiled | None:
        """Waits for its end. Returns what it said; None where it was ended at its time or memory."""
        said = os.read(self.pipe, PIECE)
        os.close(self.pipe)
        os.waitpid(self.process, 0)
        return msgspec.msgpack.decode(said, type=Compiled) if said else None

    def end(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


def _tried(word: Compile, compiler: GrammarCompiler | PenstockError) -> Compiled:
    """In the fork. The kernel ends it at its time; the library, by SIGABRT, where it gets no memory."""
    signal.setitimer(signal.ITIMER_PROF, SLOW if word.slow else QUICK)
    os.nice(KINDER if word.slow else 0)
    addresses, before = ProcessMemory().read()
    if addresses:
        bound(resource.RLIMIT_AS, addresses + MEMORY)
    try:
        kept = compiled(compiler, word.asked)
        taken = max(0, ProcessMemory().read()[1] - before)
        del kept
    except PenstockError as error:
        return Compiled(word.grammar, str(error))
    return Compiled(word.grammar, None, word.slow, taken)


class FormTrials:
    """Trials, of each kind one at a time."""

    def __init__(self, channel: socket.socket, compiler: GrammarCompiler | PenstockError) -> None:
        self._channel, self._compiler = channel, compiler
        self._waiting: dict[bool, deque[Compile]] = {False: deque(), True: deque()}  # by whether they are slow
        self._trials: dict[bool, _Trial] = {}

    def serve(self) -> NoReturn:
        """Works until the engine has gone, which raises EOFError or OSError."""
        frames, decoder = Frames(self._channel), msgspec.msgpack.Decoder(Compile)
        try:
            while True:
                self._begin()
                poll = select.poll()
                for descriptor in (self._channel.fileno(), *(trial.pipe for trial in self._trials.values())):
                    poll.register(descriptor, select.POLLIN)
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self._channel.fileno() in ready:
                    self._waiting[False].extend(map(decoder.decode, frames.read()))
                for slow in [slow for slow, trial in self._trials.items() if trial.pipe in ready]:
                    self._take(self._trials.pop(slow))
        finally:
            for trial in self._trials.values():
                trial.end()

    def _begin(self) -> None:
        for slow, waiting in self._waiting.items():
            if waiting and slow not in self._trials:
                self._trials[slow] = _Trial(waiting.popleft(), self._compiler, self._channel)

    def _take(self, trial: _Trial) -> None:
        word, said = trial.word, trial.ended()
        if said is None and not word.slow:
            self._waiting[True].append(Compile(word.grammar, word.asked, slow=True))
            return
        self._channel.sendall(frame(Compiled(word.grammar, TOO_LONG) if said is None else said))

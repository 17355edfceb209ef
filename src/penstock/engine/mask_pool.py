"""MaskPool: forms of structured outputs, compiled once and kept, and the masks of the samples that are held to them,
made by processes beside the engine.

    a form    --Compile--> a process, the next in turn --Compiled--> known, or refused
    a sample  --Begin--> the process with the fewest; --Next, a token--> its mask in its place --MadeMasks--> its guide

Making a mask takes up to milliseconds, of which a third holds the interpreter's lock, and samples of one form hold each
other up in one process: 256 of them took 51 ms a step in eight threads of the engine's process, where a step of 1,024
rows takes 9. A process that dies, of memory or of a fault in the library, costs its own samples and is started anew.
It knows processes and places; no rows.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import CapacityError, EngineError, UsageError
from penstock.request import SamplingParams, StructuredOutputsParams
from penstock.schedule.guides import Guide
from penstock.text.mask_process import Begin, Compile, Compiled, End, Frames, MadeMasks, MaskStart, Next, Up
from penstock.text.sandbox_process import frame

KEPT = 512  # forms
KEPT_BYTES = 16 * 2**20  # of their texts together; compiled they take a few times as much
PLACES = 16_384  # samples that have a state; of memory only what was written is taken
PROCESSES = max(1, min(14, (os.cpu_count() or 1) - 2))
DEADLY = "structured_outputs cannot be served: the processes that compiled it ended"
_NAP = 1e-4  # seconds between two looks at the sockets
_ALONE = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}  # it forks, so it has no threads


@dataclass(slots=True, eq=False)
class Form:
    """A form, whatever it came to. known: whether it was compiled or refused. deaths: of processes that were compiling
    it."""

    number: int
    asked: StructuredOutputsParams
    known: bool = False
    refusal: str | None = None
    deaths: int = 0


@dataclass(slots=True, eq=False)
class HeldSample:
    """A sample's state in a process: its guide's constraint. lost: the process has died."""

    number: int
    process: _Process
    place: int
    lost: bool = False


class _Process:
    """One process, as the engine knows it."""

    def __init__(self, index: int, channel: socket.socket, places: list[int]) -> None:
        self.index, self.places = index, places
        self.samples: dict[int, HeldSample] = {}
        self.compiling: set[int] = set()  # forms that are known nowhere yet
        self.connect(channel)

    def connect(self, channel: socket.socket) -> None:
        self.channel, self.frames, self.died = channel, Frames(channel), False
        self.forms: set[int] = set()  # that it was handed

    def send(self, word: msgspec.Struct) -> None:
        if not self.died:
            with contextlib.suppress(OSError):  # who reads finds the socket's end
                self.channel.sendall(frame(word))


class MaskPool:
    """Serves as schedule.guides.MaskMakers. For one thread. The processes start when the first form is asked for."""

    def __init__(
        self, folder: Path, vocab_size: int, ends: tuple[int, ...], processes: int = PROCESSES, places: int = PLACES
    ) -> None:
        """folder: the tokenizer's. ends: the model's end ids."""
        self._made_of, self._count = (str(folder), vocab_size, list(ends)), processes
        self._words, self._each = -(-vocab_size // 32), places // processes
        self._forms: OrderedDict[bytes, Form] = OrderedDict()
        self._by_number: dict[int, Form] = {}  # that are being compiled
        self._bytes = self._turn = 0
        self._numbers = itertools.count(1)  # of forms and samples
        self.processes: list[_Process] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._making: dict[int, Guide] = {}
        self._memory = -1
        self._pool: NDArray[np.int32] = np.zeros((0, self._words), np.int32)
        self._poll = select.poll()
        self._decoder = msgspec.msgpack.Decoder(Up)

    # --- forms --------------------------------------------------------------------------------------------------------

    def ask(self, asked: StructuredOutputsParams) -> Form:
        """Returns a form: the one that is kept, else a new one, which is compiled from now on."""
        self.look()  # at deaths while nothing was asked
        key = msgspec.msgpack.encode(asked)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = Form(next(self._numbers), asked)
            self._bytes += len(key)
            self._compile(form)
        self._forms.move_to_end(key)
        while len(self._forms) > KEPT or (self._bytes > KEPT_BYTES and len(self._forms) > 1):
            self._drop()
        return form

    def compiled(self, asked: StructuredOutputsParams) -> Form:
        """Returns a form when it is known. Raises UsageError where it cannot be served."""
        form = self.ask(asked)
        while not form.known:
            self.look(_NAP)
        if form.refusal is not None:
            raise UsageError(form.refusal, param="structured_outputs", rule=form.refusal)
        return form

    @staticmethod
    def factory(pool: MaskPool | None, sampling: SamplingParams) -> Callable[[int], HeldSample]:
        """Returns what makes each sample's state. Raises UsageError where the form cannot be served."""
        asked = sampling.structured_outputs
        assert asked is not None
        if pool is None:
            rule = "structured_outputs need a tokenizer: leave skip_tokenizer_init off"
            raise UsageError(rule, param="structured_outputs", rule=rule)
        form, barred = pool.compiled(asked), bool(sampling.allowed_token_ids or sampling.bad_words)
        ends = tuple(sampling.stop_token_ids or ())
        return lambda sample: pool.sample(form, sampling.min_tokens, ends, forces=not barred)

    def _compile(self, form: Form) -> None:
        try:
            if not self.processes:
                self._start()
            process = self.processes[self._turn % self._count]
            self._turn += 1
            self._hand(form, process)
        except CapacityError as error:
            form.known, form.refusal = True, str(error)
            return
        process.compiling.add(form.number)
        self._by_number[form.number] = form

    def _hand(self, form: Form, process: _Process) -> None:
        if process.died:
            process.connect(*self._spawn(1))
        process.forms.add(form.number)
        process.send(Compile(form.number, form.asked))

    def _drop(self) -> None:
        """Lets go of the form that was asked for longest ago; samples that have begun keep what they need."""
        key, form = self._forms.popitem(last=False)
        self._bytes -= len(key)
        for process in self.processes:
            if form.number in process.forms:
                process.forms.discard(form.number)
                process.send(End(grammars=(form.number,)))

    @property
    def held(self) -> int:
        """Returns how many samples have a state."""
        return sum(len(process.samples) for process in self.processes)

    # --- samples ------------------------------------------------------------------------------------------------------

    def sample(
        self, form: Form, min_tokens: int = 0, stop_ids: tuple[int, ...] = (), *, forces: bool = True
    ) -> HeldSample:
        """Begins a sample in the process that has the fewest; where none can be started it is lost. Raises EngineError
        where there are too many."""
        process, number = max(self.processes, key=lambda each: len(each.places)), next(self._numbers)
        if not process.places:
            raise EngineError(f"more than {self._each * self._count} samples are held to forms: ask for fewer at once")
        if process.died or form.number not in process.forms:
            try:
                self._hand(form, process)
            except CapacityError:
                return HeldSample(number, process, place=-1, lost=True)
        held = process.samples[number] = HeldSample(number, process, process.places.pop())
        process.send(Begin(number, held.place, form.number, min_tokens, stop_ids, forces))
        return held

    def start(self, guides: Sequence[Guide], tokens: Sequence[int] | None = None) -> None:
        due: dict[_Process, tuple[list[int], list[int]]] = {}
        for at, guide in enumerate(guides):
            guide.begin()
            held = _held(guide)
            if held.lost:
                self._fail(guide)
                continue
            self._making[held.number] = guide
            numbers, behind = due.setdefault(held.process, ([], []))
            numbers.append(held.number)
            behind.append(-1 if tokens is None else tokens[at])
        for process, (numbers, behind) in due.items():
            process.send(Next(np.array(numbers, np.int64).tobytes(), np.array(behind, np.int32).tobytes()))

    def wait(self, seconds: float) -> int:
        until = time.monotonic() + seconds
        while self._making and (left := until - time.monotonic()) >= 0:
            self.look(min(_NAP, left))
        return len(self._making)

    def end(self, guides: Sequence[Guide]) -> None:
        over: dict[_Process, list[int]] = {}
        for held in map(_held, guides):
            self._making.pop(held.number, None)
            if not held.lost:
                del held.process.samples[held.number]
                held.process.places.append(held.place)
                over.setdefault(held.process, []).append(held.number)
        for process, numbers in over.items():
            process.send(End(np.array(numbers, np.int64).tobytes()))

    def _fail(self, guide: Guide) -> None:
        """A mask of no token, which ends the sample with an error."""
        guide.made([], np.zeros(self._words, np.int32))

    # --- processes ----------------------------------------------------------------------------------------------------

    def look(self, seconds: float = 0.0) -> None:
        """Takes in what has come; where that is nothing, sleeps so long."""
        heard = self._poll.poll(0)
        by_descriptor = {process.channel.fileno(): process for process in self.processes} if heard else {}
        for descriptor, _ in heard:
            process = by_descriptor[descriptor]
            try:
                for data in process.frames.read():
                    self._take(process, self._decoder.decode(data))
            except (EOFError, OSError):
                self._bury(process)
        if not heard and seconds:
            time.sleep(seconds)

    def _take(self, process: _Process, word: Compiled | MadeMasks) -> None:
        if isinstance(word, Compiled):
            process.compiling.discard(word.grammar)
            form = self._by_number.pop(word.grammar, None)
            if form is not None:
                form.known, form.refusal = True, word.refusal
            return
        start = np.frombuffer(word.start, np.int32).tolist()
        forced = np.frombuffer(word.forced, np.int32).tolist()
        for at, number in enumerate(np.frombuffer(word.numbers, np.int64).tolist()):
            guide = self._making.pop(number, None)
            if guide is not None:
                guide.made(forced[start[at] : start[at + 1]], self._pool[_held(guide).place])

    def _start(self) -> None:
        if self._memory < 0:
            self._memory = _shared_memory()
            os.ftruncate(self._memory, self._count * self._each * self._words * 4)
            self._pool = np.frombuffer(mmap.mmap(self._memory, 0), np.int32).reshape(-1, self._words)
        for index, channel in enumerate(self._spawn(self._count)):
            places = list(range(index * self._each, (index + 1) * self._each))
            self.processes.append(_Process(index, channel, places))

    def _spawn(self, count: int) -> list[socket.socket]:
        """Starts processes that share a vocabulary, and returns our ends of their sockets."""
        folder, vocab_size, ends = self._made_of
        start = MaskStart(folder, vocab_size, ends, self._memory, self._words)
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [their.fileno() for _, their in pairs]
        command = [sys.executable, "-m", "penstock.text.mask_process", msgspec.json.encode(start).decode()]
        try:
            self._children.append(
                subprocess.Popen(
                    [*command, *map(str, theirs)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(*theirs, self._memory),
                    env={**os.environ, **_ALONE},
                )
            )  # fmt: skip
        except OSError as error:
            raise CapacityError(
                f"the processes that make masks could not be started: {error.strerror}: free memory or raise the "
                "process limit"
            ) from error
        finally:
            for _, their in pairs:
                their.close()
        for ours, _ in pairs:
            self._poll.register(ours, select.POLLIN)
        return [ours for ours, _ in pairs]

    def _bury(self, process: _Process) -> None:
        """A process has died: its samples end, and forms that it was compiling go to another, or are refused where that
        is the second time. Another takes its place when one is asked for."""
        process.died = True
        self._poll.unregister(process.channel)
        process.channel.close()
        self._children = [child for child in self._children if child.poll() is None]
        for number, held in process.samples.items():
            held.lost = True
            if (guide := self._making.pop(number, None)) is not None:
                self._fail(guide)
        process.places += [held.place for held in process.samples.values()]
        process.samples.clear()
        forms, process.compiling = [self._by_number.pop(number) for number in process.compiling], set()
        for form in forms:
            form.deaths += 1
            if form.deaths == 1:
                self._compile(form)
            else:
                form.known, form.refusal = True, DEADLY

    def close(self) -> None:
        """Ends the processes. Idempotent."""
        for process in self.processes:
            process.channel.close()
        for child in self._children:
            child.wait()
        self.processes, self._children = [], []
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _shared_memory() -> int:
    """Returns the descriptor of a file without a name: of memory alone where the system has that, as Linux."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-masks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _held(guide: Guide) -> HeldSample:
    assert isinstance(guide.constraint, HeldSample), "a guide of another maker's"
    return guide.constraint

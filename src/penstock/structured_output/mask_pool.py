"""MaskPool: processes that make the masks of structured outputs. A grammar (class Form) is the
schema, regex or Lark grammar of a request; "known" means compiled or refused.

    a grammar --Compile--> the trial process --Compiled--> refused, or
              --Compile--> a mask process, in turn --Compiled--> known
    a sample  --Begin--> the mask process with the fewest samples; its masks then go over the board
                         (mask_board.py)

A sample's place is its row on the board. A mask takes up to milliseconds, a third of it with the
interpreter's lock held, and masks of one grammar delay each other in one process: 256 samples took
51 ms per step in eight threads of the engine's process, while a step of 1,024 rows takes 9 ms. A
process that dies (of memory, or of a bug in the library) fails only its own samples, and is started
again. Knows processes and places; no rows.
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import socket
import subprocess
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from penstock.children.spawn import QUIET, command_of, spawn
from penstock.errors import CapacityError, EngineError, UsageError
from penstock.mask_board import MaskBoard
from penstock.request import SamplingParams, StructuredOutputsParams
from penstock.schedule.step import Int32
from penstock.structured_output.form_trials import Compile
from penstock.structured_output.mask_process import Begin, End, Grown, Look, MaskStart, Up
from penstock.structured_output.mask_worker_handle import MaskWorker

KEPT = 512  # most compiled grammars that are kept
FEW = 16  # most grammars that are kept once a mask process has grown too much
KEPT_BYTES = 128 * 2**20  # most bytes of the kept grammars, as text and compiled
PLACES = 4096  # most samples with a structured output at once, running and preempted
PROCESSES = max(1, min(14, (os.cpu_count() or 1) - 2))
DEADLY = "structured_outputs cannot be served: the processes that compiled it ended"
_NAP = 1e-4  # seconds between two checks of the sockets
# environment of the processes, which must have one thread each, since they fork
_ALONE = {
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(slots=True, eq=False)
class Form:
    """A grammar (JSON schema, regex or Lark) and its state. known: True once compiled or refused.
    slow: True if compiling took long. background: True if a background request was the first to use
    it. bytes: its memory. dropped: True if the pool has forgotten it. deaths: number of processes
    that died while compiling it."""

    number: int
    asked: StructuredOutputsParams
    known: bool = False
    refusal: str | None = None
    slow: bool = False
    background: bool = False
    bytes: int = 0
    dropped: bool = False
    deaths: int = 0


class MaskPool:
    """A pool of processes that compute masks; implements schedule.mask_makers.MaskMakers. Not
    thread-safe. The processes start when the first grammar arrives."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        ends: tuple[int, ...],
        processes: int = PROCESSES,
        places: int = PLACES,
        opened: Callable[[Int32], None] = lambda words: None,
        compact: bool = False,
    ) -> None:
        """folder: folder of the tokenizer. ends: ids of the model's end tokens. processes: number
        of mask processes. places: most samples at once. opened: called once with the board's masks,
        int32 [places, words], where words = vocab_size / 32 rounded up. compact: no white space
        between parts of JSON, unless the grammar allows it."""
        self._compact = compact
        self._made_of, self._count = (str(folder), vocab_size, list(ends)), processes
        self._words, self.places = -(-vocab_size // 32), places // processes * processes
        self._forms: OrderedDict[bytes, Form] = OrderedDict()
        # number -> grammar that is being compiled
        self._by_number: dict[int, Form] = {}
        self._bytes = self._turn = 0
        self._numbers = itertools.count(1)  # numbers for new grammars
        self.processes: list[MaskWorker] = []
        self._trials: MaskWorker | None = (
            None  # the trial process, which compiles each grammar first and can be killed
        )
        self._children: list[subprocess.Popen[bytes]] = []
        self._memory, self._opened = -1, opened
        self._board: MaskBoard | None = None
        self._lost: set[int] = set()  # board indices of samples whose mask process has died
        self._poll = select.poll()
        self._decoder = msgspec.msgpack.Decoder[Up](Up)

    # --- grammars ---------------------------------------------------------------------------------

    def ask(self, asked: StructuredOutputsParams, background: bool = False) -> Form:
        """Returns the grammar of these parameters: a kept one, or a new one whose compilation
        starts now. background: True for a background request, whose grammar is compiled last."""
        self.look()  # also notices mask processes that have died
        if self._compact and asked.whitespace_pattern is None:
            asked = replace(asked, disable_any_whitespace=True)
        key = msgspec.msgpack.encode(asked)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = Form(next(self._numbers), asked, background=background)
            form.bytes = len(key)
            self._bytes += form.bytes
            self._compile(form, self._try)
        self._forms.move_to_end(key)
        self._keep()
        return form

    def compiled(self, asked: StructuredOutputsParams) -> Form:
        """Waits until a grammar is compiled, and returns it.
        Raises UsageError if it cannot be served."""
        form = self.ask(asked)
        while not form.known:
            self.look(_NAP)
        return _servable(form)

    @staticmethod
    def factory(
        pool: MaskPool | None, sampling: SamplingParams, known: Form | None = None
    ) -> Callable[[int], int]:
        """Returns a function that begins a sample and returns its index on the board. The
        function's argument is the sample's index. known: the grammar, if the caller has it already.
        Raises UsageError if the grammar cannot be served."""
        asked = sampling.structured_outputs
        assert asked is not None
        if pool is None:
            rule = "structured_outputs need a tokenizer: leave skip_tokenizer_init off"
            raise UsageError(rule, param="structured_outputs", rule=rule)
        form = pool.compiled(asked) if known is None else _servable(known)
        barred = bool(sampling.allowed_token_ids or sampling.bad_words)
        ends = tuple(sampling.stop_token_ids or ())
        return lambda sample: pool.sample(form, sampling.min_tokens, ends, forces=not barred)

    def _compile(self, form: Form, pick: Callable[[], MaskWorker]) -> None:
        """Sends a grammar to a process. pick: chooses the process."""
        try:
            if not self.processes:
                self._start()
            process = pick()
            self._hand(form, process)
        except CapacityError as error:
            form.known, form.refusal = True, str(error)
            return
        process.compiling.add(form.number)
        self._by_number[form.number] = form

    def _try(self) -> MaskWorker:
        assert self._trials is not None, "it starts with the others"
        return self._trials

    def _next(self) -> MaskWorker:
        self._turn += 1
        return self.processes[(self._turn - 1) % self._count]

    def _hand(self, form: Form, process: MaskWorker) -> None:
        if process.died:
            process.connect(*self._spawn(self._about(process.index), 1))
        process.forms.add(form.number)
        process.send(Compile(form.number, form.asked, form.slow, form.background))

    def _keep(self, most: int | None = None) -> None:
        """Drops grammars, least recently used first, until at most `most` (None: KEPT) and
        KEPT_BYTES bytes are left. Grammars that are being compiled stay, since a waiting request
        would have them compiled again and again."""
        most = KEPT if most is None else most
        while len(self._forms) > most or (self._bytes > KEPT_BYTES and len(self._forms) > 1):
            oldest = next((key for key, form in self._forms.items() if form.known), None)
            if oldest is None:
                return
            self._drop(oldest)

    def _drop(self, key: bytes) -> None:
        """Drops a grammar. Samples that have begun keep it."""
        form = self._forms.pop(key)
        self._bytes -= form.bytes
        form.dropped = True
        for process in self.processes:
            if form.number in process.forms:
                self._let_go(form, process)

    @staticmethod
    def _let_go(form: Form, process: MaskWorker) -> None:
        process.forms.discard(form.number)
        process.send(End(grammars=(form.number,)))

    # --- samples that have a grammar --------------------------------------------------------------

    @property
    def board(self) -> MaskBoard:
        assert self._board is not None, "nothing has begun"
        return self._board

    @property
    def held(self) -> int:
        """Returns the number of samples that have an index on the board."""
        return sum(len(process.places) - len(process.free) for process in self.processes)

    def sample(
        self,
        form: Form,
        min_tokens: int = 0,
        stop_ids: tuple[int, ...] = (),
        *,
        forces: bool = True,
    ) -> int:
        """Begins a sample in the process with the fewest samples, and returns its place. If no
        process can be started, its masks allow no token. Raises EngineError if there are too many
        samples."""
        process = max(self.processes, key=lambda each: len(each.free))
        if not process.free:
            raise EngineError(
                f"more than {self.places} samples are held to forms: ask for fewer at once"
            )
        place = process.free.pop()
        try:
            if process.died or form.number not in process.forms:
                self._hand(form, process)
        except CapacityError:
            self._lost.add(place)
            return place
        self.board.begun[place] += 1
        process.send(
            Begin(place, form.number, min_tokens, stop_ids, forces, int(self.board.begun[place]))
        )
        if form.dropped:  # the pool dropped the grammar while the request waited
            self._let_go(form, process)
        return place

    def begin(self, constraint: object) -> int:
        """Returns the sample's place, which `sample` returned as its constraint."""
        assert isinstance(constraint, int), "a sample of another maker's"
        return constraint

    def start(self, places: Int32, tokens: Int32) -> None:
        board, shape = self.board, (self._count, -1)
        # Processes that are still making masks check the board by themselves; only the others need
        # a message.
        awake = (board.made != board.asked).reshape(shape).any(1).tolist()
        board.ask(places, tokens)
        self._fail(self._lost.intersection(places.tolist()) if self._lost else ())
        due = np.bincount(places // (self.places // self._count), minlength=self._count).tolist()
        for process, looks, count in zip(self.processes, awake, due, strict=True):
            if (
                count and not looks and not process.unsent
            ):  # if messages are unsent, the process checks the board once it has read them
                process.send(Look())

    def wait(self, seconds: float) -> int:
        until = time.monotonic() + seconds
        while (missing := self.board.missing()) and (left := until - time.monotonic()) >= 0:
            self.look(min(_NAP, left))
        return missing

    def end(self, places: Int32) -> None:
        over: dict[int, list[int]] = {}
        for place in places.tolist():
            process = self.processes[place // (self.places // self._count)]
            process.free.append(place)
            if place in self._lost:
                self._lost.discard(place)
            else:
                over.setdefault(process.index, []).append(place)
        for index, mine in over.items():
            self.processes[index].send(End(np.array(mine, np.int32).tobytes()))

    def _fail(self, lost: Collection[int]) -> None:
        """Gives the samples at the places `lost`, whose process has died, a mask that allows no
        token. That ends them with an error."""
        if lost:
            board, places = self.board, [*lost]
            board.words[places], board.count[places] = 0, 0
            board.made[places] = board.asked[places]

    # --- messages and processes -------------------------------------------------------------------

    def look(self, seconds: float = 0.0) -> None:
        """Handles all messages that have come and all processes that have died, and sends waiting
        messages. If nothing has come, sleeps `seconds`."""
        every = self.processes if self._trials is None else [*self.processes, self._trials]
        for process in every:
            process.flush()
        heard = self._poll.poll(0)
        if not heard and seconds:
            time.sleep(seconds)
        while heard:
            by_descriptor = {process.channel.fileno(): process for process in every}
            for descriptor, _ in heard:
                process = by_descriptor[descriptor]
                try:
                    for data in process.frames.read():
                        self._take(process, self._decoder.decode(data))
                except (EOFError, OSError):
                    self._bury(process)
            heard = self._poll.poll(0)

    def _take(self, process: MaskWorker, word: Up) -> None:
        if isinstance(word, Grown):
            self._keep(FEW)
            return
        process.compiling.discard(word.grammar)
        form = self._by_number.pop(word.grammar, None)
        if form is None:
            return
        if process is self._trials and word.refusal is None:
            form.slow = word.slow
            if not form.dropped:
                form.bytes += word.bytes
                self._bytes += word.bytes
            self._compile(form, self._next)
        else:
            form.known, form.refusal = True, word.refusal
        if process is self._trials:
            process.forms.discard(form.number)
        # there may be more than KEPT grammars, since those being compiled cannot be dropped
        self._keep()

    def _start(self) -> None:
        if self._memory < 0:
            self._memory, size = _shared_memory(), MaskBoard.size(self.places, self._words)
            os.ftruncate(self._memory, size * 4)
            self._board = MaskBoard.over(
                np.frombuffer(mmap.mmap(self._memory, 0), np.int32), self.places, self._words
            )
            self._opened(self._board.words)
        start = self._about(0)
        *channels, trials = self._spawn(start, self._count + 1)
        self.processes = [
            MaskWorker(index, channel, start.mine(index)) for index, channel in enumerate(channels)
        ]
        self._trials = MaskWorker(self._count, trials, range(0))

    def _about(self, first: int) -> MaskStart:
        folder, vocab_size, ends = self._made_of
        return MaskStart(
            folder, vocab_size, ends, self._memory, self.places, self._words, first, self._count
        )

    def _spawn(self, start: MaskStart, count: int) -> list[socket.socket]:
        """Starts `count` processes that share a vocabulary. Returns the engine's ends of their
        sockets."""
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [their.fileno() for _, their in pairs]
        about = msgspec.json.encode(start).decode()
        try:
            self._children.append(
                spawn(
                    command_of("penstock.structured_output.mask_process", about, *theirs),
                    "the processes that make masks",
                    fds=(*theirs, self._memory),
                    environment=_ALONE,
                    stdout=QUIET,
                )
            )
        finally:
            for _, their in pairs:
                their.close()
        for ours, _ in pairs:
            self._poll.register(ours, select.POLLIN)
        return [ours for ours, _ in pairs]

    def _bury(self, process: MaskWorker) -> None:
        """Handles a dead process. Its samples end with an error. Grammars that it was compiling are
        compiled again, and refused after a second death. The process is started again when it is
        needed."""
        process.died = True
        process.unsent.clear()
        self._poll.unregister(process.channel)
        process.channel.close()
        self._children = [child for child in self._children if child.poll() is None]
        lost = {*process.places} - {*process.free}
        self._lost |= lost
        self._fail(lost)
        forms, process.compiling = (
            [self._by_number.pop(number) for number in process.compiling],
            set(),
        )
        for form in forms:
            form.deaths += 1
            if form.deaths == 1:
                self._compile(form, self._try)
            else:
                form.known, form.refusal = True, DEADLY

    def close(self) -> None:
        """Ends the processes. Idempotent."""
        for process in [*self.processes, *filter(None, [self._trials])]:
            process.channel.close()
        for child in self._children:
            child.wait()
        self.processes, self._trials, self._children = [], None, []
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _servable(form: Form) -> Form:
    """Returns the grammar, which is compiled. Raises UsageError if it was refused."""
    if form.refusal is not None:
        raise UsageError(form.refusal, param="structured_outputs", rule=form.refusal)
    return form


def _shared_memory() -> int:
    """Returns the file descriptor of a nameless file for the board; in memory on systems with
    memfd, such as Linux."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-masks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

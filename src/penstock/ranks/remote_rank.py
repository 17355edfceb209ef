"""RemoteRank: rank 0's handle of another rank's process. It sends orders, receives reports, and
notices the process's end.

One thread per rank starts the process, receives its messages and waits for its end. Knows processes
and messages; no tensors.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import threading
from collections import deque

import msgspec

from penstock.children.spawn import command_of, how_ended, spawn
from penstock.errors import CapacityError, EngineError, PenstockError
from penstock.execute.limits import Limits
from penstock.ranks.rank_channel import (
    RankChannel,
    RankDone,
    RankDrew,
    RankLimits,
    RankStart,
    decode_word,
    encode,
)
from penstock.ranks.rank_channel import checksum as checksum_of
from penstock.schedule.step import StepTokens

LOADING = 1800.0  # most seconds for a rank to load its weights
_LEAVING = 2.0  # seconds until a process that was told to end, or has closed its socket, is killed


class RemoteRank:
    """Another rank's process; starts loading its share of the model at once."""

    def __init__(self, start: RankStart) -> None:
        self.rank = start.rank
        # the error with which the rank's process ended; None before
        self.error: PenstockError | None = None
        self.silent = (
            False  # True once its socket has closed; the reason of its end is known slightly later
        )
        self.counts: dict[str, int] = {}  # the runner's counts in the rank's last report
        self.process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._limits: queue.SimpleQueue[Limits | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[RankDone | None] = queue.SimpleQueue()
        self._heard: deque[RankDrew] = deque()
        # rank 0's own checksums of steps, to compare with the rank's
        self._drawn: deque[RankDrew] = deque()
        own, theirs = socket.socketpair()
        self._channel = RankChannel(own, start.seconds)
        # The kernel ends a process with the *thread* that started it (children/lifetime.py), so
        # this thread must live as long.
        self._thread = threading.Thread(
            target=self._live, args=(theirs,), name=f"penstock-rank{self.rank}", daemon=True
        )
        self._thread.start()
        self.send(encode(start))

    def send(self, data: bytes | bytearray) -> None:
        """Sends a message. Raises the rank's error if it has ended, or EngineError if it no longer
        reads."""
        if self.error is None:
            try:
                return self._channel.send(data)
            except OSError as error:
                self._ended.wait(_LEAVING)
                self._end(EngineError(f"rank {self.rank} takes no more steps: {error.strerror}"))
        raise self.failure()

    def limits(self) -> Limits:
        """Waits until the rank's weights are loaded; returns its limits. Raises the rank's error if
        it has ended."""
        try:
            found = self._limits.get(timeout=LOADING)
        except queue.Empty:
            raise EngineError(
                f"rank {self.rank} has not loaded its weights in {LOADING:.0f} s"
            ) from None
        if found is None:
            raise self.failure()
        return found

    def done(self) -> PenstockError | None:
        """Waits until the rank has done the oldest order; returns the error of a refused one, else
        None. Raises the rank's error if it has ended."""
        found = self._done.get()
        if found is None:
            raise self.failure()
        return None if found.refused is None else found.refused.error(f"rank {self.rank}: ")

    def compare(self, number: int, tokens: StepTokens) -> None:
        """Compares the rank's reported checksums with rank 0's tokens. Raises EngineError if they
        differ."""
        self._drawn.append(RankDrew(number, checksum_of(tokens)))
        while self._drawn and self._heard:
            own, said = self._drawn[0], self._heard[0]
            if own.number <= said.number:
                self._drawn.popleft()
            # rank 0 did not read this step, so there is nothing to compare
            if said.number <= own.number:
                self._heard.popleft()
            if own.number == said.number and own.checksum != said.checksum:
                raise EngineError(
                    f"rank {self.rank} drew other tokens than rank 0: start the engine anew"
                )

    def wait(self, seconds: float) -> bool:
        """Waits for the rank's end up to `seconds`; returns True if it has ended."""
        return self._ended.wait(seconds)

    def failure(self) -> PenstockError:
        """Returns a new copy of the rank's error, for each raise."""
        assert self.error is not None
        return type(self.error)(str(self.error), param=self.error.param)

    def hang_up(self) -> None:
        """Tells the rank to end; `close` waits for it."""
        self._channel.hang_up()

    def close(self) -> None:
        """Ends the process; kills it if it doesn't end by itself. Idempotent."""
        self.hang_up()
        self._thread.join()
        self._channel.close()

    def _live(self, theirs: socket.socket) -> None:
        try:
            command = command_of("penstock.ranks.rank_process", theirs.fileno())
            self.process = spawn(
                command, f"the process of rank {self.rank}", fds=(theirs.fileno(),)
            )
        except CapacityError as error:
            return self._end(error)
        finally:
            theirs.close()
        try:
            self._hear()
        except msgspec.MsgspecError as error:
            self._end(EngineError(f"rank {self.rank} said what could not be read: {error}"))
        self.silent = True
        try:
            code = self.process.wait(_LEAVING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._end(EngineError(f"rank {self.rank} {how_ended(code)}: start the engine anew"))

    def _hear(self) -> None:
        """Processes the rank's messages until its socket closes."""
        while (data := self._channel.receive()) is not None:
            word = decode_word(data)
            if isinstance(word, RankDrew):
                self._heard.append(word)
                self.counts = word.counts
            elif isinstance(word, RankLimits):
                self._limits.put(word.limits)
            elif isinstance(word, RankDone):
                self._done.put(word)
            else:
                self._end(word.error(f"rank {self.rank}: "))

    def _end(self, error: PenstockError) -> None:
        """Records why the rank ended; only the first error is kept."""
        if self.error is None:
            self.error = error
        self._limits.put(None)
        self._done.put(None)
        self._ended.set()

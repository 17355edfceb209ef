"""Patience with a disk that is full, fails or doesn't answer: what it failed at is tried again until it works, or the
server ends, and the event loop waits for none of it.

It knows errors and pauses, and a batch by its name, to say who waits; not what is written.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from penstock.errors import CapacityError, JournalError, PenstockError

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a failed write is tried again

Result = TypeVar("Result")


class DamagedError(Exception):
    """What a batch wrote is not what its journals say; computing on would mix it with something else."""


class Patience:
    """One batch's."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        """folder: the state's, for who reads of it."""
        self._name, self._place = name, "it" if folder is None else str(folder)
        self._waiting = 0
        self._ending = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._ending.is_set()

    @property
    def waits(self) -> bool:
        """Whether something was tried in vain, and will be again."""
        return self._waiting > 0

    def end(self) -> None:
        """The server ends: nothing is tried again."""
        self._ending.set()

    async def save(self, write: Callable[[], None]) -> None:
        """A write of the journals, in a thread. Where the server ends it is tried once: rows are computed again."""
        try:
            await self.insist(lambda: asyncio.to_thread(write))
        except PenstockError as error:
            if not self.ended:
                raise
            print(f"penstock: {self._name} loses its last rows, and computes them again: {error}", file=sys.stderr)

    async def insist(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """What `work` gives, tried until the disk lets it. Said once, however long it takes."""
        pause = 0.0
        try:
            while True:
                try:
                    result = await work()
                except FileNotFoundError as error:  # nobody but us takes these files away
                    raise DamagedError from error
                except (OSError, sqlite3.OperationalError, CapacityError, JournalError) as error:
                    if isinstance(error.__cause__, FileNotFoundError):
                        raise DamagedError from error
                    if self.ended or (isinstance(error, JournalError) and error.__cause__ is None):
                        raise
                    if not pause:
                        self._waiting += 1
                        self._tell(why(error))
                    pause = min(2 * pause, LONGEST_PAUSE) or FIRST_PAUSE
                    await self._rest(pause)
                else:
                    if pause:
                        print(f"penstock: {self._name} goes on", file=sys.stderr)
                    return result
        finally:
            self._waiting -= pause > 0

    def _tell(self, reason: str) -> None:
        """For whoever runs the server."""
        print(
            f"penstock: {self._name} waits for the state folder's disk ({reason}): see to it, and make room in "
            f"{self._place} where it is full; it is tried again until it works",
            file=sys.stderr,
        )

    async def _rest(self, seconds: float) -> None:
        """Less where the server ends. Not by asyncio.wait_for: it loses a cancel that comes in the turn in which what
        it waits for does, and whoever calls `end` cancels next; the batch would go on, and be waited for."""
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((ending,), timeout=seconds)
        finally:
            ending.cancel()


def close_behind(file: BinaryIO) -> None:
    """Closes what was read, behind a read that is under way: a disk may never answer that, so a thread waits for it."""
    closing = asyncio.get_running_loop().run_in_executor(None, file.close)
    closing.add_done_callback(_tell_unclosed)


def _tell_unclosed(closing: asyncio.Future[None]) -> None:
    error = None if closing.cancelled() else closing.exception()
    if error is not None:
        print(f"penstock: the state folder's disk failed as a file was closed ({why(error)})", file=sys.stderr)


def why(error: BaseException) -> str:
    """In a few words; of a journal's error its cause, since it tells the user of a command what to do."""
    cause = error.__cause__ if isinstance(error, PenstockError) and error.__cause__ is not None else error
    words = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return " ".join(words.split()).lower()

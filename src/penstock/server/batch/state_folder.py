"""The state folder: database, contents and lock of a server that keeps files and batches.

One thread does all of its work on the disk, off the event loop: `await state.call(state.store.file, ...)`. A second
server on the same folder is refused. It knows the folder's parts; no HTTP, no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from penstock.errors import CapacityError, UsageError
from penstock.server.batch.database import BatchDatabase
from penstock.server.batch.disk_reserve import Reserve, is_full
from penstock.server.batch.file_store import FULL, FileStore, StorageError, storage_error

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


_OURS = frozenset({"state.sqlite", "files", "batches", "lock"})
_BESIDE = frozenset({"lost+found"})  # of a disk of its own


class StateFolder:
    """An open state folder. Raises UsageError where it cannot be one, CapacityError where it is in use.

    uploads: how many each owner has on their way in.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uploads: Counter[str] = Counter()
        _check_ours(folder)
        self._lock = _locked(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-state")
        try:
            self.shelf = FileStore(folder)
            self.store = BatchDatabase(folder / "state.sqlite", beside=not self.shelf.empty)
            _tell_aside(folder, self.shelf.sweep(*self.store.known()))
            self.reserve = Reserve(folder)
            self.reserve.keep()
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise _unusable(folder, error) from error
        except BaseException:
            os.close(self._lock)
            raise

    async def call(
        self, work: Callable[Parameters, Result], *values: Parameters.args, **named: Parameters.kwargs
    ) -> Result:
        """What `work` gives, run in the state's thread. Raises StorageError for a fault of the disk."""
        try:
            return await self.attempt(work, *values, **named)
        except OSError as error:
            raise storage_error(error) from error
        except sqlite3.Error as error:
            if is_full(error):
                raise StorageError(FULL) from error
            raise StorageError(f"the server's database failed at this ({_words(error)}): try again") from error

    async def make_room(self, work: Callable[[], Result]) -> Result:
        """As call, of what leads to more room on the disk: where that is full, it gets the reserve's."""
        return await self.call(self._with_reserve, work)

    def _with_reserve(self, work: Callable[[], Result]) -> Result:
        self.reserve.keep()
        try:
            return work()
        except (OSError, sqlite3.Error) as error:
            if not (is_full(error) and self.reserve.give()):
                raise
        return work()

    async def attempt(
        self, work: Callable[Parameters, Result], *values: Parameters.args, **named: Parameters.kwargs
    ) -> Result:
        """As call, with whatever `work` raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*values, **named))

    def close(self) -> None:
        """After the last call; what the thread still has to do is done first."""
        self._thread.shutdown()
        self.store.close()
        os.close(self._lock)


@contextlib.contextmanager
def opened(folder: Path | str | None) -> Iterator[StateFolder | None]:
    """The state of a folder, closed behind; None where there is no folder. Raises as StateFolder."""
    if folder is None:
        yield None
        return
    state = StateFolder(Path(folder))
    try:
        yield state
    finally:
        state.close()


def _tell_aside(folder: Path, aside: tuple[int, Path] | None) -> None:
    """Says at a start what was moved aside, and where to."""
    if aside is not None:
        count, place = aside
        print(
            f"penstock: {count} files or batches in {folder} that its state.sqlite doesn't know (was an older one put "
            f"back?) were moved to {place}",
            file=sys.stderr,
        )


def _check_ours(folder: Path) -> None:
    """A folder of something else is no state folder, and nobody would look for files there. Raises UsageError."""
    try:
        names = {each.name for each in folder.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(folder, error) from error
    others = sorted(name for name in names - _BESIDE if not name.startswith("."))
    if others and not names & _OURS:
        shown = "".join(letter if letter.isprintable() else "?" for letter in others[0][:80])
        raise UsageError(
            f"the state folder {folder} holds other things ({shown}) and nothing of a server's: name a new folder, "
            "or an empty one, as --state-dir",
            param="state_dir",
        )


def _locked(folder: Path) -> int:
    """The folder's lock, which goes with the process however it ends."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise CapacityError(
            f"the state folder {folder} is in use by another server: end it, or name another --state-dir",
            param="state_dir",
        ) from error
    return lock


def _unusable(folder: Path, error: Exception) -> UsageError:
    reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else _words(error)
    return UsageError(
        f"the state folder {folder} cannot be used ({reason}): name a folder of yours as --state-dir", param="state_dir"
    )


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:100]

"""The shelf: contents of files on disk, whole or not there at all. It knows a folder; no database, no HTTP.

    DIR/files/file-...          finished contents, each synced before it got its name
    DIR/files/*.part            what is being written; swept away at a start
    DIR/batches/batch_.../      what a batch has written so far: two journals (journal.py)

Names are made by the server and checked here again: nothing that a client sends becomes a path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.disk import sync_folder
from penstock.errors import PenstockError
from penstock.server.batch_patience import why
from penstock.server.batch_reserve import is_full
from penstock.server.refusals import HttpError

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
COPY_BYTES = 1 << 20
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # of a filesystem that gives a file one name


FULL = (
    "the disk of the server's state folder is full: delete files of yours (DELETE /v1/files/ID), or ask "
    "whoever runs it to make room"
)


class StorageError(HttpError):
    """The state folder's disk is full, or fails."""

    status, code = 507, "storage"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


class Shelf:
    """The contents of one state folder."""

    def __init__(self, folder: Path) -> None:
        self.files, self.batches = folder / "files", folder / "batches"
        for each in (self.files, self.batches):
            each.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder)

    @property
    def empty(self) -> bool:
        return not any(any(each.iterdir()) for each in (self.files, self.batches))

    def path(self, file_id: str) -> Path:
        """Where a file's content lies."""
        if FILE_ID.fullmatch(file_id) is None:
            raise ValueError("no id of a file")
        return self.files / file_id

    def draft(self, file_id: str) -> Draft:
        """A content that is being written. Raises StorageError."""
        return Draft(self.path(file_id))

    def adopt(self, source: Path, file_id: str) -> int:
        """Gives a synced file its name on the shelf and says its bytes; it may have it already. Raises OSError."""
        target = self.path(file_id)
        if not target.exists():
            os.rename(source, target)
        sync_folder(self.files)
        return target.stat().st_size

    def lend(self, source: Path, file_id: str) -> int:
        """As adopt, of a file that is left its own name too. Raises OSError."""
        target = self.path(file_id)
        if not target.exists():
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                _copy(source, target)
        sync_folder(self.files)
        return target.stat().st_size

    def remove(self, file_id: str) -> None:
        """Takes a content away; what stays by a fault goes at the next start."""
        _take_away(self.path(file_id))

    def batch_folder(self, batch_id: str) -> Path:
        """Where a batch writes; it is made where it isn't. Raises OSError."""
        if BATCH_ID.fullmatch(batch_id) is None:
            raise ValueError("no id of a batch")
        folder = self.batches / batch_id
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(self.batches)
        return folder

    def remove_batch(self, batch_id: str) -> None:
        """Takes away what a batch wrote on its way; what stays by a fault goes at the next start."""
        shutil.rmtree(self.batches / batch_id, ignore_errors=True)

    def sweep(self, files: Collection[str], batches: Collection[str]) -> None:
        """Removes what nobody knows any more: drafts, contents and folders of whom a kill left only that."""
        for path in self.files.iterdir():
            if path.name not in files:
                path.unlink(missing_ok=True)
        for path in self.batches.iterdir():
            if path.name not in batches:
                shutil.rmtree(path, ignore_errors=True)


class Draft:
    """A file's content on its way to the disk. Left without `keep`, it goes.

    Its calls block, so threads make them; one at a time, since a request may end while a thread still writes for it.
    """

    def __init__(self, target: Path) -> None:
        self._target, self._part = target, target.with_name(target.name + ".part")
        self.size = 0
        self._turn = threading.Lock()
        with _told():
            self._file: BinaryIO = open(self._part, "xb", buffering=0)  # noqa: SIM115 - closed by keep or drop

    def write(self, data: bytes) -> None:
        """Raises StorageError."""
        view = memoryview(data)
        with self._turn, _told():
            while view:
                view = view[self._file.write(view) :]
        self.size += len(data)

    def sync(self) -> None:
        """What takes long of `keep`, where that is called in a thread that others wait for. Raises StorageError."""
        with self._turn, _told():
            os.fsync(self._file.fileno())

    def keep(self) -> None:
        """Synced, named, and the name synced; or nothing of it is there. Raises StorageError."""
        with self._turn, _told():
            os.fsync(self._file.fileno())
            self._file.close()
            os.rename(self._part, self._target)
            try:
                sync_folder(self._target.parent)
            except BaseException:
                _take_away(self._target)
                raise

    def drop(self) -> None:
        """Takes away what was written, unless it was kept."""
        with self._turn:
            with contextlib.suppress(OSError):  # what could not be written is not wanted any more
                self._file.close()
            _take_away(self._part)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raises StorageError for what the disk raises."""
    try:
        yield
    except OSError as error:
        raise storage_error(error) from error


def _copy(source: Path, target: Path) -> None:
    """A file under another name, whole or not at all. Raises OSError."""
    part = target.with_name(target.name + ".part")
    try:
        with source.open("rb") as there, part.open("wb") as here:
            shutil.copyfileobj(there, here, COPY_BYTES)
            here.flush()
            os.fsync(here.fileno())
        os.rename(part, target)
    except BaseException:
        _take_away(part)
        raise


def _take_away(path: Path) -> None:
    """Removes a file that nobody knows any more. Where the disk fails it stays until the next start's sweep."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        print(f"penstock: {path.name} stays in the state folder until the next start ({why(error)})", file=sys.stderr)


def storage_error(error: OSError) -> PenstockError:
    """What a client hears of a disk's fault: no path of ours is in it."""
    if is_full(error):
        return StorageError(FULL)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError("the server has as many files open as it may: try again, with less at once")
    return StorageError("the server's disk failed at this: try again, and tell whoever runs it")

"""The shelf: contents of files on disk, whole or not there at all. It knows a folder; no database, no HTTP.

    DIR/files/file-...          finished contents, each synced before it got its name
    DIR/files/file-....part     what is being written; swept away at a start
    DIR/batches/batch_.../      what a batch has written so far: two journals (journal.py)
    DIR/unknown/DATE-.../       contents and folders that a start found and no row knew

Names are made by the server and checked here again: nothing that a client sends becomes a path.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from penstock.disk import sync_folder
from penstock.errors import PenstockError
from penstock.server.batch.disk_reserve import is_full
from penstock.server.batch.disk_retry import why
from penstock.server.openai.http_errors import HttpError

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
_PART = ".part"  # ends the name of a content that is being written
_DRAFT = re.compile(FILE_ID.pattern + re.escape(_PART))
COPY_BYTES = 1 << 20
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # of a filesystem that gives a file one name
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # of opening a link, a folder, a socket


FULL = (
    "the disk of the server's state folder is full: delete files of yours (DELETE /v1/files/ID), or ask "
    "whoever runs it to make room"
)


class StorageError(HttpError):
    """The state folder's disk is full, or fails."""

    status, code = 507, "storage"


class FileDamagedError(HttpError):
    """What the disk has of a content is not what was kept there; to ask for it again is no use."""

    status, code = 500, "file_damaged"

    def __init__(self, how: str) -> None:
        message = f"this file is damaged on the server's disk ({how}): upload it again, or tell whoever runs the server"
        super().__init__(message, headers={"x-should-retry": "false"})


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


class FileStore:
    """The contents of one state folder."""

    def __init__(self, folder: Path) -> None:
        self.files, self.batches = folder / "files", folder / "batches"
        self._unknown = folder / "unknown"
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

    def draft(self, file_id: str) -> ContentDraft:
        """A content that is being written. Raises StorageError."""
        return ContentDraft(self.path(file_id))

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

    def sweep(self, files: Collection[str], batches: Collection[str], over: Collection[str]) -> tuple[int, Path] | None:
        """Removes what a kill left: drafts, and folders of batches that are `over`. Whatever else is in neither list
        is moved aside, since a database that was put back from a copy knows less than there is: gives how many, and
        where they are. Raises OSError."""
        strange = []
        for path in self.files.iterdir():
            if _DRAFT.fullmatch(path.name) and not path.is_dir():
                path.unlink(missing_ok=True)
            elif path.name not in files:
                strange.append(path)
        for path in self.batches.iterdir():
            if path.name in over:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in batches:
                strange.append(path)
        return (len(strange), self._move_aside(strange)) if strange else None

    def _move_aside(self, paths: Sequence[Path]) -> Path:
        """The new folder in which they are, each below its folder's name. Raises OSError."""
        self._unknown.mkdir(mode=0o700, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%d-", time.gmtime()), dir=self._unknown))
        for path in paths:
            (place / path.parent.name).mkdir(mode=0o700, exist_ok=True)
            os.rename(path, place / path.parent.name / path.name)
        return place


def open_content(path: Path, size: int | None = None) -> BufferedReader:
    """A content to be read; of a link nothing is, nor of a pipe. size: bytes that it must have. Raises
    FileDamagedError, OSError."""
    try:
        file = open(path, "rb", opener=_open_no_link)  # noqa: SIM115 - the caller closes it
    except FileNotFoundError as error:
        raise FileDamagedError("it is not there") from error
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise FileDamagedError("it is a link, or no file") from error
    try:
        there = os.fstat(file.fileno())
        if not stat.S_ISREG(there.st_mode):
            raise FileDamagedError("it is no file")
        if size is not None and there.st_size != size:
            raise FileDamagedError(f"{there.st_size} bytes are there, and {size} were kept")
    except BaseException:
        file.close()
        raise
    return file


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def check_content(path: Path, size: int, sha256: str | None) -> None:
    """Raises FileDamagedError where a content isn't the one that was kept; by its bytes' count alone where no hash of
    them is known. OSError where it can't be read."""
    with open_content(path, size) as file:
        if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise FileDamagedError("its bytes are others than were kept")


class ContentDraft:
    """A file's content on its way to the disk. Left without `keep`, it goes.

    Its calls block, so threads make them; one at a time, since a request may end while a thread still writes for it.
    """

    def __init__(self, target: Path) -> None:
        self._target, self._part = target, target.with_name(target.name + _PART)
        self.size = 0
        self._hash = hashlib.sha256()
        self._turn = threading.Lock()
        with _told():
            self._file: BinaryIO = open(self._part, "xb", buffering=0)  # noqa: SIM115 - closed by keep or drop

    def write(self, data: bytes) -> None:
        """Raises StorageError."""
        view = memoryview(data)
        with self._turn, _told():
            while view:
                view = view[self._file.write(view) :]
            self._hash.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        """Of what was written."""
        return self._hash.hexdigest()

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
    part = target.with_name(target.name + _PART)
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
    """Removes a file that nobody knows any more, by a draft's name: where the disk fails, or a kill comes, it stays
    until the next start's sweep."""
    try:
        if path.suffix != _PART:
            path = path.rename(path.with_suffix(_PART))
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        print(f"penstock: {path.name} stays in the state folder until the next start ({why(error)})", file=sys.stderr)


def storage_error(error: OSError) -> PenstockError:
    """What a client hears of a disk's fault: no path of ours is in it."""
    if is_full(error):
        return StorageError(FULL)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError("the server has as many files open as it may: try again, with less at once")
    return StorageError("the server's disk failed at this: try again, and tell whoever runs it")

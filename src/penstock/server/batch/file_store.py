"""File contents on disk, complete or absent. A "content" is the bytes of one uploaded or result
file. Knows a folder; no database, no HTTP.

    DIR/files/file-...          finished contents, each synced before it was renamed to this
    DIR/files/file-....part     contents being written; removed at a start
    DIR/batches/batch_.../      results of an unfinished batch: two journals (journal.py)
    DIR/unknown/DATE-.../       contents and folders that a start found without a database row

The server makes the ids, and this module checks them again, so that no client's text becomes a
path. All methods block, so threads call them. Calls for one content must not overlap.
"""

from __future__ import annotations

import asyncio
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
import time
from collections.abc import Collection, Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from penstock.disk import sync_folder
from penstock.server.batch.disk_errors import FileDamagedError, describe

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
_PART = ".part"  # suffix of a file that is still being written
_DRAFT = re.compile(FILE_ID.pattern + re.escape(_PART))
# error numbers of opening a link, a folder, a socket
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


class FileStore:
    """The contents of the files that clients uploaded or batches made. Its methods raise
    OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.files, self.batches = folder, folder / "files", folder / "batches"
        for each in (self.files, self.batches):
            each.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder)

    @property
    def empty(self) -> bool:
        return not any(any(each.iterdir()) for each in (self.files, self.batches))

    def path(self, file_id: str) -> Path:
        """Returns the path of a file's content."""
        if FILE_ID.fullmatch(file_id) is None:
            raise ValueError("no id of a file")
        return self.files / file_id

    def draft(self, file_id: str) -> ContentDraft:
        """Creates a content for writing. It gets its final name by ContentDraft.keep."""
        return ContentDraft(self.path(file_id))

    def adopt(self, source: Path, file_id: str) -> int:
        """Renames a synced file to the content of this id, unless that was done before. Returns its
        size in bytes."""
        target = self.path(file_id)
        if not target.exists():
            os.rename(source, target)
        sync_folder(self.files)
        return target.stat().st_size

    def remove(self, file_id: str) -> None:
        """Removes a content. If that fails, the next start of the server removes it."""
        _take_away(self.path(file_id))

    def batch_folder(self, batch_id: str) -> Path:
        """Returns a batch's working folder, and creates it if necessary."""
        if BATCH_ID.fullmatch(batch_id) is None:
            raise ValueError("no id of a batch")
        folder = self.batches / batch_id
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(self.batches)
        return folder

    def remove_batch(self, batch_id: str) -> None:
        """Removes a batch's working folder. If that fails,
        the next start of the server removes it."""
        shutil.rmtree(self.batches / batch_id, ignore_errors=True)

    def sweep(
        self, files: Collection[str], batches: Collection[str], over: Collection[str]
    ) -> None:
        """Removes what a killed server left: drafts, and folders of the batches in `over`. Moves
        everything that is neither in `files` nor in `batches` into the folder `unknown`, and prints
        that. A database restored from a backup may lack files of the folder."""
        strange = []
        for path in self.files.iterdir():
            if _DRAFT.fullmatch(path.name) and not path.is_dir():
                path.unlink(missing_ok=True)
            elif path.name not in files:
                strange.append(path)
        for path in self.batches.iterdir():
            if path.name in over:
                self.remove_batch(path.name)
            elif path.name not in batches:
                strange.append(path)
        if strange:
            self._move_aside(strange)

    def _move_aside(self, paths: Sequence[Path]) -> None:
        """Moves the paths into a new subfolder of `unknown`, each into a folder with its parent's
        name."""
        unknown = self._folder / "unknown"
        unknown.mkdir(mode=0o700, exist_ok=True)
        place = Path(
            tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%d-", time.gmtime()), dir=unknown)
        )
        for path in paths:
            (place / path.parent.name).mkdir(mode=0o700, exist_ok=True)
            os.rename(path, place / path.parent.name / path.name)
        print(
            f"penstock: {len(paths)} files or batches in {self._folder} that its state.sqlite"
            f" doesn't know (was an older one put back?) were moved to {place}",
            file=sys.stderr,
        )


class ContentDraft:
    """A content that is being written. `keep` makes it permanent; `drop` removes it if it wasn't
    kept. Its methods raise OSError."""

    def __init__(self, target: Path) -> None:
        self._target, self._part = target, _part_of(target)
        self.size = 0
        self._hash = hashlib.sha256()
        # closed by keep() or drop()
        self._file: BinaryIO = open(self._part, "xb", buffering=0)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._hash.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes written, in hex."""
        return self._hash.hexdigest()

    def sync(self) -> None:
        """Writes the content to the disk, the slow part of `keep`. Called in advance, since `keep`
        runs in a thread that other requests wait for."""
        os.fsync(self._file.fileno())

    def keep(self) -> None:
        """Syncs the content, renames it to its final name, and syncs the folder. Removes the
        content on an error."""
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._part, self._target)
        try:
            sync_folder(self._target.parent)
        except BaseException:
            _take_away(self._target)
            raise

    def drop(self) -> None:
        """Removes the content unless it was kept."""
        with contextlib.suppress(OSError):  # errors of an unwanted content don't matter
            self._file.close()
        _take_away(self._part)


def open_content(path: Path, size: int | None = None) -> BufferedReader:
    """Opens a content for reading. size: its expected number of bytes. Raises FileDamagedError for
    another size, a missing file, a link or a pipe; and OSError."""
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


def check_content(path: Path, size: int, sha256: str | None) -> None:
    """Raises FileDamagedError if a content's size or SHA-256 (if known) differs from the given one.
    Raises OSError if it can't be read."""
    with open_content(path, size) as file:
        if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise FileDamagedError("its bytes are others than were kept")


def close_behind(file: BinaryIO) -> None:
    """Closes a file in a thread, since closing waits for a running read, and a broken disk may
    never finish that."""
    asyncio.get_running_loop().run_in_executor(None, file.close)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + _PART)


def _take_away(path: Path) -> None:
    """Removes a file after renaming it to a draft. If the disk fails or the server is killed in
    between, the next start removes the draft."""
    try:
        if path.suffix != _PART:
            path = path.rename(_part_of(path))
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        print(
            f"penstock: {path.name} stays in the state folder until the next start"
            f" ({describe(error)})",
            file=sys.stderr,
        )

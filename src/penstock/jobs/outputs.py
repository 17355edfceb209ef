"""Outputs of a job that are no journal: asked for before the job begins, written whole or not at all.

What stands there already is the user's: no device and no pipe is written, replaced or taken away, and a `Landing`
writes over another file's content only where that was asked for. It knows files; not what is in them.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from penstock.disk import file_at, sync_folder, why_not_written
from penstock.errors import JournalError
from penstock.journal import journal_of


def check_writable(path: Path) -> None:
    """Raises JournalError, before anything long begins, when `path` could not be written. Leaves nothing behind."""
    folder = path.parent
    there = file_at(path)
    if not folder.is_dir():
        raise JournalError(f"{folder} is no folder: make it first, or name another output")
    if not (os.access(folder if there is None else path, os.W_OK) and os.access(folder, os.W_OK)):
        raise JournalError(f"{path} cannot be written: name an output in a folder of yours")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all: beside it first, then moved over it. Errors as Journal's."""
    draft = path.with_name(path.name + ".part")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        _forget(draft)
        raise why_not_written(error, path) from error


class Landing:
    """A name at which content lands in two moves: `write` puts it beside, whole and synced; `take` moves it there.

    Left without `take`, the draft goes and what stood there stays. A link is written through, as a shell's > does.
    Raises JournalError where the name can be none or is a journal's, CapacityError for a full disk.
    """

    def __init__(self, path: Path) -> None:
        check_writable(path)
        self.path = path
        self._there = Path(os.path.realpath(path))
        self._draft: Path | None = None
        for journal in (journal_of(path), journal_of(self._there)):
            if file_at(journal) is not None:  # a run that is under way would write on into a file without a name
                raise JournalError(f"{path} belongs to the run of {journal.name}: name another OUT")

    def __enter__(self) -> Landing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._draft is not None:
            _forget(self._draft)

    def size(self) -> int:
        """Bytes of what stands there; 0 for nothing."""
        there = file_at(self._there)
        return 0 if there is None else there.st_size

    def refuse(self) -> JournalError:
        """The error for what stands there and is something else."""
        return JournalError(
            f"{self.path} is there already and holds something else: name another OUT, or replace it with --overwrite"
        )

    def write(self, copy: Callable[[BinaryIO], object]) -> None:
        """copy: writes the content into a file that it is given. The draft's name is new: it is nobody else's."""
        draft = self._there.with_name(f"{self._there.name}.{secrets.token_hex(4)}.part")
        try:
            with draft.open("xb") as file:
                self._draft = draft
                copy(file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise why_not_written(error, self.path) from error

    def spare(self) -> None:
        """Raises JournalError where something stands there that isn't the draft's content."""
        try:
            if self.size() and not (self._draft and filecmp.cmp(self._draft, self._there, shallow=False)):
                raise self.refuse()
        except OSError as error:
            raise why_not_written(error, self.path) from error

    def take(self) -> None:
        """Moves the draft there; without one, what stands there goes."""
        try:
            if self._draft is None:
                self.path.unlink(missing_ok=True)
            else:
                self._draft.replace(self._there)
                self._draft = None
            sync_folder(self._there.parent)
        except OSError as error:
            raise why_not_written(error, self.path) from error


def _forget(draft: Path) -> None:
    """What failed before may fail this too (a name too long, a disk that only reads): that first error is told."""
    with contextlib.suppress(OSError):
        draft.unlink(missing_ok=True)

"""Journal: writes each row of a file exactly once. It holds through kills, full disks and power
cuts.

    OUT.jsonl            the rows, as plain JSON lines that need no Penstock to read
    OUT.jsonl.journal    a header with the run's fingerprint, then one checksummed line a row

A row is written in two moves: its bytes go to OUT and are flushed to the disk, then a line with its
key, length and checksum goes to the journal and is flushed. Only then is the row done. The next
open cuts off what a kill left after the last such line, so a key is either done, with its whole row
in OUT, or absent. Rows are flushed in groups (at a `tick` half a second after the last group, or
8,192 rows), because a flush costs milliseconds.

Jobs and the server's batches use it. Knows keys and rows as JSON values; stdlib only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from penstock.disk import file_at, sync_folder, why_not_written
from penstock.errors import JournalError
from penstock.journal_lines import (
    READ_BYTES,
    begins_a_header,
    header_of,
    holds,
    line_of,
    row_told,
    run_of,
    unread,
    whole_lines,
)
from penstock.key_set import Key, KeySet

COMMIT_SECONDS = 0.5
COMMIT_ROWS = 8192
COMMIT_BYTES = 4 << 20
# Unicode line separators, at which some readers end a line -> JSON escapes
_ODD = {odd.encode(): f"\\u{ord(odd):04x}".encode() for odd in "\x85\u2028\u2029"}


@dataclass(slots=True)
class _State:
    """Both files' committed lengths in bytes, and the rows and journal lines that wait for the next
    commit."""

    data_end: int = 0
    journal_end: int = 0
    pending: list[tuple[bytes, bytes]] = field(default_factory=list)


class Journal:
    """Appends rows to `path`, each key exactly once. Opening the same path again continues the run.

    path: the file of JSON lines; its journal lies beside it, named `path` + ".journal".
    fingerprint: the settings that identify the run, name -> JSON value. A journal with another
        fingerprint is refused: JournalError names the differences. Settings that may change when
        the run is continued are not part of it.
    Raises JournalError when the files cannot be written, are in use, were changed by somebody else,
    or belong to another run; CapacityError when the disk is full. After either error every
    committed row is still good.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        self.path = path
        self.journal_path = journal_of(path)
        self.keys = KeySet()
        self._state = _State()
        self._pending_bytes = 0
        self._last_commit = time.monotonic()
        self._journal, self._data = self._open_files()
        try:
            self._take_up(dict(fingerprint))
        except BaseException:
            self._close_files()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the journal. After an error before the first row it deletes the files, so that
        nothing half-done stays."""
        self.close(keep_empty=kind is None)

    def __contains__(self, key: Key) -> bool:
        return key in self.keys

    def __len__(self) -> int:
        """Returns the number of keys that are done or wait for the next commit."""
        return len(self.keys)

    def add(self, key: Key, row: Mapping[str, Any]) -> None:
        """Adds a key's row. A due tick, or a commit, writes it to the disk. A key that was added
        before raises an error."""
        try:
            data = json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # an unpaired surrogate, in an id for instance
            data = json.dumps(row).encode()
        self.add_json(key, data)

    def add_json(self, key: Key, row: bytes) -> None:
        """Adds a row that is JSON in UTF-8 already, without a newline in it."""
        # JSON allows these characters inside strings only, so replacing their bytes is safe
        for odd, escape in _ODD.items():
            if odd in row:
                row = row.replace(odd, escape)
        data = row + b"\n"
        line = line_of(data, key)
        if not self.keys.add(key):
            raise JournalError(
                f"{self.path} already holds the row of {key!r}: a key is written once"
            )
        self._state.pending.append((data, line))
        self._pending_bytes += len(data)
        if len(self._state.pending) >= COMMIT_ROWS or self._pending_bytes >= COMMIT_BYTES:
            self.commit()

    def tick(self) -> bool:
        """Commits the waiting rows once COMMIT_SECONDS have passed since the last commit. Call it
        often while work goes on, so that no row waits in memory for the next one to end. Returns
        True when everything is on the disk.
        """
        if self._state.pending and time.monotonic() - self._last_commit >= COMMIT_SECONDS:
            self.commit()
        return not self._state.pending

    def commit(self) -> None:
        """Writes the waiting rows to the disk. When that fails, both files are cut back to their
        committed length.

        Raises JournalError also if the file was moved or replaced, so that `path` no longer names
        it.
        """
        if self._state.pending:
            self._bring()
        if not _is_at(self._data, self.path):
            raise JournalError(
                f"{self.path} was moved, deleted or replaced while its run wrote it: put it back"
                " and start the same command again, or name another output"
            ) from FileNotFoundError(f"{self.path} is not the file that was opened there")

    def _bring(self) -> None:
        """Writes the rows to the disk, then their journal lines.

        Ctrl-C may interrupt at any line. Then uncommitted bytes are cut off later, and the rows
        still wait. The new state is set by one assignment, so it is never half set.
        """
        state = self._state
        rows = b"".join(data for data, _ in state.pending)
        lines = b"".join(line for _, line in state.pending)
        try:
            self._cut()  # remove what an interrupted commit left behind
            _write(self._data, rows)
            _write(self._journal, lines)
        except OSError as error:
            self._cut()
            raise why_not_written(error, self.path) from error
        self._state = _State(state.data_end + len(rows), state.journal_end + len(lines))
        self._pending_bytes = 0
        # measured from the end of a commit, so that a slow disk does not spend all its time
        # committing
        self._last_commit = time.monotonic()

    def rows(self, field: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields the committed rows in the order they were written, one at a time. field: yields
        only rows that have this field; other lines are not parsed."""
        end, wanted = self._state.data_end, set() if field is None else {field}
        named = b"" if field is None else json.dumps(field).encode()
        with self.path.open("rb") as file:
            while file.tell() < end:
                line = file.readline()
                if named in line and (row := self._row(line)).keys() >= wanted:
                    yield row

    def _row(self, line: bytes) -> dict[str, Any]:
        row: Any = None
        # a line of bad JSON is reported below
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
        if not isinstance(row, dict):
            raise self.foreign(line)
        return row

    def foreign(self, row: object) -> JournalError:
        """Returns the error for a committed row that Penstock cannot have written."""
        told = row[:80].decode("utf-8", "replace") if isinstance(row, bytes) else _short(row)
        return JournalError(
            f"{self.path} holds a row that no run wrote ({told!r}): name another output, or delete"
            f" {self.path.name} and {self.journal_path.name} to begin anew"
        )

    def close(self, *, keep_empty: bool = True) -> None:
        """Commits the waiting rows and closes the files. Unless `keep_empty`, files without a row
        are deleted."""
        if self._data.closed:
            return
        try:
            self.commit()
            self._cut()
        finally:
            if not keep_empty and not self._state.data_end:
                self._take_away()
            self._close_files()

    # Opening the data file and the journal

    def _open_files(self) -> tuple[BinaryIO, BinaryIO]:
        there = file_at(self.path, link=False)
        fresh = file_at(self.journal_path, link=False) is None
        if fresh and there is not None and there.st_size:
            raise JournalError(
                f"{self.path} is there already and no run wrote it: move it away or name another"
                " output"
            )
        self._may_unlink = there is None or not fresh
        try:
            journal = open(self.journal_path, "a+b", 0, opener=_no_link)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise why_not_written(error, self.journal_path) from error
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(journal.fileno()), os.stat(self.journal_path)):
                # another run deleted the file just after it was opened here
                raise BlockingIOError
            data = open(self.path, "a+b", 0, opener=_no_link)  # noqa: SIM115 - closed by close()
        except BlockingIOError as error:
            journal.close()
            raise JournalError(
                f"{self.path} is in use by another run: wait for it or name another output"
            ) from error
        except OSError as error:
            journal.close()
            if fresh:
                self.journal_path.unlink(missing_ok=True)
            raise why_not_written(error, self.path) from error
        return journal, data

    def _take_up(self, fingerprint: dict[str, Any]) -> None:
        """Checks the journal's lines against OUT's data, cuts off incomplete rows that a kill left,
        and collects the keys."""
        self._journal.seek(0)
        with os.fdopen(os.dup(self._journal.fileno()), "rb", READ_BYTES) as journal:
            self._take_up_lines(whole_lines(journal, self.journal_path), fingerprint)

    def _take_up_lines(self, lines: Iterator[bytes], fingerprint: dict[str, Any]) -> None:
        header = next(lines, b"")
        run = self._read_header(header)
        # the data is empty or was deleted: the run starts over
        if not os.fstat(self._data.fileno()).st_size:
            self._begin(fingerprint)
            return
        if run is None:
            raise JournalError(
                f"{self.path} holds rows that its journal doesn't know: move it away"
            )
        self._compare(run, fingerprint)
        self._state.journal_end = len(header)
        with self.path.open("rb") as data:
            for line in lines:
                self._check_row(line, data)
        # flush too: a killed run may have written lines that are not on the disk yet
        self._cut(sync=True)

    def _read_header(self, header: bytes) -> dict[str, Any] | None:
        run = run_of(header)
        if run is not None:
            return run
        if os.fstat(self._journal.fileno()).st_size and not self._torn_at_its_begin():
            raise unread(self.journal_path)
        return None

    def _torn_at_its_begin(self) -> bool:
        """Returns True if the journal holds only part of a header, as a power cut may leave it.
        Then no row was written."""
        self._journal.seek(0)
        return not os.fstat(self._data.fileno()).st_size and begins_a_header(
            self._journal.read(READ_BYTES)
        )

    def _begin(self, fingerprint: dict[str, Any]) -> None:
        header = header_of(fingerprint)
        try:
            self._journal.truncate(0)
            _write(self._journal, header)
            sync_folder(self.path.parent)
        except OSError as error:
            self._take_away()
            raise why_not_written(error, self.journal_path) from error
        self._state.journal_end = len(header)

    def _compare(self, run: dict[str, Any], fingerprint: dict[str, Any]) -> None:
        try:
            changes = changes_told(run, json.loads(json.dumps(fingerprint)))
        except RecursionError as error:
            # JSON that could be parsed may still be nested too deep to compare
            raise unread(self.journal_path) from error
        if changes:
            raise JournalError(
                f"{self.path} belongs to a run with other settings ({changes}): name another"
                f" output, or delete {self.path.name} and {self.journal_path.name} to begin anew"
            )

    def _check_row(self, line: bytes, data: BinaryIO) -> None:
        try:
            length, checksum, key = row_told(line)
            new = self.keys.add(key)
        except (ValueError, RecursionError):
            new = False
        if not new:
            raise JournalError(
                f"{self.journal_path} holds a line that no run wrote (byte"
                f" {self._state.journal_end}): put it back, or delete it and {self.path.name} to"
                " begin anew"
            )
        if not holds(data, length, checksum):
            raise JournalError(
                f"{self.path} was changed since its run wrote it (byte {self._state.data_end}): put"
                f" it back, or delete it and {self.journal_path.name} to begin anew"
            )
        self._state.data_end += length
        self._state.journal_end += len(line)

    # Shortening, deleting and closing both files

    def _cut(self, *, sync: bool = False) -> None:
        """Cuts both files to their committed length; shortening a file works on a full disk too.
        The journal is cut and flushed first: a journal line without its row would make every later
        open fail.
        """
        try:
            if sync or os.fstat(self._journal.fileno()).st_size != self._state.journal_end:
                self._journal.truncate(self._state.journal_end)
                os.fsync(self._journal.fileno())
            self._data.truncate(self._state.data_end)
        except OSError as error:
            raise why_not_written(error, self.path) from error

    def _take_away(self) -> None:
        """Deletes both files, while the lock is held so that no other run can have begun with them.
        A link or empty file that was there before is kept, and so is a file that has replaced one
        of them since.
        """
        if self._may_unlink and _is_at(self._data, self.path):
            self.path.unlink(missing_ok=True)
        if _is_at(self._journal, self.journal_path):
            self.journal_path.unlink(missing_ok=True)

    def _close_files(self) -> None:
        self._data.close()
        self._journal.close()


def journal_of(path: Path) -> Path:
    """Returns the path of an output file's journal, which need not exist."""
    return path.with_name(path.name + ".journal")


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Returns True if the open file is the one at `path`, links followed. Raises JournalError."""
    there = file_at(path)
    return there is not None and os.path.samestat(os.fstat(file.fileno()), there)


def _no_link(path: str, flags: int) -> int:
    """Opener for `open` that refuses links, even one created since the path was checked."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def changes_told(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns the settings that differ between two runs, as text for an error message; empty if
    none does."""
    names = [name for name in before | now if before.get(name) != now.get(name)]
    return ", ".join(f"{n}: {_short(before.get(n))} there, {_short(now.get(n))} now" for n in names)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    os.fsync(file.fileno())

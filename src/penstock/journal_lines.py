"""The lines of a journal file. A line is a checksum, then either a header with the run's
fingerprint, or a row's length, checksum and key.

A journal file may come from anybody, so every length has a limit. A line that a kill cut short is
told apart from a file that is no journal.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import JournalError
from penstock.key_set import Key, text_of

VERSION = 1
READ_BYTES = 1 << 20
LONGEST_LINE = 16 << 20  # most bytes of a journal line
SHORTEST_ROW = 2  # least bytes of the JSON of a row
WORD = b" penstock-journal "  # stands after the checksum in a journal's header


def header_of(run: Mapping[str, Any]) -> bytes:
    """Returns the first line of a run's journal. run: its fingerprint."""
    return seal(WORD.decode()[1:] + json.dumps({"version": VERSION, "run": run}))


def line_of(data: bytes, key: Key) -> bytes:
    """Returns a row's journal line. Raises JournalError if the key is too long."""
    line = seal(f"{len(data)} {zlib.crc32(data):08x} {text_of(key)}")
    if len(line) > LONGEST_LINE:
        raise JournalError(
            f"a key of {len(line):,} bytes is longer than a journal's line: name rows shorter"
        )
    return line


def begins_a_header(left: bytes) -> bool:
    """Returns True if the bytes `left` may be the beginning of a header that a power cut left
    incomplete, perhaps with zero bytes. False: the file is no journal."""
    left = left.rstrip(b"\0")
    ours = not left[:8].strip(b"0123456789abcdef") and left[8:].startswith(
        WORD[: max(0, len(left) - 8)]
    )
    return ours and b"\n" not in left


def seal(text: str) -> bytes:
    body = text.encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def whole_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yields complete lines, whose checksums are right; stops at the first that a kill cut short.
    Raises JournalError for a line longer than LONGEST_LINE; a power cut may leave zero bytes, but
    fewer than that."""
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise unread(path)
        if len(line) < 11 or line[-1:] != b"\n" or line[:9] != b"%08x " % zlib.crc32(line[9:-1]):
            return
        yield line


def unread(path: Path) -> JournalError:
    """Returns the error for a file that is no journal of this version."""
    return JournalError(f"{path} is no journal that this version reads: name another output")


def run_of(header: bytes) -> dict[str, Any] | None:
    """Returns the fingerprint in a header; None for a line that is no header of this version."""
    try:
        there = json.loads(header[8 + len(WORD) :]) if header[8:].startswith(WORD) else None
    except (ValueError, RecursionError):
        return None
    run = there.get("run") if isinstance(there, dict) and there.get("version") == VERSION else None
    return run if isinstance(run, dict) else None


def row_told(line: bytes) -> tuple[int, int, Key]:
    """Parses a journal line that announces a row. Returns that row's length in bytes, its checksum
    and its key. Raises ValueError or RecursionError for a line of another kind."""
    length, checksum, key = line[9:-1].split(b" ", 2)
    told = int(length), int(checksum, 16), json.loads(key)
    if told[0] < SHORTEST_ROW or type(told[2]) not in (str, int, list):
        raise ValueError("no line of ours")
    return told


def holds(data: BinaryIO, length: int, checksum: int) -> bool:
    """Returns True if the next `length` bytes have this checksum. Reads in pieces, so memory stays
    small."""
    found, left = 0, length
    while left and (piece := data.read(min(left, READ_BYTES))):
        found, left = zlib.crc32(piece, found), left - len(piece)
    return not left and found == checksum

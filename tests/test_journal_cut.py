"""The journal cut at every byte of its last 4 KB, and each byte of them spoilt: what is left is a
whole beginning.

What it promises: opened again, its keys are those of the lines before the first that is torn, each
with its whole row; the same run writes the others, and every row is there once. A journal whose
header is torn, and rows that are not what their lines say, are refused and left as they are. Syncs
are left out: 20,000 openings would wait for the disk. `make reliability` meets each byte in every
way; here the ways take turns and meet every fifth byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fuzz_bounds import in_memory
from fuzz_inputs import SCALE

from penstock.errors import JournalError
from penstock.journal import Journal

TAIL = 4096
RUN = {"model": "demo", "seed": 1}
KEYS: list[Any] = [
    ("x" * (1, 80, 600)[i % 3] + f"é\u2028 {i}") if i % 4 else [i, "of a list", 7 * i]
    for i in range(32)
]
EVERY = 1 if SCALE > 1 else 5
ROWS = [{"id": key, "text": "日本\u2028" * (i % 5), "n": i} for i, key in enumerate(KEYS)]
SPOILS: tuple[Callable[[int], int], ...] = (
    lambda byte: byte ^ 0x01,
    lambda byte: byte ^ 0x20,  # the other case of a letter
    lambda byte: byte ^ 0x80,
    lambda byte: 0x00,
    lambda byte: 0x0A,
    lambda byte: 0x30,
    lambda byte: 0x20,
)


@dataclass(frozen=True)
class Whole:
    """Both files as a run without faults leaves them. ends: of the journal's lines, the header's
    first."""

    out: Path
    data: bytes
    journal: bytes
    ends: list[int]

    def put(self, data: bytes, journal: bytes) -> None:
        self.out.write_bytes(data)
        self.out.with_name(self.out.name + ".journal").write_bytes(journal)

    def left(self) -> tuple[bytes, bytes]:
        return self.out.read_bytes(), self.out.with_name(self.out.name + ".journal").read_bytes()

    def goes_on(self, data: bytes, journal: bytes, known: int) -> None:
        """These files are opened, hold the first rows, `known` of them at least, and take the
        others."""
        self.put(data, journal)
        with Journal(self.out, RUN) as opened:
            done = [key in opened for key in KEYS]
            count = sum(done)
            assert done == [True] * count + [False] * (len(KEYS) - count), (
                "no row is missing amid those that are done"
            )
            assert count >= known and len(opened) == count
            for key, row in zip(KEYS[count:], ROWS[count:], strict=True):
                opened.add(key, row)
        assert self.left() == (self.data, self.journal), "every row once, whole, and vouched for"

    def is_refused(self, data: bytes, journal: bytes, said: str) -> None:
        """And nothing is cut of what may be mended."""
        self.put(data, journal)
        with pytest.raises(JournalError, match=said):
            Journal(self.out, RUN)
        assert self.left() == (data, journal)

    def whole_lines(self, size: int) -> int:
        """Rows whose lines lie in the first bytes of the journal."""
        return sum(end <= size for end in self.ends[1:])


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[Whole]:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    with in_memory() as folder:
        out = folder / "out.jsonl"
        with Journal(out, RUN) as journal:
            for key, row in zip(KEYS, ROWS, strict=True):
                journal.add(key, row)
        data, lines = out.read_bytes(), out.with_name("out.jsonl.journal").read_bytes()
        ends = [at + 1 for at, byte in enumerate(lines) if byte == 0x0A]
        assert len(ends) == len(KEYS) + 1 and len(lines) > TAIL + ends[0] and len(data) > TAIL
        yield Whole(out, data, lines, ends)


def test_cut_at_every_byte(whole: Whole) -> None:
    for size in range(len(whole.journal) - TAIL, len(whole.journal) + 1, EVERY):
        whole.goes_on(whole.data, whole.journal[:size], known=whole.whole_lines(size))


def test_zeros_from_every_byte_on(whole: Whole) -> None:
    """As a disk leaves a file whose length it knew of before its end;
    the rows' file has its own."""
    for size in range(len(whole.journal) - TAIL, len(whole.journal), EVERY):
        torn = whole.journal[:size] + bytes(len(whole.journal) - size)
        whole.goes_on(whole.data + bytes(size % 3 * 500), torn, known=whole.whole_lines(size))


def test_a_lost_sector_at_every_byte(whole: Whole) -> None:
    for at in range(len(whole.journal) - TAIL, len(whole.journal), EVERY):
        torn = bytearray(whole.journal)
        torn[at : at + 512] = bytes(len(torn[at : at + 512]))
        whole.goes_on(whole.data, bytes(torn), known=whole.whole_lines(at))


def test_every_byte_spoilt(whole: Whole) -> None:
    for at in range(len(whole.journal) - TAIL, len(whole.journal), EVERY):
        for spoil in SPOILS if SCALE > 1 else SPOILS[at % len(SPOILS) :][:1]:
            torn = bytearray(whole.journal)
            torn[at] = spoil(torn[at])
            whole.goes_on(whole.data, bytes(torn), known=whole.whole_lines(at))


def test_a_header_that_is_torn_is_refused(whole: Whole) -> None:
    """Rows are there, so it was whole once: nobody knows whose they are."""
    end = whole.ends[0]
    for size in range(end):
        whole.is_refused(
            whole.data, whole.journal[:size], "doesn't know" if not size else "no journal"
        )
        torn = bytearray(whole.journal)
        torn[size] ^= 0x04
        whole.is_refused(whole.data, bytes(torn), "no journal")


def test_rows_that_are_gone_or_spoilt_are_refused(whole: Whole) -> None:
    """They were on the disk before their lines were: no kill and no power cut does that."""
    for at in range(len(whole.data) - TAIL, len(whole.data), EVERY):
        whole.is_refused(whole.data[:at], whole.journal, "was changed since")
        torn = bytearray(whole.data)
        torn[at] = SPOILS[at % 4](torn[at])
        if torn != whole.data:
            whole.is_refused(bytes(torn), whole.journal, "was changed since")


def test_a_line_of_zeros_vouches_for_nothing(whole: Whole) -> None:
    """Its checksum holds: 0 is that of nothing."""
    for line in (b"00000000\n", b"00000000 \n"):
        torn = whole.journal[: whole.ends[9]] + line + whole.journal[whole.ends[9] :]
        whole.goes_on(whole.data, torn, known=9)
    assert json.loads(whole.data.split(b"\n")[0])["id"] == KEYS[0]

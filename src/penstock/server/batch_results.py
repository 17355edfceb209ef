"""The results of one batch: two journals, one of outputs and one of errors; a custom_id is in one of them, once.

Their data files hold the very lines that clients fetch in the end, so finishing is giving them a name. It knows the
lines' shape and the journal; no engine, no database. Everything here blocks: it is called in a thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.journal import Journal

OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
_encode = msgspec.json.encode


@dataclass(slots=True)
class Outcome:
    """What became of a line: `body` is the answer's JSON, an error's where status isn't 200."""

    custom_id: str
    status: int
    request_id: str
    body: bytes

    @property
    def good(self) -> bool:
        return self.status == 200

    def line(self) -> bytes:
        """The line of the output or error file, without its end."""
        pieces = (
            b'{"id":"batch_req_' + secrets.token_hex(16).encode(),
            b'","custom_id":' + _encode(self.custom_id),
            b',"response":{"status_code":%d,"request_id":' % self.status + _encode(self.request_id),
            b',"body":' + self.body,
            b'},"error":null}',
        )
        return b"".join(pieces)


class Results:
    """Opens where a killed server left off. Raises JournalError, CapacityError."""

    def __init__(self, folder: Path, batch_id: str) -> None:
        self._output = Journal(folder / OUTPUT, {"batch": batch_id, "holds": "output"})
        try:
            self._errors = Journal(folder / ERRORS, {"batch": batch_id, "holds": "errors"})
        except BaseException:
            self._output.close()
            raise
        self.completed, self.failed = len(self._output), len(self._errors)

    def has(self, custom_id: str) -> bool:
        return custom_id in self._output or custom_id in self._errors

    def put(self, outcomes: Sequence[Outcome]) -> None:
        """Brings outcomes to the disk, and counts them then. Called again with the same ones after an error, it goes
        on: none is written twice. Raises JournalError, CapacityError."""
        for outcome in outcomes:
            journal = self._output if outcome.good else self._errors
            if outcome.custom_id not in journal:
                journal.add_json(outcome.custom_id, outcome.line())
        for journal in (self._output, self._errors):
            journal.commit()
        self.completed, self.failed = len(self._output), len(self._errors)

    def close(self) -> None:
        """Raises as put."""
        try:
            self._output.close()
        finally:
            self._errors.close()

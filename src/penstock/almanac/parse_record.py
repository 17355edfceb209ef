"""Parses untrusted JSON into a Record. An error is one line that names the file and the field.
Refused are unknown fields, duplicate keys, NaN, deep nesting, large files, and characters that
control a terminal or a page. validate.py checks what the numbers say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.almanac.record import Record
from penstock.disk import read_plain
from penstock.errors import RecordError

LARGEST = 5_000_000  # bytes of a benchmark record
_SHOWN = 80  # characters of untrusted text in a message


def read_record(path: Path) -> Record:
    """Reads a record. Raises RecordError, one line, for any other file."""
    return record_of(read_bytes(path), path.name)


def read_bytes(path: Path) -> bytes:
    """Returns a benchmark record's bytes. Raises RecordError for anything but a regular file, for a
    file that is too long, and for one that cannot be read."""
    try:
        return read_plain(path, LARGEST)
    except OSError as error:
        raise RecordError(
            f"{one_line(path.name)}: cannot be read: {error.strerror or error}"
        ) from error


def record_of(content: bytes, name: str) -> Record:
    """Parses a benchmark record's bytes; messages call the file `name`. Raises RecordError."""
    if len(content) > LARGEST:
        raise RecordError(f"{name}: is longer than the {LARGEST} bytes that a record has at most")
    try:
        told = json.loads(
            content.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant
        )
    except UnicodeDecodeError as error:
        raise RecordError(f"{name}: is no UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        raise RecordError(
            f"{name}: {'nested too deeply' if deep else one_line(str(error))}"
        ) from error
    try:
        # the schema's depth is fixed: deeper nesting is refused as a wrong type
        return Record.model_validate(told)
    except ValidationError as error:
        raise RecordError(f"{name}: {faults_in_a_line(error)}") from error


def faults_in_a_line(error: ValidationError) -> str:
    """Returns the first fault with its field, and the number of further faults."""
    faults = error.errors(include_url=False, include_context=False)
    first = faults[0]
    where = ".".join(one_line(str(part)) for part in first["loc"]) or "the file"
    given = (
        ""
        if isinstance(first["input"], (dict, list))
        else f" (it is {one_line(repr(first['input']))})"
    )
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return (
        f"{where[:200]}: {one_line(first['msg'].removeprefix('Value error, '), 300)}{given}{more}"
    )


def one_line(text: str, longest: int = _SHOWN) -> str:
    """Returns untrusted text fit for a message: printable, one line,
    at most `longest` characters."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text[: longest + 1]).split())
    return plain if len(text) <= longest else plain[: longest - 1] + "…"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {one_line(repr(twice))} stands twice in one object")
    return made


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number of a record")

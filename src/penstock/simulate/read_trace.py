"""Reads traces of requests. A row has a request's arrival time and the lengths of its prompt and
answers. Files are

    FILE.jsonl           {"arrival": seconds, "prompt_tokens": 512, "output_tokens": 90 or [90, 81,
                         ...]}; optional "max_tokens", and "shared_tokens", the prefix shared with
                         all rows of the same "header"
    FILE.csv             TIMESTAMP,ContextTokens,GeneratedTokens, as in Azure's public traces of
                         2023 and 2024
    OUT.jsonl[.journal]  output of `penstock run`: has answers' lengths; the user must give the
                         prompts' length

Knows file formats; no engine.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.server.openai.batch_line import BadRows

LONGEST = 10_000_000  # tokens; a larger number in a file counts as broken
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_KNOWN = {
    "arrival",
    "prompt_tokens",
    "output_tokens",
    "max_tokens",
    "shared_tokens",
    "header",
    "id",
    "n",
}


@dataclass(slots=True)
class TraceRow:
    """One request of a trace. arrival: seconds; None: the file has none. limit: max_tokens; 0:
    none."""

    arrival: float | None
    prompt: int
    outputs: list[int]
    limit: int = 0
    shared: int = 0
    header: str = ""


def read_trace(path: Path, prompt_tokens: int | None = None) -> list[TraceRow]:
    """Returns the rows in the order of their arrival. prompt_tokens: length of every prompt, for a
    file without it. Raises UsageError with the numbers of all broken lines, or if there are no
    rows."""
    bad, rows = BadRows(), list[TraceRow]()
    for number, row in _parsed(path):
        try:
            if (found := _row(row, prompt_tokens)) is not None:
                rows.append(found)
        except UsageError:
            raise  # the error is about the whole file, not one row
        except (ValueError, TypeError, KeyError) as error:
            bad.add(number, f"{path.name} line {number}: {_why(error)}")
    bad.refuse()
    if not rows:
        raise UsageError(f"{path} has no rows: give a trace of some", param="trace")
    if len({row.arrival is None for row in rows}) > 1:
        raise UsageError(
            f"{path} says of some rows when they arrived, and not of others: say it of all",
            param="trace",
        )
    return sorted(rows, key=lambda row: row.arrival or 0.0)


def _parsed(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields each line's number and content; for a broken line, the content is a ValueError."""
    path = path.with_suffix("") if path.suffix == ".journal" else path
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            yield from _of_csv(lines) if path.suffix == ".csv" else _of_json(lines)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}): name a trace's file", param="trace"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is no text in UTF-8: give a trace as .jsonl or .csv", param="trace"
        ) from error


def _of_csv(lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    table = csv.DictReader(lines)
    if missing := [name for name in _AZURE if name not in (table.fieldnames or ())]:
        raise UsageError(
            f"a trace as .csv has the columns {', '.join(_AZURE)}; {missing[0]} is missing",
            param="trace",
        )
    begun: datetime | None = None
    for row in table:
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"].strip())
            begun = begun or at
            lengths = {
                "prompt_tokens": int(row["ContextTokens"]),
                "output_tokens": int(row["GeneratedTokens"]),
            }
            yield table.line_num, {"arrival": (at - begun).total_seconds(), **lengths}
        except (ValueError, TypeError, AttributeError) as error:
            yield table.line_num, ValueError(str(error))


def _of_json(lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, ValueError("it is no JSON")


def _row(row: Any, prompt_tokens: int | None) -> TraceRow | None:
    """Parses a row. Returns None for a failed row of a run, which has no answer."""
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, dict):
        raise ValueError("a row is a JSON object")
    if "outputs" in row or "error" in row:
        outputs = [_count(each["token_count"], "token_count") for each in row.get("outputs", ())]
        if prompt_tokens is None:
            raise UsageError(
                "the rows of a run don't say how long prompts were: say it by --prompt-tokens",
                param="trace",
            )
        return TraceRow(None, prompt_tokens, outputs) if outputs else None
    if strange := sorted(row.keys() - _KNOWN):
        raise ValueError(f"{strange[0]} is not known: known are {', '.join(sorted(_KNOWN))}")
    told = row["output_tokens"]
    outputs = [
        _count(each, "output_tokens") for each in (told if isinstance(told, list) else [told])
    ]
    if isinstance(told, int) and "n" in row:
        outputs *= _count(row["n"], "n")
    if not outputs:
        raise ValueError("output_tokens is an empty list")
    prompt = _count(
        row["prompt_tokens"] if "prompt_tokens" in row or prompt_tokens is None else prompt_tokens,
        "prompt_tokens",
    )
    shared = _count(row.get("shared_tokens", 0), "shared_tokens", least=0)
    if shared >= prompt:
        raise ValueError(
            f"shared_tokens {shared} are all of its prompt, {prompt}: its last token is its own"
        )
    limit = _count(row.get("max_tokens", 0), "max_tokens", least=0)
    arrival = row.get("arrival")
    if arrival is not None and not (isinstance(arrival, int | float) and 0 <= arrival < 1e12):
        raise ValueError(f"arrival must be seconds, not {arrival!r}")
    return TraceRow(arrival, prompt, outputs, limit, shared, str(row.get("header", "")))


def _count(value: Any, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LONGEST:
        raise ValueError(f"{name} must be a whole number from {least}, not {value!r}")
    return value


def _why(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)

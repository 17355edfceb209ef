"""Reads problems: rows `question` and `answer` (ending in `#### number`, as GSM8K has them) of JSON lines, plain or
.gz, of parquet or of a hub dataset. A broken row is a UsageError that tells its number, from 1. It knows no prompts, no
models.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from penstock.almanac.samples import needs_pyarrow
from penstock.errors import CapacityError, UsageError
from penstock.jobs.prompts import find_answer

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?")
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
PREFERRED_FOLDERS = ("main", "default")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. index: its place in the file, from 0. solution: the worked answer. answer: its number, as text."""

    index: int
    question: str
    solution: str
    answer: str


def load_problems(source: str, split: str) -> list[Problem]:
    """The problems of a file or of a hub dataset (`owner/name`, or `owner/name:beginning/of/a/path`).

    split: which of a hub dataset's files are meant where the name doesn't say: "test" or "train".
    Raises UsageError for a file that isn't there, isn't readable, or holds a broken row.
    """
    path = Path(source)
    if not path.exists() and HUB_NAME.fullmatch(source) and not source.endswith(SUFFIXES):
        path = _fetch(source, split)
    problems = [
        _problem(index, row, f"{source} row {number}") for index, (number, row) in enumerate(_rows(path, source))
    ]
    if not problems:
        raise UsageError(f"{source} holds no problem: rows are JSON objects with question and answer")
    return problems


def digest(problems: list[Problem]) -> str:
    """A fingerprint of what the problems say, wherever they came from."""
    state = blake2b(digest_size=8)
    for problem in problems:
        state.update(json.dumps([problem.question, problem.solution]).encode())
    return state.hexdigest()


def _problem(index: int, row: Any, where: str) -> Problem:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a row is a JSON object with question and answer, not {_name(row)}")
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise UsageError(f"{where}: {field} must be a text that isn't empty: mend the row or take it out")
    answer = find_answer(row["answer"])
    if answer is None:
        raise UsageError(f"{where}: answer doesn't end in `#### number`: mend the row or take it out")
    return Problem(index, row["question"].strip(), row["answer"].strip(), answer)


def _name(value: Any) -> str:
    return {list: "a list", str: "a text", bool: "true or false"}.get(type(value), "a number or null")


def _rows(path: Path, source: str) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        raise UsageError(f"no file {source}: name a .jsonl, .jsonl.gz or .parquet file, or a hub dataset as owner/name")
    if path.name.endswith(".parquet"):
        yield from _parquet_rows(path)
        return
    number = 0
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise UsageError(f"{source} row {number} is no JSON ({error}): mend the row or take it out") from error
    except (EOFError, OSError, zlib.error) as error:
        raise UsageError(f"{source} cannot be read after row {number} ({error}): fetch the file again") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    needs_pyarrow()
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        rows = (row for batch in ParquetFile(path).iter_batches() for row in batch.to_pylist())
        yield from enumerate(rows, 1)
    except (ArrowException, OSError) as error:
        raise UsageError(f"{path} cannot be read as parquet ({error}): fetch the file again") from error


def _fetch(source: str, split: str) -> Path:
    """One file of a hub dataset, through the hub's cache."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    name, _, beginning = source.partition(":")
    # What the hub's client raises when no connection comes about is the HTTP library's own, which changed with its
    # versions (requests, httpx, httpx2); the hub's own error has always been a child of it.
    unreachable = tuple(c for c in HfHubHTTPError.__mro__ if c.__name__ in ("HTTPError", "RequestException"))
    try:
        files = [sibling.rfilename for sibling in HfApi().dataset_info(name).siblings or []]
        return Path(hf_hub_download(name, _choose(source, files, beginning, split), repo_type="dataset"))
    except HfHubHTTPError as error:
        raise UsageError(f"the hub has no dataset {name} for you ({_first_line(error)}): check the name") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, OSError, *unreachable) as error:
        raise CapacityError(f"no way to the hub for {name} ({_first_line(error)}): give a file instead") from error


def _choose(source: str, files: list[str], beginning: str, split: str) -> str:
    files = sorted(f for f in files if f.endswith(SUFFIXES))
    if beginning:
        fitting = [f for f in files if f.startswith(beginning)]
    else:
        fitting = [f for f in files if Path(f).name.startswith(split)]
        preferred = [f for f in fitting if str(Path(f).parent) in PREFERRED_FOLDERS]
        fitting = preferred or fitting
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join((fitting or files)[:8]) or "none"
    raise UsageError(f"{source} doesn't say which file is meant; say owner/name:path (files there: {found})")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]

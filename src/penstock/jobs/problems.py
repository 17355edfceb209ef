"""Problems with checkable answers. A row has `question` and `answer` (ending in `#### number`, as
in GSM8K); rows come from JSON lines, plain or .gz, from parquet or a hub dataset. Makes their
prompts, and finds the number in a sample. Knows no models.

    Question: {question of a shot}\\nAnswer: {its worked answer}\\n\\n      (k times)
    Question: {question}\\nAnswer:

Shots (few-shot examples) are drawn by the run's seed and the problem's index. They are the same on
any machine, and never the problem itself.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import Any

from penstock.almanac.samples import needs_pyarrow
from penstock.errors import CapacityError, UsageError
from penstock.jobs.input_rows import mix, parse_json, read_lines

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?")
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
PREFERRED_FOLDERS = ("main", "default")
# Matches the number after `####`, with optional sign, $ and commas. It does not match the
# beginning of a fraction, a time or a power.
NUMBER = re.compile(
    r"####[ \t]*([-+]?)[ \t]*\$?["
    r" \t]*([-+]?)((?>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+))(?![/:^*]|[eE][0-9])"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. index: its place in the file, from 0. solution: the worked answer. answer: the
    final number, as text."""

    index: int
    question: str
    solution: str
    answer: str


def load_problems(source: str, split: str) -> list[Problem]:
    """Returns the problems of a file or of a hub dataset (`owner/name`, or
    `owner/name:beginning/of/a/path`).

    split: "test" or "train": chooses among a hub dataset's files if the name does not. Raises
    UsageError for a file that is missing or unreadable, or holds a broken row.
    """
    path = Path(source)
    if not path.exists() and HUB_NAME.fullmatch(source) and not source.endswith(SUFFIXES):
        path = _fetch(source, split)
    problems = [
        _problem(index, row, f"{source} row {number}")
        for index, (number, row) in enumerate(_rows(path, source))
    ]
    if not problems:
        raise UsageError(
            f"{source} holds no problem: rows are JSON objects with question and answer"
        )
    return problems


def digest(problems: list[Problem]) -> str:
    """Returns a fingerprint of the problems' texts, wherever they came from."""
    state = blake2b(digest_size=8)
    for problem in problems:
        state.update(json.dumps([problem.question, problem.solution]).encode())
    return state.hexdigest()


def _problem(index: int, row: Any, where: str) -> Problem:
    if not isinstance(row, dict):
        raise UsageError(
            f"{where}: a row is a JSON object with question and answer, not {_name(row)}"
        )
    for field in ("question", "answer"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise UsageError(
                f"{where}: {field} must be a text that isn't empty: mend the row or take it out"
            )
    answer = find_answer(row["answer"])
    if answer is None:
        raise UsageError(
            f"{where}: answer doesn't end in `#### number`: mend the row or take it out"
        )
    return Problem(index, row["question"].strip(), row["answer"].strip(), answer)


def _name(value: Any) -> str:
    return {list: "a list", str: "a text", bool: "true or false"}.get(
        type(value), "a number or null"
    )


def _rows(path: Path, source: str) -> Iterator[tuple[int, Any]]:
    if not path.is_file():
        raise UsageError(
            f"no file {source}: name a .jsonl, .jsonl.gz or .parquet file, or a hub dataset as"
            " owner/name"
        )
    if path.name.endswith(".parquet"):
        yield from _parquet_rows(path)
        return
    for number, line in read_lines(path):
        if line.strip():
            yield number, parse_json(line, f"{source} row {number}")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    needs_pyarrow()
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        rows = (row for batch in ParquetFile(path).iter_batches() for row in batch.to_pylist())
        yield from enumerate(rows, 1)
    except (ArrowException, OSError) as error:
        raise UsageError(
            f"{path} cannot be read as parquet ({error}): fetch the file again"
        ) from error


def _fetch(source: str, split: str) -> Path:
    """Returns one file of a hub dataset, through the hub's cache."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    name, _, beginning = source.partition(":")
    # Without a connection the hub's client raises an error of its HTTP library, which
    # changed with its versions (requests, httpx, httpx2); HfHubHTTPError has always been a
    # subclass of it.
    unreachable = tuple(
        c for c in HfHubHTTPError.__mro__ if c.__name__ in ("HTTPError", "RequestException")
    )
    try:
        files = [sibling.rfilename for sibling in HfApi().dataset_info(name).siblings or []]
        return Path(
            hf_hub_download(name, _choose(source, files, beginning, split), repo_type="dataset")
        )
    except HfHubHTTPError as error:
        raise UsageError(
            f"the hub has no dataset {name} for you ({_first_line(error)}): check the name"
        ) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, OSError, *unreachable) as error:
        raise CapacityError(
            f"no way to the hub for {name} ({_first_line(error)}): give a file instead"
        ) from error


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
    raise UsageError(
        f"{source} doesn't say which file is meant; say owner/name:path (files there: {found})"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


# --- answers of texts, prompts of problems


def find_answer(text: str) -> str | None:
    """Returns the number after the first `####`, normalised (1,080.0 is 1080, $18. is 18); None if
    there is none.

    The first one counts, because a model that is not stopped may go on with a question of its own.
    """
    place = text.find("####")
    match = NUMBER.match(text, place) if place >= 0 else None
    if match is None:
        return None
    digits = match[3].replace(",", "")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    number = Decimal(digits or "0")
    negative = number and (match[1] == "-") != (match[2] == "-")
    return f"{'-' if negative else ''}{number:f}"


def make_prompt(question: str, shots: Sequence[Problem]) -> str:
    head = "".join(f"Question: {shot.question}\nAnswer: {shot.solution}\n\n" for shot in shots)
    return f"{head}Question: {question}\nAnswer:"


def draw_shots(
    pool: Sequence[Problem], question: str, count: int, seed: int, index: int
) -> list[Problem]:
    """Returns `count` shots for problem `index`, in random order; rows of the pool with the same
    question are left out."""
    others = [shot for shot in pool if shot.question != question]
    if len(others) < count:
        raise UsageError(
            f"{count} shots are asked for and there are {len(others)} other problems to draw from: "
            "lower --few-shot or give more --shots",
            param="few_shot",
        )
    return random.Random(mix("shots", seed, index)).sample(others, count)

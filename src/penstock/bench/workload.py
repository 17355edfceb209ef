"""Workload shapes and the requests made from them. Requests are bodies for OpenAI's
/v1/completions. Names of shapes:

    128x1024               exact: 128 tokens in, 1,024 out, end-of-sequence ignored
    monkeys[:N]            N samples (default 64) of a shared prompt of 512 tokens, up to 256 out,
                           in one request
    monkeys[:N]@ROWS.jsonl the same with the questions of a file in GSM8K's format
    FILE.json              a file in ShareGPT's format: a conversation's first two turns give
                           prompt and length

Prompts of ids differ in their first block across runs and requests, so that no server answers from
a cache. Knows the formats of shapes, files and bodies; no connection, no clock.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench.worker_protocol import PlannedRequest
from penstock.errors import UsageError

SUITES = {
    "almanac": ("128x1024", "1024x128", "512x512", "256x2048", "2048x256", "1024x1024", "monkeys")
}
MONKEYS_SAMPLES = 64
MONKEYS_INPUT, MONKEYS_OUTPUT = 512, 256
QUESTION, STOP = "Question: {}\nAnswer:", "Question:"
LETTERS = 4  # characters per token, to estimate the mean lengths of a dataset
TEMPERATURE = 1.0
FIRST_ID = 16  # lowest token id in random prompts, since lower ones are mostly special tokens
NO_LENGTH = -1
_EXACT = re.compile(r"^([1-9]\d{0,6})x([1-9]\d{0,6})$")
_MONKEYS = re.compile(r"^monkeys(?::([1-9]\d{0,5}))?(?:@(.+))?$")

Draw = np.random.Generator


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload shape. kind: as in a benchmark record (ShapeInfo). n: samples per request. rows:
    (prompt, output tokens) of a dataset. input, output: tokens; for a dataset the means, estimated
    from the texts' lengths. source: the dataset's file.
    """

    name: str
    kind: str
    input: int
    output: int
    n: int = 1
    rows: tuple[tuple[str, int], ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class RequestStyle:
    """Format of the requests that a server takes: the model's name and vocabulary size, whether
    prompts may be token ids, further fields to send ("{output}" in a text stands for the number of
    tokens), and fields to leave out."""

    model: str
    vocabulary: int
    ids: bool = True
    more: tuple[tuple[str, Any], ...] = ()
    without: tuple[str, ...] = ()


def workload(name: str) -> Workload:
    """Returns a workload shape by its name. Raises UsageError."""
    if exact := _EXACT.match(name):
        return Workload(name, "exact", int(exact[1]), int(exact[2]))
    if monkeys := _MONKEYS.match(name):
        samples = int(monkeys[1] or MONKEYS_SAMPLES)
        return (
            _questions(Path(monkeys[2]), samples)
            if monkeys[2]
            else Workload(
                "monkeys" if samples == MONKEYS_SAMPLES else name,
                "monkeys",
                MONKEYS_INPUT,
                MONKEYS_OUTPUT,
                samples,
            )
        )
    if name.endswith(".json"):
        return _conversations(Path(name))
    raise UsageError(
        f"there is no shape {name!r}: write tokens in x tokens out (128x1024),"
        " monkeys[:N][@ROWS.jsonl] or a ShareGPT-form .json",
        param="shape",
    )


def named(shapes: list[str], suite: str | None) -> list[Workload]:
    """Returns the given workload shapes, then the suite's. Raises UsageError if there is none."""
    if suite is not None and suite not in SUITES:
        raise UsageError(
            f"there is no suite {suite!r}: there is {', '.join(SUITES)}", param="suite"
        )
    names = [*shapes, *(SUITES[suite] if suite else ())]
    if not names:
        raise UsageError(
            "say what to measure: --shape 128x1024 (again for more) or --suite almanac",
            param="shape",
        )
    works = [workload(name) for name in dict.fromkeys(names)]
    if len({work.name for work in works}) < len(works):
        raise UsageError("two shapes have the same name: measure them in two runs", param="shape")
    return works


def prompts(
    work: Workload,
    speech: RequestStyle,
    seed: int,
    salt: str,
    texts: Callable[[int, Draw], Iterator[str]],
) -> Iterator[PlannedRequest]:
    """Yields requests endlessly, without times. salt: names the run and the load level; another
    salt gives other prompts. texts: makes texts of a number of tokens, for a server that takes no
    ids.
    """
    draw = np.random.default_rng([seed, *salt.encode()])
    if work.rows:
        yield from _of_rows(work, speech, draw)
        return
    made = None if speech.ids else texts(work.input, draw)
    length = work.output if work.kind == "exact" else NO_LENGTH
    while True:
        prompt: Any = ids(work.input, speech.vocabulary, draw) if made is None else next(made)
        asked = body(work, speech, prompt, work.output)
        yield PlannedRequest(math.nan, asked, work.input, length, work.output * work.n)


def _of_rows(work: Workload, speech: RequestStyle, draw: Draw) -> Iterator[PlannedRequest]:
    while True:
        text, output = work.rows[int(draw.integers(len(work.rows)))]
        length = NO_LENGTH if work.kind == "monkeys" else output
        yield PlannedRequest(
            math.nan, body(work, speech, text, output), NO_LENGTH, length, output * work.n
        )


def ids(length: int, vocabulary: int, draw: Draw) -> list[int]:
    """Returns random ids. Their first block of 16 is one of vocabulary^16, so no two prompts begin
    alike."""
    found: list[int] = draw.integers(min(FIRST_ID, vocabulary - 1), vocabulary, length).tolist()
    return found


def body(work: Workload, speech: RequestStyle, prompt: Any, output: int) -> bytes:
    """Returns the JSON body of one request."""
    fields: dict[str, Any] = {
        "model": speech.model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": TEMPERATURE,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if work.n > 1:
        fields["n"] = work.n
    if work.kind != "monkeys":
        fields["ignore_eos"] = True
    elif work.rows:
        fields["stop"] = [STOP]
    for name, value in speech.more:
        fields[name] = value.replace("{output}", str(output)) if isinstance(value, str) else value
    kept = {name: value for name, value in fields.items() if name not in speech.without}
    return json.dumps(kept, separators=(",", ":")).encode()


# --- reading dataset files


def _conversations(path: Path) -> Workload:
    """Reads ShareGPT's form: [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt",
    "value": ...}]}]. Output tokens are estimated as a quarter of the answer's characters."""

    def rows(content: str) -> Iterator[tuple[str, int]]:
        for turns in (each["conversations"] for each in json.loads(content)):
            if len(turns) >= 2 and turns[0]["value"]:
                yield _text(turns[0]["value"]), _tokens(_text(turns[1]["value"]))

    found = _dataset(path, "ShareGPT", "conversation of two turns", rows)
    output = sum(out for _, out in found) // len(found)
    return Workload(path.stem, "dataset", _mean_input(found), output, 1, found, path.name)


def _questions(path: Path, samples: int) -> Workload:
    """Reads a file in GSM8K's format: a line of JSON {"question": ...} for each problem."""

    def rows(content: str) -> Iterator[tuple[str, int]]:
        for line in filter(str.strip, content.splitlines()):
            yield QUESTION.format(_text(json.loads(line)["question"])), MONKEYS_OUTPUT

    found = _dataset(path, "GSM8K", "question", rows)
    name = f"monkeys:{samples}@{path.stem}"
    return Workload(name, "monkeys", _mean_input(found), MONKEYS_OUTPUT, samples, found, path.name)


def _dataset(
    path: Path, form: str, row: str, rows: Callable[[str], Iterator[tuple[str, int]]]
) -> tuple[tuple[str, int], ...]:
    try:
        found = tuple(rows(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}): name a dataset's file", param="shape"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path} is no {form}-form file: {type(error).__name__}: {error}", param="shape"
        ) from error
    if not found:
        raise UsageError(f"{path} holds no {row}", param="shape")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no text")
    return value


def _tokens(text: str) -> int:
    return max(1, len(text) // LETTERS)


def _mean_input(rows: tuple[tuple[str, int], ...]) -> int:
    return max(1, sum(_tokens(text) for text, _ in rows) // len(rows))

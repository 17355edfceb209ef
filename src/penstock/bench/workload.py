"""What is asked of a server: the shape, its prompts, and their bodies for OpenAI's /v1/completions.

    128x1024            exact: 128 tokens in, 1,024 out, end-of-sequence ignored
    monkeys[:N]         N samples (default 64) of a shared prompt of 512 tokens, up to 256 out, in one request
    FILE.json           rows of a ShareGPT-form file: each conversation's first two turns give prompt and length

Prompts of ids are unique in their first block, whatever run and request: no server answers them from a cache, unless
that is what is asked. It knows forms; no connection, no clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import UsageError

SUITES = {"almanac": ("128x1024", "1024x128", "512x512", "256x2048", "2048x256", "1024x1024", "monkeys")}
MONKEYS_SAMPLES = 64
MONKEYS_INPUT, MONKEYS_OUTPUT = 512, 256
FIRST_ID = 16  # ids below are mostly special tokens
NO_LENGTH = -1
_EXACT = re.compile(r"^([1-9]\d{0,6})x([1-9]\d{0,6})$")
_MONKEYS = re.compile(r"^monkeys(?::([1-9]\d{0,6}))?$")


@dataclass(frozen=True, slots=True)
class Workload:
    """A shape. kind: as in the record. n: samples a request. rows: a dataset's (prompt, output tokens)."""

    name: str
    kind: str
    input: int
    output: int
    n: int = 1
    rows: tuple[tuple[str, int], ...] = ()

    @property
    def longest(self) -> int:
        """Tokens that a sequence needs at most; 0: unknown, prompts are texts."""
        return 0 if self.rows else self.input + self.output


@dataclass(frozen=True, slots=True)
class Prompted:
    """A request's body and what it must come back with: NO_LENGTH where that isn't known before."""

    body: bytes
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Speech:
    """How a server wants to be asked: the model's name there, its vocabulary, whether it takes ids, and more fields."""

    model: str
    vocabulary: int
    ids: bool = True
    more: tuple[tuple[str, Any], ...] = ()
    temperature: float = 1.0
    stream: bool = True


def workload(name: str) -> Workload:
    """A shape by its name. Raises UsageError."""
    if exact := _EXACT.match(name):
        return Workload(name, "exact", int(exact[1]), int(exact[2]))
    if monkeys := _MONKEYS.match(name):
        return Workload(name, "monkeys", MONKEYS_INPUT, MONKEYS_OUTPUT, int(monkeys[1] or MONKEYS_SAMPLES))
    if name.endswith(".json"):
        return _dataset(Path(name))
    raise UsageError(
        f"there is no shape {name!r}: write tokens in x tokens out (128x1024), monkeys, monkeys:N or a ShareGPT .json",
        param="shape",
    )


def named(shapes: list[str], suite: str | None) -> list[Workload]:
    """Those asked for one by one, then the suite's. Raises UsageError where there is none."""
    if suite is not None and suite not in SUITES:
        raise UsageError(f"there is no suite {suite!r}: there is {', '.join(SUITES)}", param="suite")
    names = [*shapes, *(SUITES[suite] if suite else ())]
    if not names:
        raise UsageError("say what to measure: --shape 128x1024 (again for more) or --suite almanac", param="shape")
    return [workload(name) for name in dict.fromkeys(names)]


def prompts(
    work: Workload, speech: Speech, seed: int, salt: str, texts: Iterator[str] | None = None
) -> Iterator[Prompted]:
    """Requests without end. `salt`: the point; another draws other prompts. `texts`: of exactly `work.input` tokens,
    for a server that takes no ids."""
    draw = np.random.default_rng([seed, *salt.encode()])
    if not work.rows and not speech.ids and texts is None:
        raise UsageError(
            "this server takes no token ids: name the model's tokenizer with --tokenizer", param="tokenizer"
        )
    while True:
        if work.rows:
            text, output = work.rows[int(draw.integers(len(work.rows)))]
            yield Prompted(body(work, speech, text, output), NO_LENGTH, output)
            continue
        prompt: Any = ids(work.input, speech.vocabulary, draw) if texts is None else next(texts)
        length = work.output if work.kind == "exact" else NO_LENGTH
        yield Prompted(body(work, speech, prompt, work.output), work.input, length)


def ids(length: int, vocabulary: int, draw: np.random.Generator) -> list[int]:
    """Random ids: the first block of 16 is one of vocabulary^16, so that no two begin alike."""
    found: list[int] = draw.integers(min(FIRST_ID, vocabulary - 1), vocabulary, length).tolist()
    return found


def body(work: Workload, speech: Speech, prompt: Any, output: int) -> bytes:
    """The JSON of one request."""
    fields: dict[str, Any] = {"model": speech.model, "prompt": prompt, "max_tokens": output}
    fields["temperature"] = speech.temperature
    if work.n > 1:
        fields["n"] = work.n
    if work.kind != "monkeys":
        fields["ignore_eos"] = True
    if speech.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(fields | dict(speech.more), separators=(",", ":")).encode()


def _dataset(path: Path) -> Workload:
    """ShareGPT's form: [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}]. Output
    tokens are taken as a quarter of the answer's characters."""
    if not path.is_file():
        raise UsageError(f"no file {path}: name a ShareGPT-form .json", param="shape")
    try:
        found = json.loads(path.read_bytes())
        rows = tuple(
            (turns[0]["value"], max(1, len(turns[1]["value"]) // 4))
            for turns in (each["conversations"] for each in found)
            if len(turns) >= 2
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no ShareGPT-form file: {type(error).__name__}: {error}", param="shape") from error
    if not rows:
        raise UsageError(f"{path} holds no conversation of two turns", param="shape")
    means = [sum(len(text) for text, _ in rows) // len(rows) // 4, sum(out for _, out in rows) // len(rows)]
    return Workload(path.stem, "dataset", max(1, means[0]), max(1, means[1]), 1, rows)

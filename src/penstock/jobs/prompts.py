"""The prompt of a problem, and the number in a sample. Strings only: it knows no model and no file.

    Question: {question of a shot}\\nAnswer: {its worked answer}\\n\\n      (k times)
    Question: {question}\\nAnswer:

Shots are drawn by the run's seed and the problem's index: the same on any machine, never the problem itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from decimal import Decimal
from hashlib import blake2b
from typing import Protocol, TypeVar

from penstock.errors import UsageError

# What follows `####`: a number, perhaps with a sign, $ and commas; not the beginning of a fraction, a time or a power.
NUMBER = re.compile(
    r"####[ \t]*([-+]?)[ \t]*\$?[ \t]*([-+]?)((?>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+))(?![/:^*]|[eE][0-9])"
)


class Worked(Protocol):
    """What a prompt is made of."""

    @property
    def question(self) -> str: ...

    @property
    def solution(self) -> str: ...


T = TypeVar("T", bound=Worked)


def find_answer(text: str) -> str | None:
    """The number after the first `####`, in one form (1,080.0 is 1080, $18. is 18); None where there is none.

    The first, because a model that isn't stopped may go on to a question of its own and answer that too.
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


def make_prompt(question: str, shots: Sequence[Worked]) -> str:
    head = "".join(f"Question: {shot.question}\nAnswer: {shot.solution}\n\n" for shot in shots)
    return f"{head}Question: {question}\nAnswer:"


def draw_shots(pool: Sequence[T], question: str, count: int, seed: int, index: int) -> list[T]:
    """`count` shots for problem `index`, in a drawn order; rows of the pool that ask the same question are left out."""
    others = [shot for shot in pool if shot.question != question]
    if len(others) < count:
        raise UsageError(
            f"{count} shots are asked for and there are {len(others)} other problems to draw from: "
            f"lower --few-shot or give more --shots",
            param="few_shot",
        )
    return random.Random(mix("shots", seed, index)).sample(others, count)


def mix(what: str, seed: int, key: object) -> int:
    """A seed for one thing out of the run's seed: 63 bits, the same on any machine and version."""
    return int.from_bytes(blake2b(f"{what}/{seed}/{key}".encode(), digest_size=8).digest()) >> 1

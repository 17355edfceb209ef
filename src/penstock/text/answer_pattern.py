"""AnswerPattern: the regex that finds a sample's answer, inside limits: it may come from anybody. It knows
texts only."""

from __future__ import annotations

import math
import re

import regex

from penstock.errors import UsageError

MAX_REPEATS = 10_000  # the numbers in braces, multiplied: `[ab]{1000000000}` alone would take all memory there is
PATIENCE = 0.05  # seconds that a search may take
_BRACES = re.compile(r"\{[^{}]*\}")
_NUMBER = re.compile(r"[0-9]+")


class AnswerPattern:
    """A regex that is searched for in whole samples."""

    def __init__(self, pattern: str) -> None:
        """Raises UsageError for what is no regex, or too large a one."""
        # As many digits as no sensible count has are not made a number.
        counts = [int(n[:9]) for braces in _BRACES.findall(pattern) for n in _NUMBER.findall(braces)]
        if math.prod(max(1, count) for count in counts) > MAX_REPEATS:
            raise _wrong(f"repeats more than {MAX_REPEATS:,} times: lower the numbers in braces")
        try:
            self._regex = regex.compile(pattern, regex.DOTALL)
        except (regex.error, RecursionError, ValueError, OverflowError, MemoryError) as error:
            said = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
            raise _wrong("is no regex that can be served", f": {said}") from error

    def find(self, text: str) -> str | None:
        """Returns the first match's first group, without groups the match; None without a match, or where the group
        took no part in it. Raises UsageError where it takes too long."""
        try:
            found = self._regex.search(text, timeout=PATIENCE)
        except (TimeoutError, MemoryError) as error:
            raise _wrong("takes too long on a sample: write it without repeats inside repeats") from error
        return None if found is None else found[1 if self._regex.groups else 0]


def _wrong(what: str, more: str = "") -> UsageError:
    rule = f"stop_when.pattern {what}"
    return UsageError(rule + more, param="stop_when", rule=rule)

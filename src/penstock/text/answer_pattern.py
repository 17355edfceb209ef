"""AnswerPattern: the regex that finds a sample's answer, inside limits: it may come from anybody.
It knows texts only."""

from __future__ import annotations

import math
import re
import time

import regex

from penstock.errors import UsageError

# the numbers in braces, multiplied: `[ab]{1000000000}` alone would take all memory there is
MAX_REPEATS = 10_000
PATIENCE = 0.05  # seconds of processor time that a search may take
BUDGET = 1.0  # the same of all searches of a request together
SLOW = "takes too long on a sample: write it without repeats inside repeats"
LONGEST_WHY = 120  # characters of the library's words
_BRACES = re.compile(r"\{[^{}]*\}")
_COMMENT = re.compile(r"#[^\n]*")
_NUMBER = re.compile(r"[0-9]+")
_LONGEST = 9  # digits of a number that are read: as many as no sensible count has


class AnswerPattern:
    """A regex that is searched for in whole samples. left: seconds of processor time that searches
    may yet take."""

    def __init__(self, pattern: str, left: float = BUDGET) -> None:
        """Raises UsageError for what is no regex, or too large a one."""
        counts = [
            int(number[:_LONGEST])
            for braces in _BRACES.findall(pattern)
            for number in _numbers(braces)
        ]
        if math.prod(max(1, count) for count in counts) > MAX_REPEATS:
            raise wrong_pattern(
                f"repeats more than {MAX_REPEATS:,} times: lower the numbers in braces"
            )
        self.left = left
        try:
            self._regex = regex.compile(pattern, regex.DOTALL)
        except (regex.error, RecursionError, ValueError, OverflowError, MemoryError) as error:
            raise wrong_pattern(f"is no regex that can be served: {_why(error)}") from error

    def find(self, text: str) -> str | None:
        """Returns the first match's first group, without groups the match; None without a match, or
        where the group took no part in it. Raises UsageError where it takes too long, or searches
        have taken all they may."""
        begun = time.thread_time()
        try:
            found = self._search(text, begun + min(PATIENCE, self.left))
        except MemoryError as error:
            raise wrong_pattern(SLOW) from error
        finally:
            self.left -= time.thread_time() - begun
        return None if found is None else found[1 if self._regex.groups else 0]

    def _search(self, text: str, until: float) -> regex.Match[str] | None:
        """until: of this thread's processor time, while the library's own limit is of the clock:
        that passes faster where others have the processor, and what it cuts short is then tried
        again."""
        while (left := until - time.thread_time()) > 0:
            try:
                return self._regex.search(text, timeout=2 * left)
            except TimeoutError:
                continue
        raise wrong_pattern(SLOW)


def _numbers(braces: str) -> list[str]:
    """Returns a brace's numbers. White space and comments stand inside one where a pattern is
    verbose."""
    return _NUMBER.findall("".join(_COMMENT.sub("", braces).split()))


def _why(error: Exception) -> str:
    """Returns what the library says: which rule is broken, and where;
    of the pattern hardly a sign."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return str(error)[:LONGEST_WHY] or "it takes too much memory"


def wrong_pattern(what: str) -> UsageError:
    """Returns the error of a pattern."""
    rule = f"stop_when.pattern {what}"
    return UsageError(rule, param="stop_when", rule=rule)

"""AnswerPattern: the regex that extracts a sample's answer. It is the pattern of a request's
`stop_when`, and has limits, since it may come from anyone. Knows texts only."""

from __future__ import annotations

import math
import re
import time

import regex

from penstock.errors import UsageError

# limit on the product of a pattern's repeat counts, since `[ab]{1000000000}` would take all memory
MAX_REPEATS = 10_000
PATIENCE = 0.05  # most seconds of CPU time of one search
BUDGET = 1.0  # seconds of CPU time for all searches of a request
SLOW = "takes too long on a sample: write it without repeats inside repeats"
LONGEST_WHY = 120  # most characters of the regex library's message in an error
_BRACES = re.compile(r"\{[^{}]*\}")
_COMMENT = re.compile(r"#[^\n]*")
_NUMBER = re.compile(r"[0-9]+")
_LONGEST = 9  # digits of a repeat count that are read; no sensible count has more


class AnswerPattern:
    """A regex to search for in whole samples. left: seconds of CPU time left for searches."""

    def __init__(self, pattern: str, left: float = BUDGET) -> None:
        """Raises UsageError for a pattern that is an invalid regex, or too large."""
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
        """Returns the first group of the first match, or the whole match if the pattern has no
        groups. Returns None without a match, or if the group matched nothing. Raises UsageError if
        the search takes longer than PATIENCE, or the time for all searches is used up."""
        begun = time.thread_time()
        try:
            found = self._search(text, begun + min(PATIENCE, self.left))
        except MemoryError as error:
            raise wrong_pattern(SLOW) from error
        finally:
            self.left -= time.thread_time() - begun
        return None if found is None else found[1 if self._regex.groups else 0]

    def _search(self, text: str, until: float) -> regex.Match[str] | None:
        """Searches until this thread's CPU time is `until`. The library's own timeout counts wall
        time, which passes while other threads have the processor, so a search that exceeds it is
        tried again."""
        while (left := until - time.thread_time()) > 0:
            try:
                return self._regex.search(text, timeout=2 * left)
            except TimeoutError:
                continue
        raise wrong_pattern(SLOW)


def _numbers(braces: str) -> list[str]:
    """Returns the numbers between braces, as texts. In verbose patterns they may contain white
    space and comments."""
    return _NUMBER.findall("".join(_COMMENT.sub("", braces).split()))


def _why(error: Exception) -> str:
    """Returns the regex library's message, shortened. It names the broken rule and its position,
    and quotes almost nothing of the pattern."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return str(error)[:LONGEST_WHY] or "it takes too much memory"


def wrong_pattern(what: str) -> UsageError:
    """Returns the error for a bad pattern. what: what is wrong with it."""
    rule = f"stop_when.pattern {what}"
    return UsageError(rule, param="stop_when", rule=rule)

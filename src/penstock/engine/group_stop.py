"""GroupStop: ends a request once enough answers agree. It reads the answer of each sample of the
request that ends, and then ends the remaining samples.

Knows texts and ends of samples; not which engine draws them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable

from penstock.errors import PenstockError, UsageError
from penstock.request import Delta, StopWhen

STOP_WHEN = "stop_when"  # stop_reason of samples that a GroupStop ended
Find = Callable[[str], "str | asyncio.Future[str | None] | None"]


class GroupStop:
    """Counts the answers of one request. over: True once enough agree; the engines that draw its
    samples then end the remaining ones. fault: the error of a failed search for an answer; all
    remaining samples end with it."""

    def __init__(self, find: Find, agree: int, known: Iterable[str | None] = ()) -> None:
        """find: returns the answer in a sample's text, or None, or a future of one of them if
        another process searches; it searches one text at a time. known: answers of samples that
        ended earlier."""
        self._find, self._agree = find, agree
        self._looking = False  # True while a future of `find` is pending
        self._waiting: deque[str] = deque()  # texts waiting to be searched
        self.fault: PenstockError | None = None
        self._answers: Counter[str] = Counter()
        # sample index -> pieces of its text, for running samples
        self._texts: dict[int, list[str]] = {}
        self._ends: list[Callable[[], None]] = []
        self.over = False
        for answer in known:
            self._count(answer)

    @classmethod
    def of(cls, asked: StopWhen) -> GroupStop:
        """Returns the GroupStop of a request's stop_when. Raises UsageError for a pattern that is
        not supported."""
        from penstock.text.answer_pattern import AnswerPattern

        return cls(AnswerPattern(asked.pattern).find, asked.agree)

    def on_over(self, end: Callable[[], None]) -> None:
        """Registers `end`, called once the group is over; calls it at once if it is already."""
        if self.over:
            end()
        else:
            self._ends.append(end)

    def hear(self, delta: Delta) -> None:
        """Takes a sample's delta; at the sample's end its answer is searched. If the search fails,
        this and all remaining samples end with the error."""
        if delta.finish_reason is None:
            self._texts.setdefault(delta.index, []).append(delta.text)
            return
        text = "".join([*self._texts.pop(delta.index, ()), delta.text])
        if self.over or delta.finish_reason not in ("stop", "length"):
            return
        if self._looking:
            self._waiting.append(text)
            return
        try:
            self._look(text)
        except UsageError as error:
            delta.finish_reason, delta.error, delta.error_param = "error", str(error), STOP_WHEN
            self._end()

    def _look(self, text: str) -> None:
        found = self._find(text)
        if isinstance(found, asyncio.Future):
            self._looking = True
            found.add_done_callback(self._looked)
        else:
            self._count(found)

    def _looked(self, found: asyncio.Future[str | None]) -> None:
        """Counts the answer that a future has found, and searches the next waiting text."""
        self._looking = False
        if found.cancelled():  # the event loop is ending, which cancels futures
            return
        try:
            self._count(found.result())
        except PenstockError as error:
            self.fault = error
            self._end()
        if self.over:
            self._waiting.clear()
        elif self._waiting:
            self._look(self._waiting.popleft())

    def _count(self, answer: str | None) -> None:
        if answer is None:
            return
        self._answers[answer] += 1
        if self._answers[answer] >= self._agree and not self.over:
            self._end()

    def _end(self) -> None:
        self.over = True
        ends, self._ends = self._ends, []
        for end in ends:
            end()

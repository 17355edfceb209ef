"""GroupStop: hears the samples of one request as they end, and ends the rest once enough of them
agree. It knows texts and ends of samples; whose engines draw them is told by those who put them
there."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable

from penstock.errors import PenstockError, UsageError
from penstock.request import Delta, StopWhen

STOP_WHEN = "stop_when"  # the stop_reason of the samples that are ended by it
Find = Callable[[str], "str | asyncio.Future[str | None] | None"]


class GroupStop:
    """The count of one request's answers. `over`: enough agree; whoever draws more of its samples
    ends them then. fault: why answers could not be looked for beside the loop: samples that are
    ended by it end with that."""

    def __init__(self, find: Find, agree: int, known: Iterable[str | None] = ()) -> None:
        """find: the answer in a sample's text, or None; or what will be that, which is looked for
        elsewhere, one text at a time.   known: answers of samples that ended before."""
        self._find, self._agree = find, agree
        self._looking = False  # elsewhere, for the answer in a text
        self._waiting: deque[str] = deque()  # texts, meanwhile
        self.fault: PenstockError | None = None
        self._answers: Counter[str] = Counter()
        self._texts: dict[int, list[str]] = {}  # of samples that go on, in pieces
        self._ends: list[Callable[[], None]] = []
        self.over = False
        for answer in known:
            self._count(answer)

    @classmethod
    def of(cls, asked: StopWhen) -> GroupStop:
        """Raises UsageError for a pattern that cannot be served."""
        from penstock.text.answer_pattern import AnswerPattern

        return cls(AnswerPattern(asked.pattern).find, asked.agree)

    def on_over(self, end: Callable[[], None]) -> None:
        """Has `end` called when it is over: at once where it is."""
        if self.over:
            end()
        else:
            self._ends.append(end)

    def hear(self, delta: Delta) -> None:
        """Takes news of a sample. Where its answer cannot be looked for it ends in an error, and so
        do the others."""
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
        """Takes in what was found elsewhere, and goes on with the next text."""
        self._looking = False
        if found.cancelled():  # the loop ends
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

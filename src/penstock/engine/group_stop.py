"""GroupStop: hears the samples of one request as they end, and ends the rest once enough of them agree. It knows texts
and ends of samples; whose engines draw them is told by those who put them there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from penstock.errors import UsageError
from penstock.request import Delta, StopWhen

STOP_WHEN = "stop_when"  # the stop_reason of the samples that are ended by it


class GroupStop:
    """The count of one request's answers. `over`: enough agree; whoever draws more of its samples ends them then."""

    def __init__(self, find: Callable[[str], str | None], agree: int, known: Iterable[str | None] = ()) -> None:
        """find: the answer in a sample's text, or None.   known: answers of samples that ended before."""
        self._find, self._agree = find, agree
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
        """Takes news of a sample. Where its answer cannot be looked for it ends in an error, and so do the others."""
        if delta.finish_reason is None:
            self._texts.setdefault(delta.index, []).append(delta.text)
            return
        text = "".join([*self._texts.pop(delta.index, ()), delta.text])
        if self.over or delta.finish_reason not in ("stop", "length"):
            return
        try:
            self._count(self._find(text))
        except UsageError as error:
            delta.finish_reason, delta.error, delta.error_param = "error", str(error), STOP_WHEN
            self._end()

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

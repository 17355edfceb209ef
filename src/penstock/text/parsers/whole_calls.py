"""WholeCallsParser: tool calls between two marks that are read when they are whole, in whatever
form a model writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.text.parsers.pieces import AnswerPiece, TurningParser, find_mark
from penstock.text.parsers.tool import Tool

ReadCalls = Callable[[str], list[tuple[str, str]]]


class WholeCallsParser(TurningParser):
    """Finds the calls of one answer. What stands between the marks and is no call of a tool stays
    in the content.

    marks: around calls.   read: what stands between them -> names and arguments in JSON; nothing
    where it is no calls alone.
    """

    def __init__(self, tools: Sequence[Tool], marks: tuple[str, str], read: ReadCalls) -> None:
        super().__init__()
        (self._begin, self._end), self._read = marks, read
        self._names = frozenset(tool.name for tool in tools)
        self._within = False
        self._looked = 0  # characters of what is between them in which its mark doesn't begin

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns what was held back. stopped: the model ended the answer, and calls that have no
        mark behind them."""
        found: list[AnswerPiece] = []
        if self._within:
            self._take(self._text, "", found, whole=stopped)
        else:
            found += self._content.put(self._text)
        return found + self._content.end(behind_call=self._calls > 0)

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Takes one step through the text. Returns whether there may be another before more of it
        comes."""
        if self._within:
            at = self._text.find(self._end, self._looked)
            self._looked = max(0, len(self._text) - len(self._end))
            if at >= 0:
                listed, self._text = self._text[:at], self._text[at + len(self._end) :]
                self._take(listed, self._end, found)
                self._within = False
            return at >= 0
        at, mark = find_mark(self._text, (self._begin,))
        self._looked = 0
        found += self._content.put(self._text[:at])
        self._text, self._within = self._text[at + len(mark) :], bool(mark)
        return bool(mark)

    def _take(self, listed: str, end: str, found: list[AnswerPiece], *, whole: bool = True) -> None:
        """Tells of the calls, or gives their text back."""
        calls = self._read(listed) if whole else None
        if not calls or any(name not in self._names for name, _ in calls):
            found += self._content.put(f"{self._begin}{listed}{end}")
            return
        self._content.drop_space()
        for name, arguments in calls:
            found += [
                AnswerPiece("name", name, self._calls),
                AnswerPiece("arguments", arguments, self._calls),
            ]
            self._calls += 1

"""WholeCallsParser: reads tool calls that stand between two marks. They are parsed once they are
complete, by the `read` function of a model family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.text.parsers.pieces import AnswerPiece, TurningParser, find_mark
from penstock.text.parsers.tool import Tool

ReadCalls = Callable[[str], list[tuple[str, str]]]


class WholeCallsParser(TurningParser):
    """Finds the calls of one answer. Text between the marks that is no call of a known tool stays
    content.

    marks: texts around the calls. read: parses the text between them to (name, arguments in JSON)
    of each call; returns [] if the text contains anything else.
    """

    def __init__(self, tools: Sequence[Tool], marks: tuple[str, str], read: ReadCalls) -> None:
        super().__init__()
        (self._begin, self._end), self._read = marks, read
        self._names = frozenset(tool.name for tool in tools)
        self._within = False
        # characters of the text between the marks known not to contain the end mark
        self._looked = 0

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns the pieces held back. stopped: True if the model ended the answer, which also
        ends calls without an end mark."""
        found: list[AnswerPiece] = []
        if self._within:
            self._take(self._text, "", found, whole=stopped)
        else:
            found += self._content.put(self._text)
        return found + self._content.end(behind_call=self._calls > 0)

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Reads the next part of the held text. Returns False if more text is needed."""
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
        """Adds the calls in the text `listed` to `found`, or the text as content if it is not
        exactly calls of known tools. end: the end mark, if it has come. whole: False if a limit cut
        the text."""
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

"""pieces: the parsers' output and their base classes. Also searches for marks (tags of a format)
that may arrive in parts. Knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

PORTION = 4_096  # characters of text that a parser handles at once


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer's text. kind: `name`: a call of the tool with this name begins;
    `arguments`: the text is further JSON of its arguments. call: number of the call for these two
    kinds, from 0."""

    kind: Literal["reasoning", "content", "name", "arguments"]
    text: str
    call: int = -1


class CallParser(Protocol):
    """Finds tool calls in a text that comes in parts. The pieces hold the whole text except the
    format's marks."""

    def feed(self, text: str) -> list[AnswerPiece]: ...

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns the pieces held back. stopped: True if the model ended the answer, which also
        ends a call without an end mark. False if a limit cut the answer; the call then stays
        incomplete."""
        ...


class TurningParser:
    """Base class of call parsers that read a text mark by mark. Each call of `_turn` takes as much
    as possible from `_text`, the text held back."""

    def __init__(self) -> None:
        self._content = ContentBuffer()
        self._text = ""  # text that is not processed yet
        self._calls = 0

    def feed(self, text: str) -> list[AnswerPiece]:
        """Reads further text, and returns its pieces."""
        found: list[AnswerPiece] = []
        self._text += text
        while self._text and self._turn(found):
            pass
        return found

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Reads the next part of the held text. Returns False if more text is needed."""
        raise NotImplementedError


class Reader(Protocol):
    """Splits one answer's text into pieces as it comes. called: number of calls that have begun.
    thought_length: number of characters before the answer itself, that is, reasoning and its marks.
    """

    @property
    def called(self) -> int: ...
    @property
    def thought_length(self) -> int: ...
    def feed(self, text: str) -> list[AnswerPiece]: ...
    def end(self, *, stopped: bool = False) -> list[AnswerPiece]: ...


def portions(text: str, size: int = PORTION) -> Iterator[str]:
    """Yields a text in parts of `size` characters. At each mark a parser searches the rest of the
    text, which would take long for a long text with many marks."""
    for at in range(0, len(text), size):
        yield text[at : at + size]


def find_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Returns the position of the first mark, and the mark. If there is none, returns "" and the
    position of text at the end that may become a mark (or the text's length)."""
    found = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if found is not None:
        return found
    longest = max(map(len, marks))
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at, ""
    return len(text), ""


class ContentBuffer:
    """Holds back white space at the end of content, since white space before a call belongs to the
    format and is dropped."""

    def __init__(self) -> None:
        self._space = ""

    def put(self, text: str) -> list[AnswerPiece]:
        """Adds content. Returns the part that is certain to be content."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [AnswerPiece("content", shown)] if shown else []

    def drop_space(self) -> None:
        self._space = ""

    def end(self, *, behind_call: bool = False) -> list[AnswerPiece]:
        """Returns the white space held back, at the end of the answer. behind_call: True after a
        call, where it belongs to the format and is dropped."""
        text, self._space = "" if behind_call else self._space, ""
        return [AnswerPiece("content", text)] if text else []

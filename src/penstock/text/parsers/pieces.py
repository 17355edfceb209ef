"""pieces: the output of parsers, in order; and the search for marks that may arrive in parts. Knows
no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

PORTION = 4_096  # characters


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Text of one kind. name: a call to the tool of this name begins; arguments: further JSON of
    its arguments. call: number of the call for these two kinds, from 0."""

    kind: Literal["reasoning", "content", "name", "arguments"]
    text: str
    call: int = -1


class CallParser(Protocol):
    """Finds tool calls in a text that comes in parts. The pieces hold all of the text except the
    format's marks."""

    def feed(self, text: str) -> list[AnswerPiece]: ...

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns the held pieces. stopped: True if the model ended the answer: a call without an
        end is ended. False if a limit cut it: the call stays incomplete."""
        ...


class TurningParser:
    """Base of call parsers that go through a text mark by mark; each turn takes as much as possible
    from `_text`."""

    def __init__(self) -> None:
        self._content = ContentBuffer()
        self._text = ""  # not processed yet
        self._calls = 0

    def feed(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces of this text."""
        found: list[AnswerPiece] = []
        self._text += text
        while self._text and self._turn(found):
            pass
        return found

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Takes one step through the text. Returns True if another may follow before more text
        comes."""
        raise NotImplementedError


class Reader(Protocol):
    """Reads one answer's text as it comes. called: number of calls begun; thought_length:
    characters before the answer itself, i.e. reasoning and its marks."""

    @property
    def called(self) -> int: ...
    @property
    def thought_length(self) -> int: ...
    def feed(self, text: str) -> list[AnswerPiece]: ...
    def end(self, *, stopped: bool = False) -> list[AnswerPiece]: ...


def portions(text: str, size: int = PORTION) -> Iterator[str]:
    """Yields a text in parts of `size` characters: an answer may consist of marks, and at each one
    the rest of the text is searched."""
    for at in range(0, len(text), size):
        yield text[at : at + size]


def find_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Returns the position of the first mark, and the mark. Without one, returns the position of
    text that may become a mark (or the text's length), and ""."""
    found = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if found is not None:
        return found
    longest = max(map(len, marks))
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at, ""
    return len(text), ""


class ContentBuffer:
    """Content to be returned. Space at its end is held back: before a call it belongs to the format
    and is dropped."""

    def __init__(self) -> None:
        self._space = ""

    def put(self, text: str) -> list[AnswerPiece]:
        """Returns the content that is certain."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [AnswerPiece("content", shown)] if shown else []

    def drop_space(self) -> None:
        self._space = ""

    def end(self, *, behind_call: bool = False) -> list[AnswerPiece]:
        """Returns the space at the end of the answer; after a call it belongs to the format too."""
        text, self._space = "" if behind_call else self._space, ""
        return [AnswerPiece("content", text)] if text else []

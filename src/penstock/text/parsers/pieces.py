"""Pieces: what a parser makes of an answer's text, in order; and how a text is searched for marks
that may come in parts. It knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

PORTION = 4_096  # characters


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Some text of one kind. name: a call begins, and this is its tool's; arguments: more of its
    JSON. call: which, for these two, from 0."""

    kind: Literal["reasoning", "content", "name", "arguments"]
    text: str
    call: int = -1


class CallParser(Protocol):
    """Finds tool calls in a text that comes in parts. The pieces hold all of it, but for the
    format's marks."""

    def feed(self, text: str) -> list[AnswerPiece]: ...

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns what was held back. stopped: the model ended the answer, and a call that has no
        end is ended; else a limit cut it, and the call stays as far as it came."""
        ...


class TurningParser:
    """What call parsers have in common that go through a text mark by mark: each turn takes what it
    can of `_text`."""

    def __init__(self) -> None:
        self._content = ContentBuffer()
        self._text = ""  # not looked at yet
        self._calls = 0

    def feed(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces that this text brings."""
        found: list[AnswerPiece] = []
        self._text += text
        while self._text and self._turn(found):
            pass
        return found

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Takes one step through the text. Returns whether there may be another before more of it
        comes."""
        raise NotImplementedError


class Reader(Protocol):
    """Reads one answer's text as it comes. called: calls that have begun; thought_length:
    characters before the answer itself, of reasoning and its marks."""

    @property
    def called(self) -> int: ...
    @property
    def thought_length(self) -> int: ...
    def feed(self, text: str) -> list[AnswerPiece]: ...
    def end(self, *, stopped: bool = False) -> list[AnswerPiece]: ...


def portions(text: str, size: int = PORTION) -> Iterator[str]:
    """Yields a text in parts: an answer may be one mark behind the other, and at each what is left
    is looked at."""
    for at in range(0, len(text), size):
        yield text[at : at + size]


def find_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Returns where the first of the marks begins, and which; where there is none, "", and where
    what may become one begins (the text's length, if nothing does)."""
    found = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if found is not None:
        return found
    longest = max(map(len, marks))
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at, ""
    return len(text), ""


class ContentBuffer:
    """Content on its way out. Space at its end waits: in front of a call it is the format's, and is
    dropped."""

    def __init__(self) -> None:
        self._space = ""

    def put(self, text: str) -> list[AnswerPiece]:
        """Returns what can go out."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [AnswerPiece("content", shown)] if shown else []

    def drop_space(self) -> None:
        self._space = ""

    def end(self, *, behind_call: bool = False) -> list[AnswerPiece]:
        """Returns the space at the end of all; behind a call it is the format's too."""
        text, self._space = "" if behind_call else self._space, ""
        return [AnswerPiece("content", text)] if text else []

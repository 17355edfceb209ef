"""The members of one JSON object, as its text comes: which value a piece of text belongs to, and where the object ends.
Values are not read; what is no object is found out as soon as it shows. It knows JSON alone.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\],]')
_SPACE = " \t\r\n"


class Member(NamedTuple):
    """More text of a key's value; last: the value ends with it."""

    key: str
    text: str
    last: bool


class ObjectScanner:
    """Reads one object. done: it has ended; broken: it is none. rest: the text behind either."""

    def __init__(self) -> None:
        self.done = self.broken = False
        self.rest = ""
        self._expects = "{"  # what may stand next: `{`, a key, inside one, `:`, or a value
        self._key = ""  # as it stands, with its quotes
        self._depth = 0  # of the value
        self._begun = self._quoted = self._escaped = False

    def feed(self, text: str) -> list[Member]:
        """Returns what this text adds to values."""
        found: list[Member] = []
        at = 0
        while at < len(text) and not (self.done or self.broken):
            if self._expects == "value":
                at = self._value(text, at, found)
            elif self._expects == "inside a key":
                at = self._inside_key(text, at)
            else:
                at = self._mark(text, at)
        self.rest = text[at:]
        return found

    def _mark(self, text: str, at: int) -> int:
        letter = text[at]
        if letter in _SPACE:
            return at + 1
        if letter == "{" and self._expects == "{":
            self._expects = "key"
        elif letter == '"' and self._expects == "key":
            self._key, self._expects = letter, "inside a key"
        elif letter == ":" and self._expects == ":":
            self._expects, self._begun = "value", False
        elif letter == "," and self._expects == ",":
            self._expects = "key"
        elif letter == "}" and self._expects in ("key", ","):
            self.done = True
        else:
            self.broken = True
            return at
        return at + 1

    def _inside_key(self, text: str, at: int) -> int:
        end, closed = self._string_end(text, at)
        self._key += text[at:end]
        if closed:
            try:
                self._key, self._expects = json.loads(self._key), ":"
            except ValueError:
                self.broken = True
        return end

    def _string_end(self, text: str, at: int) -> tuple[int, bool]:
        """Returns where a string's text ends, behind its quote, from inside it; and whether it does."""
        if self._escaped:
            self._escaped = False
            at += 1
        while (mark := _IN_STRING.search(text, at)) is not None:
            if mark[0] == '"':
                return mark.end(), True
            if mark.end() == len(text):
                self._escaped = True
                break
            at = mark.end() + 1
        return len(text), False

    def _value(self, text: str, at: int, found: list[Member]) -> int:
        if not self._begun:
            while at < len(text) and text[at] in _SPACE:
                at += 1
            if at == len(text):
                return at
            self._begun, self._depth, self._quoted = True, 0, False
        start, ended = at, False
        while at < len(text) and not ended:
            at, ended = self._value_part(text, at)
        piece = text[start:at]
        if ended and self._depth < 0:  # a bare word or number, ended by what stands behind it
            self._depth, piece = 0, piece.rstrip()
        if piece or ended:
            found.append(Member(self._key, piece, ended))
        if ended:
            self._expects = ","
        return at

    def _value_part(self, text: str, at: int) -> tuple[int, bool]:
        """Returns where this part of a value ends, and whether the value does. At the end of a bare one the depth is
        set below 0."""
        if self._quoted:
            at, closed = self._string_end(text, at)
            self._quoted = not closed
            return at, closed and self._depth == 0
        mark = _OUTSIDE.search(text, at)
        if mark is None:
            return len(text), False
        letter = mark[0]
        if letter == '"':
            self._quoted = True
        elif letter in "{[":
            self._depth += 1
        elif self._depth == 0:  # `,` or `}` behind a bare value; a `]` there is none's, and _mark says so
            self._depth = -1
            return mark.start(), True
        elif letter in "}]":
            self._depth -= 1
            return mark.end(), self._depth == 0
        return mark.end(), False

"""The members of one JSON object, as its text comes: which value a piece of text belongs to, and
where the object ends. What is no object is found out as soon as it shows. It knows JSON alone.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from penstock.text.parsers.json_mending import SPACE, JsonMender


class Member(NamedTuple):
    """More text of a key's value, in JSON; last: the value ends with it."""

    key: str
    text: str
    last: bool


class ObjectScanner:
    """Reads one object. done: it has ended; broken: it is none. rest: the text behind either."""

    def __init__(self) -> None:
        self.done = self.broken = False
        self.rest = ""
        self._expects = (
            "{"  # what may stand next: `{`, a key, `:`, a value or, as `,`, a comma or the end
        )
        self._key = ""  # in JSON, until it has ended
        self._part: JsonMender | None = None  # the key or the value that is open

    def feed(self, text: str) -> list[Member]:
        """Returns what this text adds to values."""
        found: list[Member] = []
        while text and not (self.done or self.broken):
            if self._part is None:
                text = self._mark(text)
                continue
            made = self._part.feed(text)
            text = self._part.rest
            self._take(self._part, made, found)
        self.rest = text
        return found

    def end(self, *, closed: bool) -> list[Member]:
        """Returns what is held back of the value that is open; closed:
        with what is missing of it."""
        if self._part is None or self._expects != "value":
            return []
        text = self._part.close() if closed else self._part.cut()
        return [Member(self._key, text, closed)] if text else []

    def _take(self, part: JsonMender, made: str, found: list[Member]) -> None:
        if self._expects == "key":
            self._key += made
        elif made or part.done:
            found.append(Member(self._key, made, part.done))
        self.broken = part.broken
        if not part.done:
            return
        self._part = None
        if self._expects == "value":
            self._expects = ","
        elif self._key.startswith('"'):
            self._key, self._expects = json.loads(self._key), ":"
        else:
            self.broken = True

    def _mark(self, text: str) -> str:
        """Reads a mark, or begins a key or a value. Returns the text behind it."""
        text = text.lstrip(SPACE)
        letter = text[:1]
        if letter == "{" == self._expects:
            self._expects = "key"
        elif letter == ":" == self._expects:
            self._expects, self._part = "value", JsonMender()
        elif letter == "," == self._expects:
            self._expects = "key"
        elif letter == "}" and self._expects in ("key", ","):
            self.done = True
        elif letter and self._expects == "key":
            self._key, self._part = "", JsonMender()
            return text
        else:
            self.broken = bool(letter)
            return text
        return text[1:]

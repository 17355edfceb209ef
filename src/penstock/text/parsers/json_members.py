"""json_members: splits a JSON object into its members as its text comes, and finds its end. Text
that is no object is detected as early as possible. Knows JSON alone.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from penstock.text.parsers.json_mending import SPACE, JsonMender


class Member(NamedTuple):
    """Further text of a key's value, in JSON; last: True if the value ends with it."""

    key: str
    text: str
    last: bool


class ObjectScanner:
    """Reads one object. done: it has ended; broken: the text is no object. rest: the text after it,
    or from the fault on."""

    def __init__(self) -> None:
        self.done = self.broken = False
        self.rest = ""
        self._expects = (
            "{"  # expected next: `{`, a key, `:`, a value, or `,` for a comma or the end
        )
        self._key = ""  # JSON text until the key has ended, then decoded
        self._part: JsonMender | None = None  # the open key or value

    def feed(self, text: str) -> list[Member]:
        """Returns the parts of values in this text."""
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
        """Returns the held part of the open value; closed: also closes the value."""
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
        """Reads a mark, or begins a key or a value. Returns the text after it."""
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

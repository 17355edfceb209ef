"""json_members: splits a JSON object into its members. Its text arrives in parts. Finds the
object's end, and detects text that is no object as early as possible. Knows JSON alone.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from penstock.text.parsers.json_mending import SPACE, JsonMender


class Member(NamedTuple):
    """Further JSON text of a key's value. last: True if the value ends with it."""

    key: str
    text: str
    last: bool


class ObjectScanner:
    """Reads one object. done: True once it has ended. broken: True if the text is no object. rest:
    the text after the object, or from the first wrong character on."""

    def __init__(self) -> None:
        self.done = self.broken = False
        self.rest = ""
        self._expects = (
            "{"  # the next expected part: "{", "key", ":", "value", or "," for a comma or the end
        )
        self._key = ""  # the present key: JSON text until it has ended, then decoded
        self._part: JsonMender | None = None  # reader of the key or value that has not ended

    def feed(self, text: str) -> list[Member]:
        """Reads further text, and returns the parts of values in it."""
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
        """Returns the part of the last value that was held back. closed: also complete the value,
        with missing quotes and brackets."""
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
        """Reads a bracket, colon or comma, or begins a key or a value.
        Returns the text after it."""
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

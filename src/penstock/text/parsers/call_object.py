"""CallObject: one tool call written as a JSON object, `{"name": ..., "arguments": {...}}`, as it
comes; shared by Hermes and Llama 3. Knows the object; not the text around it.
"""

from __future__ import annotations

import json
from collections.abc import Container

from penstock.text.parsers.json_members import Member, ObjectScanner
from penstock.text.parsers.json_mending import mended
from penstock.text.parsers.pieces import AnswerPiece

ARGUMENTS = ("arguments", "parameters")
EMPTY = ("null", "[]", '""')  # values that mean no arguments


class CallObject:
    """Call number `call`. named: the name was returned, since the arguments began or the object
    ended. raw: the text fed so far, until named; it becomes content if the object is no call. rest:
    the text after the object. names: allowed names."""

    def __init__(self, call: int, names: Container[str]) -> None:
        self._call, self._names, self._scanner = call, names, ObjectScanner()
        self.named, self.raw = False, ""
        self._broken = False
        self._name: str | None = None
        self._name_text = ""  # the name's JSON text so far
        self._key: str | None = None  # key of the arguments
        self._arguments: list[str] = []  # not returned yet
        self._whole = False  # all arguments have come

    @property
    def done(self) -> bool:
        return self._scanner.done and self.named

    @property
    def broken(self) -> bool:
        return self._broken or self._scanner.broken or (self._scanner.done and not self.named)

    @property
    def over(self) -> bool:
        return self.done or self.broken

    @property
    def rest(self) -> str:
        return self._scanner.rest

    def feed(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces of the call in this text."""
        if not self.named:
            self.raw += text
        self._take(self._scanner.feed(text))
        found = self._told(ended=self._scanner.done)
        if self._scanner.broken and self.named:
            self._take(self._scanner.end(closed=True))
            found += self._pieces()
        return found

    def end(self, *, stopped: bool) -> list[AnswerPiece]:
        """Returns the held pieces of a call without an end. stopped: True if the model ended the
        answer."""
        self._take(self._scanner.end(closed=stopped))
        found = self._told(ended=stopped)
        if not stopped and not self.named and self._name is not None:
            self.named = True
            found = [AnswerPiece("name", self._name, self._call), *self._pieces()]
        return found

    def _take(self, members: list[Member]) -> None:
        for member in members:
            if member.key == "name" and self._name is None and not self._broken:
                self._name_text += member.text
                if member.last:
                    self._take_name()
            elif member.key in ARGUMENTS and self._key in (None, member.key) and not self._whole:
                self._key, self._whole = member.key, member.last
                self._arguments.append(member.text)

    def _take_name(self) -> None:
        name = json.loads(self._name_text) if self._name_text.startswith('"') else None
        if name in self._names:
            self._name = name
        else:
            self._broken = True

    def _told(self, *, ended: bool) -> list[AnswerPiece]:
        """Returns the name, once this is certainly a call, and new parts of its arguments."""
        if self._name is None or self._broken:
            return []
        if self.named:
            return self._pieces()
        begun = self._arguments[0] if self._arguments else ""
        if self._whole and not begun.startswith("{"):
            self._arguments = [_object_of("".join(self._arguments))]
            begun = self._arguments[0]
            self._broken = not begun
        if ended and self._key is None:
            self._arguments = [begun := "{}"]
        if not begun.startswith("{"):
            return []
        self.named, self.raw = True, ""
        return [AnswerPiece("name", self._name, self._call), *self._pieces()]

    def _pieces(self) -> list[AnswerPiece]:
        text, self._arguments = "".join(self._arguments), []
        return [AnswerPiece("arguments", text, self._call)] if text else []


def _object_of(text: str) -> str:
    """Returns the JSON object of arguments that are no object: some models write the object as a
    string, or null. "" if there is none."""
    if text in EMPTY:
        return "{}"
    made = mended(json.loads(text)) if text.startswith('"') else None
    return made if made is not None and made.startswith("{") else ""

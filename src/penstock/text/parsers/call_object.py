"""CallObject: reads one tool call that is a JSON object. The object is `{"name": ..., "arguments":
{...}}`, and arrives in parts; hermes.py and llama3_json.py use it. Knows the object; not the text
around it.
"""

from __future__ import annotations

import json
from collections.abc import Container

from penstock.text.parsers.json_members import Member, ObjectScanner
from penstock.text.parsers.json_mending import mended
from penstock.text.parsers.pieces import AnswerPiece

ARGUMENTS = ("arguments", "parameters")
EMPTY = ("null", "[]", '""')  # JSON texts of `arguments` that mean no arguments


class CallObject:
    """Reads call number `call` of an answer. names: allowed tool names. named: True once the name
    was returned, when the arguments begin or the object ends. raw: the text fed so far, until
    `named`; it becomes content if the object is no call. rest: the text after the object."""

    def __init__(self, call: int, names: Container[str]) -> None:
        self._call, self._names, self._scanner = call, names, ObjectScanner()
        self.named, self.raw = False, ""
        self._broken = False
        self._name: str | None = None
        self._name_text = ""  # JSON text of the function's name so far
        self._key: str | None = None  # key under which the arguments stand
        self._arguments: list[str] = []  # JSON of the arguments that was not returned yet
        self._whole = False  # True once all arguments have come

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
        """Reads further text, and returns the new pieces of the call."""
        if not self.named:
            self.raw += text
        self._take(self._scanner.feed(text))
        found = self._told(ended=self._scanner.done)
        if self._scanner.broken and self.named:
            self._take(self._scanner.end(closed=True))
            found += self._pieces()
        return found

    def end(self, *, stopped: bool) -> list[AnswerPiece]:
        """Returns the pieces held back, at the end of the answer. stopped: True if the model ended
        the answer, False if a limit cut it."""
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
        """Returns pieces with the name, once this is certainly a call, and with new parts of its
        arguments. ended: True if no more text comes."""
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
    """Returns the arguments as a JSON object if they were written as a string or as null; "" if
    that is impossible."""
    if text in EMPTY:
        return "{}"
    made = mended(json.loads(text)) if text.startswith('"') else None
    return made if made is not None and made.startswith("{") else ""

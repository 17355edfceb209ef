"""One tool call written as a JSON object, `{"name": ..., "arguments": {...}}`, as it comes: what Hermes and Llama 3
share. It knows the object; what stands around it is theirs.
"""

from __future__ import annotations

import json
from collections.abc import Container

from penstock.text.answers.json_members import Member, ObjectScanner
from penstock.text.answers.pieces import AnswerPiece

ARGUMENTS = ("arguments", "parameters")


class CallObject:
    """Call number `call`. named: its name went out. raw: all that was fed, while it isn't; where the object turns out
    to be no call, that is text. done, broken, rest: as the scanner's. names: what a call may be of; None: anything."""

    def __init__(self, call: int, names: Container[str] | None = None) -> None:
        self._call, self._names, self._scanner = call, names, ObjectScanner()
        self.named, self.raw = False, ""
        self._broken = False
        self._name: str | None = None  # as it stands
        self._held: list[str] = []  # arguments before the name
        self._texts: list[str] | None = None  # of arguments that are no object
        self._told = self._complete = False  # something was said of arguments, all was

    @property
    def done(self) -> bool:
        return self._scanner.done and not self.broken

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
        """Returns the call's pieces that this text brings."""
        found: list[AnswerPiece] = []
        was_named = self.named
        for member in self._scanner.feed(text):
            if member.key == "name" and not self.named:
                found += self._take_name(member)
            elif member.key in ARGUMENTS and not self._complete:
                found += self._take_arguments(member)
        if not was_named and not self.named:
            self.raw += text
        if self.done and not self._told:
            self._told = True
            found.append(AnswerPiece("arguments", "{}", self._call))
        return found

    def _take_name(self, member: Member) -> list[AnswerPiece]:
        self._name = (self._name or "") + member.text
        if not member.last:
            return []
        try:
            name = json.loads(self._name)
        except ValueError:
            name = None
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            self._broken = True
            return []
        self.named = True
        held = [AnswerPiece("arguments", text, self._call) for text in self._held]
        return [AnswerPiece("name", name, self._call), *held]

    def _take_arguments(self, member: Member) -> list[AnswerPiece]:
        self._complete = member.last
        text = member.text
        if not self._told and not text.startswith("{"):
            self._texts = []
        self._told = True
        if self._texts is not None:
            self._texts.append(text)
            if not member.last:
                return []
            text = _object_of("".join(self._texts))
            self._texts = None
        if not self.named:
            self._held.append(text)
            return []
        return [AnswerPiece("arguments", text, self._call)]

    def end(self) -> list[AnswerPiece]:
        """Returns what was held back of a call that is cut short."""
        held, self._texts = "".join(self._texts or ()), None
        return [AnswerPiece("arguments", held, self._call)] if self.named and held else []


def _object_of(text: str) -> str:
    """What arguments that are no object say: some models write the object into a string, or null."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else "{}" if value is None else text

"""harmony: gpt-oss's format of answers. An answer has messages in channels for thought, calls and
the answer itself:

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}
        <|call|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

Text in `<|...|>` is a mark; the text before `<|message|>` is a message's header. Source: the
published description of the format (OpenAI, "harmony response format"). Knows the format and
pieces.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Literal

from penstock.text.parsers.json_mending import JsonMender
from penstock.text.parsers.pieces import AnswerPiece, find_mark, portions

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_STOPS = ("<|end|>", "<|call|>", "<|return|>")
# marks that end a message; the last two count if its own end is missing
ENDS = (*_STOPS, START, CHANNEL)
# marks that end a header; all but MESSAGE count only if the message mark is missing
HEADER_ENDS = (MESSAGE, *_STOPS, START)
# beginnings of a header; the prompt ends with a role, which `to=` may follow
HEADER_BEGINS = (
    START,
    CHANNEL,
    MESSAGE,
    "<|constrain|>",
    "to=",
)
_RECIPIENT = re.compile(r"\bto=(functions\.)?([A-Za-z0-9_.:/-]{1,128})")
_THOUGHT = re.compile(r"<\|channel\|>\s*analysis")
_TO = r"\s*(?:to=[\w.:/-]+)?\s*"
# Matches the longest possible header in a text without a message mark. The text after it belongs to
# the message.
_HEADER = re.compile(
    rf"\s*(?:<\|start\|>\s*\w*)?{_TO}(?:<\|channel\|>\s*(?:analysis|commentary|final|\w{{0,16}}$))?{_TO}"
    r"(?:<\|constrain\|>\s*\w*\s*|json\s*(?=\{|$))?"
)
LONGEST_HEADER = 1_024  # most characters of a header; longer text is part of a message

Kind = Literal["reasoning", "content", "call", "nothing"]


class HarmonyReader:
    """Reads one answer as it comes. prompt: the end of the prompt. names: functions that may be
    called; None: any. parallel: False: report only the first call."""

    def __init__(
        self, prompt: str, *, names: Container[str] | None = None, parallel: bool = True
    ) -> None:
        self._names, self._parallel = names, parallel
        # kind of the open message; None while in a header
        self._kind: Kind | None = "content" if prompt.endswith(MESSAGE) else None
        # kind that a call's message gets if it turns out to be no call
        self._beside: Kind = "content"
        self._held = ""
        # name of the open call, and its text before the arguments
        self._name, self._body = "", ""
        self._arguments: JsonMender | None = None
        self.called = 0
        self.thought_length = 0

    def feed(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces of this text, in order."""
        found: list[AnswerPiece] = []
        for part in portions(text):
            self._held += part
            while self._held and self._step(found):
                pass
        return found

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns the pieces held back. stopped: True if the model ended the answer, which also
        ends an open call; False if a limit cut it."""
        text, self._held = self._held, ""
        found = self._told(text) if self._kind is not None else self._unmarked(text)
        if stopped:
            found += self._end_call()
        elif (
            self._kind == "call" and self._arguments is not None and (cut := self._arguments.cut())
        ):
            found.append(AnswerPiece("arguments", cut, self.called - 1))
        return found

    def _step(self, found: list[AnswerPiece]) -> bool:
        """Reads up to the next mark. Returns False if more text is needed."""
        if self._kind is None:
            return self._header(found)
        at, mark = find_mark(self._held, ENDS)
        found += self._told(self._held[:at])
        self._held = self._held[at + len(mark) :] if mark in _STOPS else self._held[at:]
        if mark:
            found += self._end_call()
            self._kind = None
        return bool(mark)

    def _header(self, found: list[AnswerPiece]) -> bool:
        begun = self._held.lstrip()
        if begun and not any(
            begun.startswith(mark) or mark.startswith(begun) for mark in HEADER_BEGINS
        ):
            self._kind = "content"
            return True
        first = len(START) if begun.startswith(START) else 0
        at, mark = find_mark(begun[first:], HEADER_ENDS)
        at += first
        if mark == MESSAGE:
            self._open(begun[:at])
            self._held = begun[at + len(mark) :]
            return True
        if not mark and len(begun) <= LONGEST_HEADER:
            return False
        found += self._unmarked(begun[:at])
        self._held = begun[at:]
        return True

    def _open(self, header: str) -> None:
        """Begins the message with this header."""
        self._beside = self._kind = (
            "reasoning" if _THOUGHT.search(header) is not None else "content"
        )
        to = _RECIPIENT.search(header)
        if to is not None and (to[1] is not None if self._names is None else to[2] in self._names):
            self._kind = "call" if self._parallel or not self.called else "nothing"
            self._name, self._body, self._arguments = to[2], "", None

    def _unmarked(self, text: str) -> list[AnswerPiece]:
        """Begins a message whose message mark is missing, after its header. Returns its pieces."""
        header = _HEADER.match(text)
        assert header is not None, "all of it may be missing"
        self._open(header[0])
        is_header = "<|" in header[0] or self._kind in ("call", "nothing")
        return self._told(text[header.end() :] if is_header else text)

    def _told(self, text: str) -> list[AnswerPiece]:
        if not text or self._kind == "nothing":
            return []
        if self._kind == "call":
            return self._told_of_call(text)
        if self._kind == "reasoning":
            self.thought_length += len(text)
        return [AnswerPiece("reasoning" if self._kind == "reasoning" else "content", text)]

    def _told_of_call(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces of a call's text. If the text is no JSON object, it is no call. Text
        after the object is content."""
        found: list[AnswerPiece] = []
        self._body += text
        if self._arguments is None:
            begun = self._body.lstrip()
            if begun and not begun.startswith("{"):
                self._kind = self._beside
                return self._told(self._body)
            if not begun:
                return []
            self._arguments = JsonMender()
            found.append(self._named())
        if not self._arguments.over:
            made = self._arguments.feed(self._body) + (
                self._arguments.close() if self._arguments.broken else ""
            )
            self._body = self._arguments.rest
            found += [AnswerPiece("arguments", made, self.called - 1)] if made else []
        if self._body.strip():
            self._kind = "content"
            found += self._told(self._body)
        return found

    def _end_call(self) -> list[AnswerPiece]:
        """Ends an open call, if any, and returns its missing pieces. A call without text has no
        arguments."""
        if self._kind != "call":
            return []
        if self._arguments is None:
            return [self._named(), AnswerPiece("arguments", "{}", self.called - 1)]
        return (
            []
            if self._arguments.over
            else [AnswerPiece("arguments", self._arguments.close(), self.called - 1)]
        )

    def _named(self) -> AnswerPiece:
        self.called += 1
        return AnswerPiece("name", self._name, self.called - 1)

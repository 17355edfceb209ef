"""Harmony, gpt-oss's form of answers: messages in channels, one of thought, one of calls, one the answer.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

Source: the published description of the format (OpenAI, "harmony response format"). It knows the format and pieces.
"""

from __future__ import annotations

import re
from typing import Literal

from penstock.text.answers.pieces import AnswerPiece, find_mark, portions

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)  # the last where a message's own end is missing
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.:/-]{1,128})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
LONGEST_HEADER = 1_024  # characters; what is longer is no header, but content

Kind = Literal["reasoning", "content", "arguments", "nothing"]


class HarmonyReader:
    """Reads one answer. prompt: the end of what it was made behind. parallel: more than one call is told of."""

    def __init__(self, prompt: str, *, parallel: bool = True) -> None:
        self._parallel = parallel
        inside = prompt.endswith(MESSAGE)
        self._kind: Kind | None = "content" if inside else None  # of the message that is read; None: its header
        self._held, self._fresh = "", not inside
        self.called = 0
        self.thought_length = 0

    def feed(self, text: str) -> list[AnswerPiece]:
        """Returns the pieces that this text brings, in their order."""
        found: list[AnswerPiece] = []
        for part in portions(text):
            self._held += part
            while self._held and self._step(found):
                pass
        return found

    def end(self) -> list[AnswerPiece]:
        """Returns what was held back."""
        text, self._held = self._held, ""
        return self._told(text) if self._kind is not None or self._is_plain(text) else []

    def _step(self, found: list[AnswerPiece]) -> bool:
        """Reads on as far as one mark; False: more text is needed."""
        if self._kind is None:
            return self._header(found)
        at, mark = find_mark(self._held, ENDS)
        found += self._told(self._held[:at])
        self._held = self._held[at + len(mark) :] if mark != START else self._held[at:]
        if mark:
            self._kind = None
        return bool(mark)

    def _header(self, found: list[AnswerPiece]) -> bool:
        if self._is_plain(self._held):
            self._kind, self._fresh = "content", False
            return True
        at = self._held.find(MESSAGE)
        if at < 0:
            if len(self._held) > LONGEST_HEADER:
                self._kind = "content"
                skipped = len(START) if self._held.startswith(START) else 0  # else it would be met again, and again
                found += self._told(self._held[:skipped])
                self._held = self._held[skipped:]
            return self._kind is not None
        header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._fresh = False
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
        if recipient is not None:
            self._kind = "arguments" if self._parallel or not self.called else "nothing"
            if self._kind == "arguments":
                found.append(AnswerPiece("name", recipient[1], self.called))
                self.called += 1
        return True

    def _is_plain(self, text: str) -> bool:
        """Whether an answer begins that has no channels."""
        begun = text.lstrip()
        return (
            self._fresh
            and bool(begun)
            and not any(begun.startswith(mark) or mark.startswith(begun) for mark in (CHANNEL, START))
        )

    def _told(self, text: str) -> list[AnswerPiece]:
        if self._kind == "reasoning":
            self.thought_length += len(text)
        if not text or self._kind == "nothing":
            return []
        if self._kind == "arguments":
            return [AnswerPiece("arguments", text, self.called - 1)]
        return [AnswerPiece("reasoning" if self._kind == "reasoning" else "content", text)]

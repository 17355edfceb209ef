"""tagged: parses tool calls of GLM 4.5 and MiniMax-M2. The calls are written in tags (tags.py) and
arrive in parts. A value is a string if the tool's schema says so, else JSON. An argument is
returned once it is complete. Knows tags; no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import regex

from penstock.text.parsers.argument_text import Arguments, ArgumentText
from penstock.text.parsers.json_mending import JsonMender
from penstock.text.parsers.pieces import AnswerPiece, TurningParser, find_mark
from penstock.text.parsers.tags import Tags
from penstock.text.parsers.tool import NAME, Tool

# most characters of a tag with its name and the white space around it; longer text is no tag
MOST_TAG = 2048
# possessive like _KEY, so that a text is scanned only once
_FUNCTION = rf"(?P<name>{NAME.pattern}+)"
_KEY = r"(?P<name>[^<>\n\"']++)"


class _Marks(NamedTuple):
    """Regexes of a model family's tags. Models write any white space between the parts."""

    function: regex.Pattern[str]  # the beginning of a call: its name, and the text that must follow
    parameter: regex.Pattern[str]
    function_end: regex.Pattern[str]
    value_end: regex.Pattern[str]  # a closing tag followed by another tag
    value_stops: regex.Pattern[str]  # a closing tag followed by another tag or by the text's end


@lru_cache(maxsize=8)
def _marks_of(tags: Tags) -> _Marks:
    before, behind = (_spaced(part) for part in tags.function)
    opened, between = (_spaced(part) for part in tags.parameter)
    end, close, over = (
        regex.escape(part.strip()) for part in (tags.end, tags.close, tags.function_end or tags.end)
    )
    behind = behind if tags.function[1].strip() else rf"(?={opened}|{end})"
    value_end = rf"{close}\s*+(?:{opened}|{over}|{end})"
    return _Marks(
        regex.compile(rf"\s*+{before}\s*+{_FUNCTION}\s*+{behind}"),
        regex.compile(rf"\s*+{opened}{_KEY}{between}"),
        regex.compile(rf"\s*+{over}"),
        regex.compile(value_end),
        regex.compile(rf"{value_end}|{close}\s*+$"),
    )


def _spaced(text: str) -> str:
    """Returns a tag's regex, which allows any white space between its parts."""
    return r"\s*+".join(regex.escape(part) for part in text.split("\n") if part)


class TaggedParser(TurningParser):
    """Finds the calls of one answer. Text between the marks that is no call of a known tool stays
    content. held: True if a grammar enforced the calls, so that a value always ends at
    `tags.close`."""

    def __init__(self, tools: Sequence[Tool], *, tags: Tags, held: bool = False) -> None:
        super().__init__()
        self._tools, self._tags, self._held = {tool.name: tool for tool in tools}, tags, held
        self._marks = _marks_of(tags)
        # present position: "" in content; "call" before a call's name or the end mark; "function"
        # before an argument or the call's end; "value" in a value
        self._within = ""
        self._opened = ""  # the mark before a call, until it certainly is a call
        self._stopped = False  # True once the answer has ended
        self._arguments = Arguments(Tool(name=""))  # arguments of the open call
        self._told = 0  # number of the open call's arguments that were returned
        self._key, self._value = "", ArgumentText([])
        self._looked = 0  # characters of the value known not to contain its end
        self._seen = 0  # length of the value at the last check

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns the pieces held back. stopped: True if the model ended the answer, which also
        ends the open call. False if a limit cut it; an incomplete argument is then returned as far
        as it came."""
        found: list[AnswerPiece] = []
        self._stopped = stopped
        while stopped and self._text and self._turn(found):
            pass
        if self._within == "value":
            self._end_value(found)
        if self._within == "function" and stopped:
            self._end_call(found)
        text = self._opened + self._text if self._within in ("", "call") else ""
        if self._within == "call" and not self._opened and self._tags.end.startswith(text.strip()):
            text = ""
        return found + self._content.put(text) + self._content.end(behind_call=self._calls > 0)

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Reads the next part of the held text. Returns False if more text is needed."""
        if self._within == "value":
            return self._in_value(found)
        if self._within and not self._stopped and self._text.isspace():
            return False
        if self._within == "function":
            return self._in_function(found)
        if self._within == "call":
            return self._in_call(found)
        at, mark = find_mark(self._text, (self._tags.begin,))
        found += self._content.put(self._text[:at])
        self._text = self._text[at + len(mark) :]
        if mark:
            self._opened, self._within = mark, "call"
        return bool(mark)

    def _in_call(self, found: list[AnswerPiece]) -> bool:
        """Handles a call's name or the end mark, after the opening mark or after another call."""
        text = self._text.lstrip()
        if not self._opened and (
            text.startswith(self._tags.end) or self._tags.end.startswith(text)
        ):
            if text.startswith(self._tags.end):
                self._text, self._within = text.removeprefix(self._tags.end), ""
            return not self._within
        head = self._marks.function.match(self._text, partial=not self._stopped)
        if head is not None and head.partial and head.end() <= MOST_TAG:
            return False
        if head is None or head.end() > MOST_TAG or head["name"] not in self._tools:
            found += self._content.put(self._opened)
            self._opened, self._within = "", ""
            return True
        self._text, self._opened, self._within, self._told = (
            self._text[head.end() :],
            "",
            "function",
            0,
        )
        self._arguments = Arguments(self._tools[head["name"]])
        self._content.drop_space()
        found += [
            AnswerPiece("name", head["name"], self._calls),
            AnswerPiece("arguments", "{", self._calls),
        ]
        return True

    def _in_function(self, found: list[AnswerPiece]) -> bool:
        """Handles an argument's opening tag or the call's end. Any other text ends the call."""
        for mark in (self._marks.parameter, self._marks.function_end):
            tag = mark.match(self._text, partial=not self._stopped)
            if tag is not None and tag.end() > MOST_TAG:
                tag = None
            if tag is not None and tag.partial:
                return False
            if tag is not None and mark is self._marks.parameter:
                self._text, self._within, self._looked = self._text[tag.end() :], "value", 0
                self._seen = 0
                self._key = tag["name"].strip()
                self._value = self._arguments.text(self._key)
                return True
            if tag is not None:
                self._text = self._text[tag.end() :]
                self._end_call(found, in_tag=bool(self._tags.function_end))
                return True
        self._end_call(found)
        return True

    def _in_value(self, found: list[AnswerPiece]) -> bool:
        text, close = self._text, self._tags.close if self._held else self._tags.close.strip()
        if self._held:
            at = text.find(close, self._looked)
            self._looked = max(0, len(text) - len(close))
        else:
            fresh, self._seen = text[self._seen :], len(text)
            if not self._stopped and fresh.isspace() and text.startswith(close, self._looked):
                return False  # wait for the text after the white space
            ends = self._marks.value_stops if self._stopped else self._marks.value_end
            mark = ends.search(text, self._looked, partial=not self._stopped)
            self._looked = len(text) if mark is None else mark.start()
            at = -1 if mark is None or mark.partial else mark.start()
        if at < 0:
            return False
        self._tell(text[:at], found)
        self._text, self._within = text[at + len(close) :], "function"
        return True

    def _end_value(self, found: list[AnswerPiece]) -> None:
        """Adds the last value to `found` when no more text comes. Removes an incomplete closing
        tag."""
        text, close = self._text, self._tags.close.strip()
        mark = self._marks.value_stops.search(text, self._looked)
        if mark is None:
            tail = len(text) - len(close) + 1
            at = max(0, tail) + find_mark(text[max(0, tail) :], (close,))[0]
        else:
            at = mark.start()
        self._tell(text[:at], found, cut=mark is None and not self._stopped)
        self._text, self._within = "", "function"

    def _tell(self, text: str, found: list[AnswerPiece], *, cut: bool = False) -> None:
        """Adds an argument to `found`. text: its value. cut: True if the value is incomplete."""
        if not cut:
            value = self._arguments.read(self._key, text)
        elif self._value.free:
            value = json.dumps(text, ensure_ascii=False)[:-1]
        else:
            mender = JsonMender()
            value = mender.feed(text) + mender.cut()
        comma = ", " if self._told else ""
        self._told += 1
        head = f"{comma}{json.dumps(self._key, ensure_ascii=False)}: "
        found.append(AnswerPiece("arguments", head + value, self._calls))

    def _end_call(self, found: list[AnswerPiece], *, in_tag: bool = False) -> None:
        found.append(AnswerPiece("arguments", "}", self._calls))
        self._calls += 1
        self._within = "call" if in_tag else ""

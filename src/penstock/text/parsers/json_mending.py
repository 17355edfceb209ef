"""json_mending: repairs JSON that models write, as it comes. The result is valid by RFC 8259; valid
JSON is not changed. Repairs Python's words and quotes, raw newlines and wrong escapes in strings,
missing brackets and extra commas. Words without quotes, NaN, and numbers outside a double's range
become strings. Knows JSON's grammar; no schemas, no calls.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

DEEPEST = 256  # most levels of nesting, since JSON parsers have limits; Python's is about 1,000
SPACE = " \t\r\n"
_SPACE = re.compile(f"[{SPACE}]+")
_IN_STRING = {'"': re.compile(r'["\\\x00-\x1f]'), "'": re.compile(r"""["'\\\x00-\x1f]""")}
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")
_WORD = re.compile(r"""[^\s,:\[\]{}()"'<]+""")
_TUPLE = {"(": "[", ")": "]"}  # bracket of a Python tuple -> bracket in JSON
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class JsonMender:
    """Reads one JSON value. done: True once it has ended. broken: True if it cannot be repaired.
    rest: the text after the value, or from the first wrong character on."""

    def __init__(self) -> None:
        self.done = self.broken = False
        self.rest = ""
        # the next expected part: "value", "key", ":", or "," for a comma or an end
        self._expects = "value"
        self._open: list[str] = []  # closing brackets that are still missing
        self._quote = ""  # quote with which the open string began
        self._held = ""  # an incomplete word or escape
        self._between = ""  # white space and comma before the next token

    @property
    def over(self) -> bool:
        return self.done or self.broken

    def feed(self, text: str) -> str:
        """Reads further text, and returns its repaired JSON."""
        text, self._held = self._held + text, ""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.over:
            at = self._in_string(text, at, out) if self._quote else self._token(text, at, out)
        self.rest = text[at:]
        return "".join(out)

    def cut(self) -> str:
        """Returns the text held back, at the end of a value that a limit has cut."""
        return "" if self._quote or self.over or not self._held else self._between + self._held

    def close(self) -> str:
        """Completes the value at this point. Returns the missing JSON."""
        out: list[str] = []
        if self._quote:
            self._end_string(out)
        elif self._held:
            self._put(_json_word(self._held, key=self._expects == "key"), out)
            self._ended()
        if self._expects == ":":
            out.append(": null")
        elif self._expects == "value" and self._open[-1:] != ["]"]:
            out.append("null")
        self.done, self.broken = True, False
        return "".join([*out, *reversed(self._open)])

    def _put(self, text: str, out: list[str]) -> None:
        out += (self._between, text)
        self._between = ""

    def _ended(self) -> None:
        """Handles the end of a key or a value."""
        if self._expects == "key":
            self._expects = ":"
        else:
            self._expects, self.done = ",", not self._open

    def _token(self, text: str, at: int, out: list[str]) -> int:
        """Reads one token outside strings. Returns the position after it."""
        letter = _TUPLE.get(text[at], text[at])
        if (space := _SPACE.match(text, at)) is not None:
            self._between += space[0] if self._open else ""
            return space.end()
        if letter == "," == self._expects:
            self._between += ","
            self._expects = "key" if self._open[-1] == "}" else "value"
        elif letter == ":" == self._expects:
            self._put(":", out)
            self._expects = "value"
        elif (
            letter in "}]"
            and letter in self._open
            and (self._expects != "value" or self._open[-1] == "]")
            and self._expects != ":"
        ):
            out.append(self._between.replace(",", ""))
            self._between, bracket = "", ""
            while bracket != letter:  # also closes inner brackets whose end is missing
                bracket = self._open.pop()
                out.append(bracket)
            self._expects = "value"
            self._ended()
        elif self._expects not in ("key", "value"):
            self.broken = True
            return at
        elif letter in "\"'":
            self._put('"', out)
            self._quote = letter
        elif letter in "{[" and self._expects == "value" and len(self._open) < DEEPEST:
            self._put(letter, out)
            self._open.append("}" if letter == "{" else "]")
            self._expects = "key" if letter == "{" else "value"
        elif (word := _WORD.match(text, at)) is None:
            self.broken = True
            return at
        elif word.end() == len(text):
            self._held = word[0]
            return word.end()
        else:
            self._put(_json_word(word[0], key=self._expects == "key"), out)
            self._ended()
            return word.end()
        return at + 1

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        """Reads inside a string, up to and including the next quote, escape or newline. Returns the
        position after it."""
        mark = _IN_STRING[self._quote].search(text, at)
        if mark is None:
            out.append(text[at:])
            return len(text)
        out.append(text[at : mark.start()])
        if mark[0] == self._quote:
            self._end_string(out)
        elif mark[0] != "\\":
            out.append(json.dumps(mark[0])[1:-1])
        elif (escape := _ESCAPE.match(text, mark.start())) is not None:
            out.append(escape[0])
            return escape.end()
        elif _ESCAPE_BEGUN.fullmatch(text, mark.start()) is not None:
            self._held = text[mark.start() :]
            return len(text)
        elif text[mark.end()] == "'":  # JSON has no escape \'
            out.append("'")
            return mark.end() + 1
        else:
            out.append("\\\\")
        return mark.end()

    def _end_string(self, out: list[str]) -> None:
        out.append('"')
        self._quote = self._held = ""
        self._ended()


def mended(text: str, *, close: bool = False) -> str | None:
    """Returns a text repaired to one JSON value; None if that is impossible. close: also complete
    an unfinished value."""
    mender = JsonMender()
    made = mender.feed(text + " ")  # the space ends a bare word
    if close and text and not mender.over:
        made += mender.close()
    return made if mender.done and not mender.rest.strip(SPACE) else None


def json_text_of(value: Any) -> str:
    """Returns a Python value as JSON. Non-finite floats become strings, and lone surrogates
    escapes."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value)
    made = mended(text)
    assert made is not None, "it is JSON but for its numbers"
    return made


def _json_word(word: str, *, key: bool) -> str:
    """Returns a word without quotes as JSON: a finite number, true, false or null, or else a
    string. key: True if it is a key, which becomes a string."""
    if not key and (known := _WORDS.get(word.lower())) is not None:
        return known
    if not key and _NUMBER.fullmatch(word) is not None and _is_finite(word):
        return word
    return json.dumps(word, ensure_ascii=False)


def _is_finite(number: str) -> bool:
    try:
        value = json.loads(number)
    except ValueError:  # int() refuses very many digits
        return False
    return isinstance(value, int) or math.isfinite(value)

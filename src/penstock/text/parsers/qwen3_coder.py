"""Tool calls as Qwen3-Coder and Qwen 3.5 write them, in tags of their own:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value is a text where the tool's schema says so, else JSON. An argument goes out when it is whole.
Models leave tags out, and write of tags in their texts: where a value ends is told by what stands
behind it. It knows this format alone. Source: the chat templates of these models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import regex

from penstock.text.parsers.argument_text import Arguments, ArgumentText
from penstock.text.parsers.json_mending import JsonMender
from penstock.text.parsers.pieces import AnswerPiece, TurningParser, find_mark
from penstock.text.parsers.tags import QWEN3_CODER
from penstock.text.parsers.tool import Tool

BEGIN, END, CLOSE = QWEN3_CODER.begin, QWEN3_CODER.end, QWEN3_CODER.close
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = r"(?P<{}>[^<>\n]+)[>\n]"  # models leave `>` out
_FUNCTION = r"<function=" + _NAME.format("function")
_PARAMETER = r"<parameter=" + _NAME.format("key")
_CALL_BEGUN = regex.compile(rf"\s*+{_FUNCTION}")
_CALL = regex.compile(rf"{_CALL_BEGUN.pattern}\s*+(?:<parameter=|</function|</tool_call>)")
_TAG = regex.compile(
    rf"{_PARAMETER}|</(?P<closed>parameter|function)(?:>|(?=[\s<]))|</?tool_call>|<function="
)
# A value ends at its tag, a text only where another stands behind that; or, where it was left out,
# at what follows.
_ENDS = (
    rf"|(?P<line>(?:^|\n)[ \t]*+)?+{_PARAMETER}|</function>?\s*+(?:</?tool_call>|<function=)"
    rf"|(?:</tool_call>\s*+)?<tool_call>\s*+{_FUNCTION}"
)
_TEXT_ENDS = r"</parameter>?\s*+(?:<parameter=|<function=|</function|</?tool_call>)" + _ENDS
_WORD_ENDS = r"</parameter(?:>|(?=[\s<]))" + _ENDS
_AT_END = (
    r"|</(?:parameter|function|tool_call)>?\s*+$|(?:^|\n)[ \t]*+</(?:parameter|function|tool_call)>"
)
_VALUE_ENDS = {
    (free, stopped): regex.compile(ends + _AT_END * stopped)
    for free, ends in ((True, _TEXT_ENDS), (False, _WORD_ENDS))
    for stopped in (True, False)
}
_MAY_END = regex.compile(r"\n?</parameter>\s*+$")
_BRACKETS = {"{": "object", "[": "array", "(": "array"}
_ANY_KEY = regex.compile(r"[\w.-]+")


class Qwen3CoderParser(TurningParser):
    """Finds the calls of one answer. What stands in the tags and is no call of a tool stays in the
    content. held: a grammar holds the calls, and they are read by its rules: nothing is left out,
    and a value ends at CLOSE."""

    def __init__(self, tools: Sequence[Tool], *, held: bool = False) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._held = held
        super().__init__()
        self._within = (
            ""  # the tag whose inside comes: "", BEGIN, FUNCTION, PARAMETER, or END, behind a call
        )
        self._opened = ""  # BEGIN, unless that was left out
        self._stopped = False  # no more text comes
        self._arguments = Arguments(Tool(name=""))  # of the open call
        self._told: set[str] = set()  # their keys
        self._beside = ""  # what stands between them
        self._key = ""
        self._value = ArgumentText([])
        self._begun = False  # what stands behind its key was looked at
        self._in_line = False  # it stands in the line of its key
        self._object: JsonMender | None = (
            None  # of a value that is an object or a list, while it is open
        )
        self._behind_object = 0  # where it ended, in the value
        self._looked = 0  # characters of the value in which it doesn't end
        self._seen = 0  # characters of it that were there at the last look

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns what was held back. stopped: the model ended the answer, and what is open with
        it; else a limit cut it, and of an argument goes out what is there."""
        found: list[AnswerPiece] = []
        self._stopped = stopped
        if stopped:
            self._object, self._looked = None, self._behind_object
        while stopped and self._turn(found):
            pass
        if self._within == BEGIN:
            self._begin_at_end(found)
        if self._within == PARAMETER:
            self._cut_short(found)
        elif self._within == FUNCTION and stopped:
            self._end_call(found)
        held = self._beside.rstrip() if self._within else self._text
        return found + self._content.put(held) + self._content.end(behind_call=self._calls > 0)

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Takes one step through the text. Returns whether there may be another before more of it
        comes."""
        if self._within == PARAMETER:
            return self._in_value(found)
        if self._within == FUNCTION:
            return self._in_function(found)
        if self._within == BEGIN:
            return self._in_call(found)
        if self._within == END:
            text = self._text.lstrip()
            if text != END and END.startswith(text):
                return False
            self._text, self._within = text.removeprefix(END), ""
            return True
        at, mark = find_mark(self._text, (BEGIN,) if self._held else (BEGIN, FUNCTION))
        found += self._content.put(self._text[:at])
        self._text = self._text[at:].removeprefix(BEGIN)
        if mark:
            self._opened, self._within = mark if mark == BEGIN else "", BEGIN
        return bool(mark)

    # --- a call

    def _in_call(self, found: list[AnswerPiece]) -> bool:
        """Between the call's mark and its first argument, or its end: nothing else makes it one."""
        call = _CALL.match(self._text, partial=True)
        if call is not None and call.partial:
            return False
        if call is None or _bare(call["function"]) not in self._tools:
            found += self._content.put(self._opened or FUNCTION)
            self._text = self._text if self._opened else self._text.removeprefix(FUNCTION)
            self._within = ""
        else:
            self._begin(call, found)
        return True

    def _begin_at_end(self, found: list[AnswerPiece]) -> None:
        """Where the text ends before the first argument: a call, if a tool's name is there and no
        more than that."""
        call = _CALL_BEGUN.match(self._text)
        rest = "" if call is None else self._text[call.end() :].strip()
        tag = _TAG.match(rest, partial=True)
        if call is not None and _bare(call["function"]) in self._tools and tag is not None:
            self._begin(call, found)
        else:
            found += self._content.put(self._opened)
            self._within = ""

    def _begin(self, call: regex.Match[str], found: list[AnswerPiece]) -> None:
        name = _bare(call["function"])
        self._text = self._text[call.end("function") + 1 :]
        self._within, self._arguments, self._told = FUNCTION, Arguments(self._tools[name]), set()
        self._content.drop_space()
        found += [
            AnswerPiece("name", name, self._calls),
            AnswerPiece("arguments", "{", self._calls),
        ]

    def _in_function(self, found: list[AnswerPiece]) -> bool:
        """In front of an argument, or the call's end.
        What is neither is content behind the call."""
        tag = _TAG.search(self._text, partial=not self._stopped)
        at = len(self._text) if tag is None else tag.start()
        self._beside += self._text[:at]
        self._text = self._text[at:]
        if tag is None or tag.partial:
            return False
        self._beside = self._beside if self._beside.strip() else ""
        if tag["key"] or tag["closed"]:
            self._text = self._text[len(tag[0]) :]
        if tag["key"]:
            self._begin_value(tag)
        elif tag["closed"] != "parameter":
            self._end_call(found)
        return True

    def _end_call(self, found: list[AnswerPiece]) -> None:
        found.append(AnswerPiece("arguments", "}", self._calls))
        found += self._content.put(self._beside)
        self._calls += 1
        self._within, self._beside = END, ""

    # --- a value

    def _begin_value(self, tag: regex.Match[str]) -> None:
        self._key = _bare(tag["key"])
        self._value = self._arguments.text(self._key)
        self._begun, self._in_line = not tag[0].endswith(">"), False
        self._object = (
            JsonMender()
            if self._value.others.intersection(_BRACKETS.values()) and not self._held
            else None
        )
        self._within, self._looked, self._seen, self._behind_object = PARAMETER, 0, 0, 0

    def _in_value(self, found: list[AnswerPiece]) -> bool:
        if not self._begun and self._text:
            self._begun, self._in_line = True, not self._text.startswith("\n")
            self._text = self._text.removeprefix("\n")
        at = self._held_end() if self._held else self._end_of_value()
        if at is None:
            return False
        value = self._text[:at].removesuffix("" if self._held else "\n")
        self._tell(self._arguments.read(self._key, value), found)
        self._text, self._within = self._text[at:], FUNCTION
        return True

    def _held_end(self) -> int | None:
        at = self._text.find(CLOSE, self._looked)
        self._looked = max(0, len(self._text) - len(CLOSE))
        return at if at >= 0 else len(self._text) if self._stopped else None

    def _end_of_value(self) -> int | None:
        """Where the value ends; None where more text has to say."""
        text = self._text
        if self._object is not None and not self._is_past_object(self._object):
            return None
        fresh, self._seen = text[self._seen :], len(text)
        if (
            not self._stopped
            and fresh.isspace()
            and text.startswith((PARAMETER_END, FUNCTION_END), self._looked)
        ):
            return None  # these wait for what stands behind the space
        while True:
            ends = _VALUE_ENDS[self._value.free, self._stopped]
            mark = ends.search(text, self._looked, partial=not self._stopped)
            if mark is None:
                self._looked = len(text)
                return len(text) if self._stopped else None
            self._looked = mark.start()
            if mark.partial:
                return None
            if self._is_end(mark):
                return self._looked
            self._looked += 1

    def _is_past_object(self, value: JsonMender) -> bool:
        """Whether a list or an object has ended, if the value is one: inside it no tag ends
        anything."""
        text = self._text
        if not self._looked:
            begun = text.lstrip()[:1]
            if not begun:
                return self._stopped
            if _BRACKETS.get(begun) not in self._value.others:
                self._object = None
                return True
        value.feed(text[self._looked :])
        self._looked = len(text)
        if not value.over and not self._stopped:
            return False
        self._behind_object = self._looked = len(text) - len(value.rest) if value.done else 0
        self._object = None
        return True

    def _is_end(self, mark: regex.Match[str]) -> bool:
        """Whether a mark of those that stand for a missing one begins what may follow."""
        if mark["function"] is not None:
            return _bare(mark["function"]) in self._tools
        if mark["key"] is None:
            return True
        if mark["line"] is None and not self._in_line:
            return False
        key = _bare(mark["key"])
        known = key in self._arguments.names or (
            self._arguments.others and _ANY_KEY.fullmatch(key) is not None
        )
        return known and key not in self._told and key != self._key

    def _tell(self, value: str, found: list[AnswerPiece]) -> None:
        comma = ", " if self._told else ""
        self._told.add(self._key)
        text = f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {value}"
        found.append(AnswerPiece("arguments", text, self._calls))

    def _cut_short(self, found: list[AnswerPiece]) -> None:
        text = self._text
        tag = _MAY_END.search(text, partial=True)
        shown = text if tag is None else text[: tag.start()]
        if tag is not None and not tag.partial:
            shown = self._arguments.read(self._key, shown)
        elif self._value.free or any(text.startswith(shown) for text in self._value.named):
            shown = json.dumps(shown, ensure_ascii=False)[:-1]
        else:
            value = JsonMender()
            shown = value.feed(shown) + value.cut()
        self._tell(shown, found)


def _bare(name: str) -> str:
    return name.strip().strip("\"'")

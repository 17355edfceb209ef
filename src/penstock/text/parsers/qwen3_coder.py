"""qwen3_coder: tool calls of Qwen3-Coder and Qwen 3.5. A call looks like this:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value is a string if the tool's schema says so, else JSON. An argument is returned once it is
complete. Models omit tags, and mention tags in their texts, so the end of a value is recognised by
the text after it. Knows this format alone. Source: the chat templates of these models.
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
_NAME = r"(?P<{}>[^<>\n]+)[>\n]"  # models may omit the final `>`
_FUNCTION = r"<function=" + _NAME.format("function")
_PARAMETER = r"<parameter=" + _NAME.format("key")
_CALL_BEGUN = regex.compile(rf"\s*+{_FUNCTION}")
_CALL = regex.compile(rf"{_CALL_BEGUN.pattern}\s*+(?:<parameter=|</function|</tool_call>)")
_TAG = regex.compile(
    rf"{_PARAMETER}|</(?P<closed>parameter|function)(?:>|(?=[\s<]))|</?tool_call>|<function="
)
# A value ends at its closing tag; a string only if another tag follows. If the closing tag is
# missing, it ends at the next tag.
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
    """Finds the calls of one answer. Text in the tags that is no call of a known tool stays
    content. held: True if a grammar enforced the calls, so that no tag is missing and a value
    always ends at CLOSE."""

    def __init__(self, tools: Sequence[Tool], *, held: bool = False) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._held = held
        super().__init__()
        self._within = (
            # present position: "" in content; BEGIN, FUNCTION or PARAMETER inside that tag; END
            # after a call
            ""
        )
        self._opened = ""  # the opening tag BEGIN before the call; "" if it was omitted
        self._stopped = False  # True once the answer has ended
        self._arguments = Arguments(Tool(name=""))  # arguments of the open call
        self._told: set[str] = set()  # names of the open call's arguments that were returned
        self._beside = ""  # text between the open call's arguments
        self._key = ""
        self._value = ArgumentText([])
        self._begun = False  # True once the text after the present key was checked
        self._in_line = False  # True if the value begins on its key's line
        self._object: JsonMender | None = (
            None  # reader of a value that is an object or a list, until it ends
        )
        self._behind_object = 0  # position in the value after that object or list
        self._looked = 0  # characters of the value known not to contain its end
        self._seen = 0  # length of the value at the last check

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns the pieces held back. stopped: True if the model ended the answer, which also
        ends the open call. False if a limit cut it; an incomplete argument is then returned as far
        as it came."""
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
        """Reads the next part of the held text. Returns False if more text is needed."""
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

    # --- text of a call around its arguments

    def _in_call(self, found: list[AnswerPiece]) -> bool:
        """Handles the text between a call's opening tag and its first argument or end. Any other
        text means that it is no call."""
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
        """Handles an answer that ends before the first argument. It is a call only if it has a
        tool's name and nothing else."""
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
        """Handles the text before an argument or the call's end. Any other text becomes content
        after the call."""
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

    # --- text of an argument's value

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
        """Returns the position where the value ends; None if more text is needed."""
        text = self._text
        if self._object is not None and not self._is_past_object(self._object):
            return None
        fresh, self._seen = text[self._seen :], len(text)
        if (
            not self._stopped
            and fresh.isspace()
            and text.startswith((PARAMETER_END, FUNCTION_END), self._looked)
        ):
            return None  # wait for the text after the white space
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
        """Returns False while the value is a list or an object that has not ended, since tags
        inside it don't count."""
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
        """Returns True if the mark ends the value. A tag that stands for a missing closing tag must
        be that of a known function, or of an argument that has not come yet."""
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

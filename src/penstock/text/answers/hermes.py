"""Tool calls as Hermes, Qwen 2.5 and Qwen 3 write them:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

It knows this format alone. Source: the chat templates of these models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.text.answers.call_object import CallObject
from penstock.text.answers.pieces import AnswerPiece, TurningParser, find_mark
from penstock.text.answers.tool import Tool, lark_text, schema_rule

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(TurningParser):
    """Finds the calls of one answer. What stands between the marks and is no call stays in the content."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._object: CallObject | None = None
        self._closing = False  # an object has ended, its mark is to come

    def end(self) -> list[AnswerPiece]:
        """Returns what was held back."""
        if self._object is not None:
            named, raw = self._object.named, self._object.raw
            return self._object.end() if named else self._content.put(BEGIN + raw) + self._content.end()
        held = self._content.put("" if self._closing else self._text)
        return held + self._content.end(behind_call=self._calls > 0)

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Takes one step through the text. Returns whether there may be another before more of it comes."""
        if self._object is not None:
            return self._in_call(self._object, found)
        if self._closing:
            return self._behind_call()
        at, mark = find_mark(self._text, (BEGIN,))
        if at:
            found += self._content.put(self._text[:at])
        self._text = self._text[at + len(mark) :]
        if mark:
            self._object = CallObject(self._calls)
        return bool(mark)

    def _in_call(self, call: CallObject, found: list[AnswerPiece]) -> bool:
        text, self._text = self._text, ""
        if not call.over:
            pieces = call.feed(text)
            if pieces:
                self._content.drop_space()
            found += pieces
            text = call.rest
        if not call.over:
            return False
        if call.broken and not call.named:
            found += self._content.put(BEGIN)
            self._object, self._text = None, call.raw
            return True
        if call.broken:  # of what is no JSON any more nothing can be told, up to the mark
            at, mark = find_mark(text, (END,))
            self._text = text[at:]
            if not mark:
                return False
        else:
            self._text = text
        self._object, self._closing = None, True
        self._calls += 1
        return True

    def _behind_call(self) -> bool:
        text = self._text.lstrip(" \t\r\n}")  # models write a bracket too many
        if text and not text.startswith(END) and END.startswith(text):
            self._text = text
            return False
        self._text = text.removeprefix(END)
        self._closing = not text
        return bool(text)


def call_rest(tools: Sequence[Tool]) -> str:
    """Returns Lark whose rule `call_rest` is what stands between a call's marks: of one of these tools."""
    heads = [lark_text(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ') for tool in tools]
    bodies = " | ".join(f"{head} arguments_{at}" for at, head in enumerate(heads))
    rules = "\n".join(schema_rule(f"arguments_{at}", tool) for at, tool in enumerate(tools))
    return f"call_rest: ({bodies}) {lark_text('}' + chr(10))}\n{rules}\n"

"""hermes: tool calls of Hermes and Qwen 3. Also of Qwen 2.5; a call looks like this:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Knows this format alone. Source: the chat templates of these models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.text.parsers.call_object import CallObject
from penstock.text.parsers.pieces import AnswerPiece, TurningParser, find_mark
from penstock.text.parsers.tool import Tool, lark_text, schema_rule

BEGIN, END = "<tool_call>", "</tool_call>"
_BESIDE = (
    # characters that may stand around a call's object: models write several calls into one tag,
    # sometimes as a list, or too many brackets
    " \t\r\n,;[]}"
)


class HermesParser(TurningParser):
    """Finds the calls of one answer. Text in the tags that is no call of a known tool stays
    content."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._names = frozenset(tool.name for tool in tools)
        self._object: CallObject | None = None
        self._opened = ""  # the tag and other text before a call, until it certainly is a call
        self._in_tag = False  # True after a call until its closing tag has come
        self._at_object = False  # True where another call may begin in the same tag

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns the pieces held back. stopped: True if the model ended the answer, False if a
        limit cut it."""
        found: list[AnswerPiece] = []
        text = self._opened + self._text
        if self._object is not None:
            found += self._object.end(stopped=stopped)
            text = "" if self._object.named else self._opened + self._object.raw
        if self._object is None and self._at_object and not self._opened:
            text = ""
        return found + self._content.put(text) + self._content.end(behind_call=self._calls > 0)

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Reads the next part of the held text. Returns False if more text is needed."""
        if self._object is not None:
            return self._in_call(self._object, found)
        if self._at_object:
            return self._beside_call(found)
        at, mark = find_mark(self._text, (BEGIN, END) if self._in_tag else (BEGIN,))
        if at:
            found += self._content.put(self._text[:at])
        self._text = self._text[at + len(mark) :]
        if mark:
            self._in_tag = False
        if mark == BEGIN:
            self._opened, self._at_object = BEGIN, True
        return bool(mark)

    def _beside_call(self, found: list[AnswerPiece]) -> bool:
        """Handles text in the tags before or after a call's object. A closing tag or another object
        must follow."""
        text = self._text.lstrip(_BESIDE)
        beside = self._text[: len(self._text) - len(text)]
        if not text or (self._in_tag and text != END and END.startswith(text)):
            return False
        self._at_object = False
        if text.startswith("{"):
            self._opened += beside
            self._object, self._text = CallObject(self._calls, self._names), text
        elif self._in_tag:
            self._in_tag = not text.startswith(END)
            self._text = text.removeprefix(END)
        else:
            found += self._content.put(self._opened)
            self._opened = ""
        return True

    def _in_call(self, call: CallObject, found: list[AnswerPiece]) -> bool:
        pieces = call.feed(self._text)
        if pieces:
            self._content.drop_space()
        found += pieces
        if not call.over:
            self._text = ""
            return False
        self._object = None
        if call.named:
            self._text, self._opened = call.rest, ""
            self._calls += 1
            self._in_tag = True
            self._at_object = call.done
        else:
            found += self._content.put(self._opened + call.raw[:1])
            self._text, self._opened = call.raw[1:], ""
        return True


def call_rest(tools: Sequence[Tool]) -> str:
    """Returns Lark rules for these tools.
    The rule `call_rest` is the text between a call's tags."""
    heads = [lark_text(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ') for tool in tools]
    bodies = " | ".join(f"{head} arguments_{at}" for at, head in enumerate(heads))
    rules = "\n".join(schema_rule(f"arguments_{at}", tool) for at, tool in enumerate(tools))
    return f"call_rest: ({bodies}) {lark_text('}' + chr(10))}\n{rules}\n"

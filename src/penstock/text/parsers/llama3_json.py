"""llama3_json: tool calls of Llama 3.1 and later. The answer is one JSON object, or several in
sequence:

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": ...}

`<|python_tag|>` may stand before it. An ordinary answer in JSON begins the same way, so an object
is a call only if it has a tool's name. Knows this format alone. Source: the model card's prompt
format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.text.parsers.call_object import CallObject
from penstock.text.parsers.pieces import AnswerPiece, TurningParser
from penstock.text.parsers.tool import Tool, lark_text, schema_rule

TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonParser(TurningParser):
    """Finds the calls at the beginning of one answer. All text after them is content."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = frozenset(tool.name for tool in tools)
        super().__init__()
        self._object: CallObject | None = None
        self._plain = False  # True once the rest of the text is known to be content

    def end(self, *, stopped: bool = False) -> list[AnswerPiece]:
        """Returns the pieces held back. stopped: True if the model ended the answer, False if a
        limit cut it."""
        found: list[AnswerPiece] = []
        held = self._text.lstrip(_BETWEEN) if self._calls else self._text
        if self._object is not None:
            found += self._object.end(stopped=stopped)
            held = "" if self._object.named else self._object.raw
        return found + self._content.put(held) + self._content.end(behind_call=self._calls > 0)

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Reads the next part of the held text. Returns False if more text is needed."""
        if self._plain:
            text, self._text = self._text, ""
            found += self._content.put(text)
            return False
        if self._object is not None:
            return self._in_call(self._object, found)
        text = self._text.lstrip(_BETWEEN if self._calls else None)
        begun = text.removeprefix(TAG).lstrip()
        if not begun or (text != TAG and TAG.startswith(text)):
            return False  # only white space so far, or an incomplete tag
        self._plain = begun[0] != "{"
        if not self._plain:
            self._object, self._text = CallObject(self._calls, self._names), begun
        elif self._calls:
            self._text = text
        return True

    def _in_call(self, call: CallObject, found: list[AnswerPiece]) -> bool:
        found += call.feed(self._text)
        self._text = call.rest
        if call.over:
            self._plain, self._object = call.broken, None
            self._text = call.rest if call.named else call.raw
            self._calls += call.named
        return True


def call_rest(tools: Sequence[Tool]) -> str:
    """Returns Lark rules for these tools. The rule `call_rest` is a whole call, since the format
    has no marks."""
    heads = [lark_text(f'{{"name": {json.dumps(tool.name)}, "parameters": ') for tool in tools]
    bodies = " | ".join(f"{head} arguments_{at}" for at, head in enumerate(heads))
    rules = "\n".join(schema_rule(f"arguments_{at}", tool) for at, tool in enumerate(tools))
    return f'call_rest: ({bodies}) "}}"\n{rules}\n'

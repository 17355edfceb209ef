"""Tool calls as Qwen3-Coder and Qwen 3.5 write them, in tags of their own:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value is a text where the tool's schema says so, else JSON. An argument goes out when it is whole. It knows this
format alone. Source: the chat templates of these models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from penstock.text.answers.pieces import AnswerPiece, TurningParser, find_mark
from penstock.text.answers.tool import Tool, argument_schema, json_text, kinds_of, lark_text, typed

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]*>")


class Qwen3CoderParser(TurningParser):
    """Finds the calls of one answer. What stands in the tags and is no call stays in the content."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        super().__init__()
        self._within = ""  # the tag whose inside comes: "", BEGIN, FUNCTION, or END, behind a call
        self._name = ""
        self._arguments = 0

    def end(self) -> list[AnswerPiece]:
        """Returns what was held back; of an argument that is cut short, what is there."""
        if self._within == FUNCTION:
            return self._cut_short()
        held = "" if self._within == END else BEGIN * (self._within == BEGIN) + self._text
        return self._content.put(held) + self._content.end(behind_call=self._calls > 0)

    def _turn(self, found: list[AnswerPiece]) -> bool:
        """Takes one step through the text. Returns whether there may be another before more of it comes."""
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
        at, mark = find_mark(self._text, (BEGIN, FUNCTION))  # the first tag is left out at times
        if at:
            found += self._content.put(self._text[:at])
        self._text = self._text[at + len(mark) * (mark == BEGIN) :]
        self._within = BEGIN if mark else ""
        return bool(mark)

    def _in_call(self, found: list[AnswerPiece]) -> bool:
        """Between the call's mark and its function's name."""
        text = self._text.lstrip()
        if FUNCTION.startswith(text[: len(FUNCTION)]) and len(text) < len(FUNCTION):
            return False
        name = _NAME.match(text, len(FUNCTION)) if text.startswith(FUNCTION) else None
        if name is None and text.startswith(FUNCTION) and re.search("[<\n]", text[len(FUNCTION) :]) is None:
            return False
        if name is None or name[0] == ">":
            found += self._content.put(BEGIN)
            self._within = ""
            if text.startswith(FUNCTION):
                found += self._content.put(FUNCTION)
                self._text = text[len(FUNCTION) :]
            return True
        self._name, self._text, self._within = name[0][:-1].strip(), text[name.end() :], FUNCTION
        self._content.drop_space()
        self._arguments = 0
        found += [AnswerPiece("name", self._name, self._calls), AnswerPiece("arguments", "{", self._calls)]
        return True

    def _in_function(self, found: list[AnswerPiece]) -> bool:
        text = self._text.lstrip()
        if text.startswith(PARAMETER):
            at, mark = find_mark(text, (PARAMETER_END,))
            name = _NAME.match(text, len(PARAMETER))
            if not mark or name is None:
                return False
            key, value = name[0][:-1].strip(), _unframed(text[name.end() : at])
            found.append(AnswerPiece("arguments", self._argument(key, self._typed(key, value)), self._calls))
            self._text = text[at + len(mark) :]
            return True
        if not text or PARAMETER.startswith(text) or (FUNCTION_END.startswith(text) and text != FUNCTION_END):
            return False
        if text.startswith(FUNCTION_END):
            found.append(AnswerPiece("arguments", "}", self._calls))
            self._text, self._within = text[len(FUNCTION_END) :], END
            self._calls += 1
            return True
        at, mark = find_mark(text, (PARAMETER, FUNCTION_END))  # what stands between arguments belongs to none
        self._text = text[at:]
        return bool(mark)

    def _argument(self, key: str, value: str) -> str:
        comma = ", " if self._arguments else ""
        self._arguments += 1
        return f"{comma}{json.dumps(key, ensure_ascii=False)}: {value}"

    def _typed(self, key: str, value: str) -> str:
        tool = self._tools.get(self._name)
        return json.dumps(value, ensure_ascii=False) if tool is None else typed(tool, key, value)

    def _cut_short(self) -> list[AnswerPiece]:
        text = self._text.lstrip()
        name = _NAME.match(text, len(PARAMETER)) if text.startswith(PARAMETER) else None
        if name is None:
            return []
        key, value = name[0][:-1].strip(), text[name.end() :].removeprefix("\n")
        tool = self._tools.get(self._name)
        plain = tool is None or "string" in kinds_of(argument_schema(tool, key))
        shown = json.dumps(value, ensure_ascii=False)[:-1] if plain else value
        return [AnswerPiece("arguments", self._argument(key, shown), self._calls)]


def _unframed(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


# --- grammars


def call_rest(tools: Sequence[Tool]) -> str:
    """Returns Lark whose rule `call_rest` is what stands between a call's marks: of one of these tools."""
    heads = [lark_text(f"\n{FUNCTION}{tool.name}>\n") for tool in tools]
    bodies = " | ".join(f"{head} arguments_{at}" for at, head in enumerate(heads))
    rules = "\n".join(_arguments_rules(f"arguments_{at}", tool) for at, tool in enumerate(tools))
    return f"call_rest: ({bodies}) {lark_text(FUNCTION_END + chr(10))}\n{rules}\n"


def _arguments_rules(name: str, tool: Tool) -> str:
    """The rule of a tool's arguments, in the schema's order, and each one's. Without properties: any texts."""
    properties = tool.schema.get("properties") or {}
    needed = tool.schema.get("required") or []
    parts, rules = [], []
    for at, (key, schema) in enumerate(properties.items()):
        part = f"{name}_{at}"
        parts.append(part if key in needed else f"{part}?")
        rules.append(f"{part}: {lark_text(f'{PARAMETER}{key}>' + chr(10))} {_value_rule(part, schema, tool)}")
    if not properties and tool.schema.get("additionalProperties", True) is not False:
        parts.append(f"({lark_text(PARAMETER)} /[^<>\\n]+/ {lark_text('>' + chr(10))} {name}_text)*")
        rules.append(_text_rule(f"{name}_text"))
    return "\n".join([f"{name}: {' '.join(parts)}" if parts else f'{name}: ""', *rules])


def _value_rule(part: str, schema: Any, tool: Tool) -> str:
    """What stands behind a parameter's tag, with its end; and the rules that it takes."""
    close = lark_text(f"\n{PARAMETER_END}\n")
    schema = schema if isinstance(schema, dict) else {}
    chosen = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(chosen, list) and chosen and all(isinstance(value, str) for value in chosen):
        return f"({' | '.join(map(lark_text, chosen))}) {close}"
    if "string" in kinds_of(schema):
        return f"{part}_text\n{_text_rule(f'{part}_text')}"
    whole = schema | {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    return f"{part}_json {close}\n{part}_json: %json {json_text(whole, strict=tool.strict)}"


def _text_rule(name: str) -> str:
    return f"{name}[lazy]: /(?s:.*)/ {lark_text(f'{chr(10)}{PARAMETER_END}{chr(10)}')}"

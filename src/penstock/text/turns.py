"""turns: adapts messages to one chat template. `Reads` describes what the template expects:
contents as text or in parts, arguments of calls as objects or JSON text, one call per turn or
several. `as_read` converts a checked conversation accordingly, and omits nothing that the template
can print. template_reads.py finds the Reads of a template. Knows messages; no Jinja.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.text.parsers.hermes import BEGIN, END

Message = dict[str, Any]
INVALID = "INVALID_JSON"  # key under which the text of invalid arguments is passed as an object
ID = 9  # characters (letters and digits) of a call's id if it must be short


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Properties of messages that a template expects. The defaults suit most templates.

    parts: roles whose content may be a list of parts. For other roles parts are joined by newlines.
    only_parts: roles whose content must be parts, never text.
    blank: empty content is passed as text; False: as an empty part.
    developer: the template knows the role developer; False: it is renamed to system.
    calls: calls per turn. 2: any number; 0: calls are written into the content in Hermes' format.
    empty: the content of a turn that has only calls.
    beside: a turn with calls may have content; False: the content gets a turn before it.
    objects: arguments of calls are objects; False: they are JSON text.
    raw: invalid arguments are passed as text; False: as an object with the text under INVALID.
    short_ids: ids of calls must have ID letters and digits.
    results: a tool's result has the role tool; False: it is part of a user message.
    thoughts: field names of reasoning; empty: reasoning is a part of the content.
    thought_beside: reasoning may stand next to content and a call; False: it becomes the beginning
    of the content.
    """

    parts: frozenset[str] = frozenset()
    only_parts: frozenset[str] = frozenset()
    blank: bool = True
    developer: bool = True
    calls: int = 2
    empty: str | None = ""
    beside: bool = True
    objects: bool = True
    raw: bool = False
    short_ids: bool = False
    results: bool = True
    thoughts: tuple[str, ...] = ("reasoning", "reasoning_content")
    thought_beside: bool = True


def as_read(messages: Sequence[Message], reads: Reads) -> list[Message]:
    """Converts checked messages to the format that `reads` describes."""
    turns: list[Message] = []
    behind_result = False
    for message in _one_call_each(messages) if reads.calls == 1 else messages:
        result = message["role"] == "tool" and not reads.results
        for turn in _turns(message, reads):
            if (result or behind_result) and turn["role"] == "user" == turns[-1]["role"]:
                both = f"{_text(turns[-1]['content'])}\n{_text(turn['content'])}"
                turns[-1] = {**turns[-1], "content": _content(both, "user", reads)}
            else:
                turns.append(turn)
        behind_result = result
    return turns


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields the messages. A turn with several calls becomes one turn per call, each followed by
    its result."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls, results = message.get("tool_calls", []), []
        if len(calls) < 2:
            yield message
            continue
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {"role": message["role"]}
            ids = (call.get("id"), None)
            own = next(
                (number for number, each in enumerate(results) if each.get("tool_call_id") in ids),
                None,
            )
            if own is not None:
                yield results.pop(own)
        yield from results


def _turns(message: Message, reads: Reads) -> Iterator[Message]:
    """Yields a message as the template expects it, as one turn or two."""
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls", [])
    thought = message.get("reasoning", message.get("reasoning_content"))
    made = {
        key: value
        for key, value in message.items()
        if key not in ("reasoning", "reasoning_content")
    }
    if role == "developer" and not reads.developer:
        role = "system"
    elif role == "tool" and not reads.results:
        role, content = "user", f"<tool_response>\n{_text(content)}\n</tool_response>"
        made.pop("tool_call_id", None)
    elif role == "tool" and reads.short_ids:
        made["tool_call_id"] = _short(message.get("tool_call_id"))
    if calls and not reads.calls:
        del made["tool_calls"]
        content = "\n".join(filter(None, [_text(content), *map(_told, calls)]))
    elif calls:
        made["tool_calls"] = [_call(call, reads) for call in calls]
        if content and thought and not reads.thought_beside:
            content, thought = f"{thought}\n{_text(content)}", None
        if content and not reads.beside:
            yield {"role": role, "content": _content(content, role, reads)}
            content = None
        content = content or reads.empty
    else:
        content = content or ""
    content = _content(content, role, reads)
    if thought and not reads.thoughts:
        content = [{"type": "thinking", "thinking": thought}, *_parts(content)]
    elif thought is not None:
        made |= dict.fromkeys(reads.thoughts, thought)
    yield {**made, "role": role, "content": content}


def _content(content: Any, role: str, reads: Reads) -> Any:
    if isinstance(content, list) and role not in reads.parts:
        content = _text(content)
    if content is None or isinstance(content, list):
        return content
    needs_part = role in reads.only_parts or (
        content == "" and role in reads.parts and not reads.blank
    )
    return [{"type": "text", "text": content}] if needs_part else content


def _text(content: Any) -> str:
    """Returns a content as one text. Parts are joined by newlines, as in vLLM."""
    return (
        "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    )


def _parts(content: Any) -> list[Message]:
    return (
        content
        if isinstance(content, list) and content
        else [{"type": "text", "text": _text(content)}]
    )


def _call(call: Message, reads: Reads) -> Message:
    function = call["function"]
    made = {
        **call,
        "function": {**function, "arguments": _arguments(function.get("arguments"), reads)},
    }
    return {**made, "id": _short(call.get("id"))} if reads.short_ids else made


def _arguments(given: Any, reads: Reads) -> Any:
    text, value = _read_arguments(given)
    if isinstance(value, dict) and reads.objects:
        return value
    return text if isinstance(value, dict) or reads.raw or not reads.objects else {INVALID: text}


def _read_arguments(given: Any) -> tuple[str, Any]:
    """Returns a call's arguments as JSON text and as a value, which is None for invalid JSON."""
    if not isinstance(given, str):
        value = {} if given is None else given
        return json.dumps(value, ensure_ascii=False), value
    if not given.strip():
        return "{}", {}
    try:
        # strict=False, since models write raw newlines into strings
        return given, json.loads(given, strict=False)
    except (ValueError, RecursionError):
        return given, None


def _told(call: Message) -> str:
    """Returns a call as text in Hermes' format, which answers also use if the template doesn't
    support calls."""
    text, _ = _read_arguments(call["function"].get("arguments"))
    return (
        f'{BEGIN}\n{{"name": {json.dumps(call["function"].get("name"))}, "arguments":'
        f" {text}}}\n{END}"
    )


def _short(name: Any) -> str:
    known = str(name)
    fits = len(known) == ID and known.isascii() and known.isalnum()
    return known if fits else hashlib.sha256(known.encode()).hexdigest()[:ID]

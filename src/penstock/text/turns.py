"""Messages written as one chat template reads them. `Reads` says what it takes: contents as text or
in parts, arguments of calls as objects or as JSON text, one call a turn or several. `as_read`
writes a checked conversation so; nothing in it is left out that the template has a place for.
`template_reads` finds out what a template takes. It knows messages; no Jinja.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.text.parsers.hermes import BEGIN, END

Message = dict[str, Any]
INVALID = "INVALID_JSON"  # the key of an object that stands for arguments that are none
ID = 9  # letters and digits of a call's id, where it must be a short one


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What a template takes. The defaults are what most of them take.

    parts: roles whose content may be a list of parts; of other roles' they are joined by line ends.
    only_parts: roles whose content is a part, never text.   blank: a content of no text is text;
    False: a part of none. developer: a message may have this role; False: it is given the role
    system. calls: how many a turn holds: 2 stands for any number; 0: they are written into its
    content, as Hermes writes them. empty: the content of a turn of calls alone.       beside: it
    may have some; False: a turn before it has that. objects: arguments of calls are objects; False:
    they are JSON text. raw: arguments that are no JSON object are text all the same; False: an
    object holds that text, under INVALID. short_ids: ids of calls have ID letters and digits;
    False: any. results: a tool's result has the role tool; False: it is in a message of the user.
    thoughts: the names that reasoning goes by; none: it is a part of the content. thought_beside:
    it may be beside content and a call; False: it is the beginning of that content.
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
    """Returns checked messages as a template gets them that reads so."""
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
    """Yields the messages; of several calls in a turn each has a turn of its own, and its result
    behind it."""
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
    """Yields a message as the template takes it, in one turn or in two."""
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
    """Returns a content as one text: parts are joined by line ends, as vLLM joins them."""
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
    """Returns arguments as JSON text, and as what that says; None where it is no JSON."""
    if not isinstance(given, str):
        value = {} if given is None else given
        return json.dumps(value, ensure_ascii=False), value
    if not given.strip():
        return "{}", {}
    try:
        # models write line ends into strings as they are
        return given, json.loads(given, strict=False)
    except (ValueError, RecursionError):
        return given, None


def _told(call: Message) -> str:
    """Returns a call as Hermes writes it, which is what answers are held to where a template has no
    word for calls."""
    text, _ = _read_arguments(call["function"].get("arguments"))
    return (
        f'{BEGIN}\n{{"name": {json.dumps(call["function"].get("name"))}, "arguments":'
        f" {text}}}\n{END}"
    )


def _short(name: Any) -> str:
    known = str(name)
    fits = len(known) == ID and known.isascii() and known.isalnum()
    return known if fits else hashlib.sha256(known.encode()).hexdigest()[:ID]

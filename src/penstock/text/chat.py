"""Chats, checked before the model's template makes one prompt text of them: messages, and what is asked beside them by
vLLM's and transformers' names.

    add_generation_prompt    end the prompt with the header of the assistant's next message
    continue_final_message   end it inside the last message: the answer goes on where that stops
    chat_template_kwargs     further variables of the model's template
    tools                    functions that the template tells the model of, in OpenAI's form

Rendering is `chat_template`'s, in the process that `sandbox` starts; a last message that is continued has a mark at its
end then, and what comes behind that is cut off. It knows no Jinja, no tokenizer and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import TokenizerError, UsageError

MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
MARK = "PENSTOCK_CONTINUES_HERE "  # plain letters, which no filter escapes; the space tells whether ends are trimmed


def pick_template(templates: Mapping[str, str]) -> str:
    """Returns the model's default template. Raises TokenizerError where it has none."""
    if "default" in templates:
        return templates["default"]
    names = f" (it has {', '.join(sorted(templates))})" if templates else ""
    raise TokenizerError(
        f"this model has no chat template{names}; use plain prompts (completions), "
        "or put a chat_template.jinja into its folder"
    )


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns the messages as a template gets them. Raises UsageError for a malformed one; needs no model."""
    return [_check_message(place, message) for place, message in enumerate(_check_list(messages))]


def _check_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of {role, content}", param="messages")
    if not messages:
        raise UsageError("messages is empty; send at least one message", param="messages")
    return messages


def _check_message(place: int, message: Any) -> dict[str, Any]:
    """A message as the template gets it: known keys, content as one text."""
    where = f"messages[{place}]"
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} must be an object with role and content", param="messages")
    unknown = [str(key) for key in message if key not in MESSAGE_KEYS]
    if unknown:
        raise UsageError(f"{where} has a field {unknown[0]!r}; known are {', '.join(MESSAGE_KEYS)}", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{where}.role must be text such as 'user'", param="messages")
    checked = {key: value for key, value in message.items() if value is not None}
    for key in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if not isinstance(checked.get(key, ""), str):
            raise UsageError(f"{where}.{key} must be text", param="messages")
    calls = checked.get("tool_calls")
    if calls is not None:
        if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
            raise UsageError(f"{where}.tool_calls must be a list", param="messages")
        checked["tool_calls"] = [_check_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls)]
    if message.get("content") is None and not calls:
        raise UsageError(f"{where}.content is missing; give text or a list of text parts", param="messages")
    checked["content"] = _flatten(where, message.get("content"))
    return checked


def _flatten(where: str, content: Any) -> str | None:
    """Text parts are joined by line ends, as vLLM does for templates that take text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(f"{where}.content must be text or a list of text parts", param="messages")
    texts = []
    for at, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            raise UsageError(f"{where}.content[{at}] is of type {kind!r}; only text parts are served", param="messages")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_call(where: str, call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what templates read; OpenAI's bodies carry them as JSON
    text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise UsageError(f"{where} must be an object with a function", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}.function.arguments is not JSON ({error})", param="messages") from error
    return {**call, "function": {**function, "arguments": arguments if arguments is not None else {}}}


# --- options


def check_options(
    *,
    add_generation_prompt: Any = True,
    continue_final_message: Any = False,
    chat_template_kwargs: Any = None,
    tools: Any = None,
) -> None:
    """Raises UsageError for what cannot be asked. Needs no model."""
    switches = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false", param=name)
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, dict):
        message = "chat_template_kwargs must be an object: names of the template's variables, and their values"
        raise UsageError(message, param="chat_template_kwargs")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UsageError("tools must be a list of objects, each {type: function, function: {name, ...}}", param="tools")
    if add_generation_prompt and continue_final_message:
        message = "continue_final_message and add_generation_prompt exclude each other: set one of them to false"
        raise UsageError(message, param="continue_final_message")


def marked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked messages, the last one with the mark at its end. Raises UsageError where that has no text."""
    last = messages[-1]
    if last["content"] is None:
        message = "continue_final_message needs some text in the last message: there is nothing to go on with"
        raise UsageError(message, param="continue_final_message")
    return [*messages[:-1], {**last, "content": last["content"] + MARK}]


def cut(text: str, messages: Sequence[dict[str, Any]]) -> str:
    """A rendering of marked messages, up to the end of the last one's text.

    A template that trims contents has trimmed this one before the mark too. Raises UsageError where it writes the text
    in another way than it stands there.
    """
    at = text.rfind(MARK.rstrip())
    if at < 0 or messages[-1]["content"].strip() not in text:
        message = "the model's chat template changes the last message: it cannot be continued, leave that out"
        raise UsageError(message, param="continue_final_message")
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()

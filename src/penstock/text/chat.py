"""chat: checks a chat's messages and options. The options are named as in vLLM and transformers:

    add_generation_prompt    end the prompt with the header of the assistant's next message
    continue_final_message   end it inside the last message: the answer continues that message
    chat_template_kwargs     further variables of the model's template
    tools                    functions that the template describes to the model, in OpenAI's form

chat_template.py then renders the chat to a prompt, in a sandbox process. A last message that is to
be continued gets a mark at its end, and the rendered text is cut there. Knows no Jinja, no
tokenizer and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import TokenizerError, UsageError

MESSAGE_KEYS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning",
    "reasoning_content",
)
# roles whose messages may lack content
MAY_SAY_NOTHING = (
    "assistant",
    "tool",
)
OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
# the mark has plain letters, which no template filter escapes; its space shows whether the template
# trims texts
MARK = "PENSTOCK_CONTINUES_HERE "


def pick_template(templates: Mapping[str, str], *, tools: bool = False) -> str:
    """Returns the template to use. tools: True if the chat has tools, for which the model's
    template for tools is used if it has one; else its default template. Raises TokenizerError if
    there is none."""
    if tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    names = f" (it has {', '.join(sorted(templates))})" if templates else ""
    raise TokenizerError(
        f"this model has no chat template{names}; use plain prompts (completions), "
        "or name a template's file by chat_template (--chat-template)"
    )


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns the messages normalised, as turns.py expects them; normalised messages are returned
    unchanged. Raises UsageError for a malformed message. Needs no model."""
    return [_check_message(place, message) for place, message in enumerate(_check_list(messages))]


def _check_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of {role, content}", param="messages")
    if not messages:
        raise UsageError("messages is empty; send at least one message", param="messages")
    return messages


def _check_message(place: int, message: Any) -> dict[str, Any]:
    """Returns a message with known keys only. Its content is a text, a list of text parts, or
    missing. place: its index in the chat."""
    where = f"messages[{place}]"
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} must be an object with role and content", param="messages")
    unknown = [
        str(key) for key, value in message.items() if key not in MESSAGE_KEYS and value is not None
    ]
    if unknown:
        raise UsageError(
            f"{where} has a field {unknown[0]!r}; known are {', '.join(MESSAGE_KEYS)}",
            param="messages",
        )
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
        checked["tool_calls"] = [
            _check_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls)
        ]
        if not calls:
            del checked["tool_calls"]
    if "content" in checked:
        checked["content"] = _check_content(where, checked["content"])
    elif role not in MAY_SAY_NOTHING:
        raise UsageError(
            f"{where}.content is missing; give text or a list of text parts", param="messages"
        )
    return checked


def _check_content(where: str, content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(f"{where}.content must be text or a list of text parts", param="messages")
    parts: list[dict[str, Any]] = []
    for at, part in enumerate(content):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            raise UsageError(
                f"{where}.content[{at}] is of type {kind!r}; only text parts are served",
                param="messages",
            )
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _check_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise UsageError(f"{where} must be an object with a function", param="messages")
    return {**call, "function": {**function}}


# --- options of chats


def check_options(
    *,
    add_generation_prompt: Any = True,
    continue_final_message: Any = False,
    chat_template_kwargs: Any = None,
    tools: Any = None,
) -> None:
    """Raises UsageError for invalid options of a chat. Needs no model."""
    switches = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false", param=name)
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, dict):
        message = (
            "chat_template_kwargs must be an object: names of the template's variables, and their"
            " values"
        )
        raise UsageError(message, param="chat_template_kwargs")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise UsageError(
            "tools must be a list of objects, each {type: function, function: {name, ...}}",
            param="tools",
        )
    if add_generation_prompt and continue_final_message:
        message = (
            "continue_final_message and add_generation_prompt exclude each other: set one of them"
            " to false"
        )
        raise UsageError(message, param="continue_final_message")


def marked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with MARK at the end of the last one. The messages are as the template
    expects them (turns.as_read)."""
    last = messages[-1]
    content = last["content"]
    if isinstance(content, list):
        content = [*content[:-1], {"type": "text", "text": _end_of(content) + MARK}]
    else:
        content = _end_of(content) + MARK
    return [*messages[:-1], {**last, "content": content}]


def cut(text: str, messages: Sequence[dict[str, Any]]) -> str:
    """Returns the rendered text cut at MARK, the end of the last message. messages: the messages
    before they were marked.

    If the template trims contents, the text before the mark is trimmed too. Raises UsageError if
    the template changes the last message's text.
    """
    at = text.rfind(MARK.rstrip())
    if at < 0 or _end_of(messages[-1]["content"]).strip() not in text:
        message = (
            "the model's chat template changes the last message: it cannot be continued, leave"
            " that out"
        )
        raise UsageError(message, param="continue_final_message")
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()


def _end_of(content: Any) -> str:
    """Returns the text of a content, or of its last part."""
    if isinstance(content, list):
        return content[-1]["text"] if content else ""
    return content or ""

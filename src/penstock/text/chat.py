"""Chat messages to one prompt text, by the model's own template and nothing else.

Checks the messages, flattens content parts, renders. It knows no tokenizer beyond its templates and special tokens'
texts, and no HTTP. The bounds of a rendering are in `chat_sandbox` and beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import PenstockError, TokenizerError, UsageError

if TYPE_CHECKING:
    import jinja2

    from penstock.text.chat_sandbox import ChatEnvironment

MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
MAX_CHARACTERS = 8_000_000  # of a rendered prompt: about 2 million tokens
MAX_SECONDS = 10.0


class HasTemplates(Protocol):
    """What `render` needs of a tokenizer: templates by name, and the texts of bos_token, eos_token and the like."""

    @property
    def chat_templates(self) -> Mapping[str, str]: ...
    @property
    def special_tokens(self) -> Mapping[str, str]: ...


def render(
    tokenizer: HasTemplates,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_characters: int = MAX_CHARACTERS,
    max_seconds: float = MAX_SECONDS,
) -> str:
    """The prompt text of a conversation. Encode it with add_special_tokens=False: templates write BOS themselves.

    `tools` picks a template named "tool_use" where the model has one; `template_kwargs` are further variables of the
    template. Raises UsageError (messages that are malformed, that the template refuses, or whose text gets too long)
    and TokenizerError (no template, or one that isn't valid).
    """
    source = _pick_template(tokenizer.chat_templates, with_tools=bool(tools))
    checked = check_messages(messages)
    variables: dict[str, Any] = {**tokenizer.special_tokens, **(template_kwargs or {})}
    variables.update(
        messages=checked,
        tools=[dict(tool) for tool in tools] if tools else None,
        documents=variables.get("documents"),
        add_generation_prompt=add_generation_prompt,
    )
    return _run(source, variables, max_characters, max_seconds)


def check_template(tokenizer: HasTemplates) -> None:
    """Raises TokenizerError where no messages at all can be rendered: no template, or one that isn't valid."""
    _compile(_pick_template(tokenizer.chat_templates, with_tools=False))


def _run(source: str, variables: dict[str, Any], characters: int, seconds: float) -> str:
    import jinja2

    from penstock.text.chat_budget import Budget

    environment, template = _compile(source)
    budget = Budget(characters, seconds)
    budget.written(variables)
    try:
        return environment.render(template, variables, budget)
    except PenstockError:
        raise
    except jinja2.TemplateError as error:
        raise _refusal(error, source) from error
    except Exception as error:  # a template is a program: on messages it didn't foresee it fails in any way at all
        # Its kind alone: what it says may hold what a message says.
        message = f"the model's chat template fails on these messages ({type(error).__name__})"
        raise UsageError(message, param="messages") from error


def _refusal(error: jinja2.TemplateError, source: str) -> UsageError:
    """What a template said by raise_exception, or Jinja of a name that isn't there. Words that stand in the template
    are the model's; others may be built of a message, so that the rule is their kind alone."""
    refuses, said = "the model's chat template refuses these messages", str(error)
    kind = f"{refuses} ({type(error).__name__})"
    message = f"{refuses}: {said}" if said else kind
    return UsageError(message, param="messages", rule=message if said in source else kind)


def _pick_template(templates: Mapping[str, str], *, with_tools: bool) -> str:
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    names = f" (it has {', '.join(sorted(templates))})" if templates else ""
    raise TokenizerError(
        f"this model has no chat template{names}; use plain prompts (completions), "
        "or put a chat_template.jinja into its folder"
    )


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[ChatEnvironment, jinja2.Template]:
    """Parsed once a template: some milliseconds each, and Jinja's import (40 ms) only where there is a chat."""
    import jinja2

    from penstock.text.chat_sandbox import ChatEnvironment

    environment = ChatEnvironment()
    try:
        return environment, environment.template(source)
    except (jinja2.TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f" at line {line}" if line else ""
        raise TokenizerError(f"the model's chat template is not valid Jinja{where}: {error}") from error


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as a template gets them. Raises UsageError for a malformed one; needs no model."""
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
    for key in ("name", "tool_call_id", "reasoning_content"):
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

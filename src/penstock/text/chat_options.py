"""What a chat is asked beside its messages, by vLLM's and transformers' names: checked; and a last message continued.

    add_generation_prompt    end the prompt with the header of the assistant's next message
    continue_final_message   end it inside the last message: the answer goes on where that stops
    chat_template_kwargs     further variables of the model's template

It knows no template: a mark stands at the last message's end when it is rendered, and what comes behind it is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import UsageError

OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
MARK = "PENSTOCK_CONTINUES_HERE "  # plain letters, which no filter escapes; the space tells whether ends are trimmed


def check_options(
    *, add_generation_prompt: Any = True, continue_final_message: Any = False, chat_template_kwargs: Any = None
) -> None:
    """Raises UsageError for what cannot be asked. Needs no model."""
    switches = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false", param=name)
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, dict):
        message = "chat_template_kwargs must be an object: names of the template's variables, and their values"
        raise UsageError(message, param="chat_template_kwargs")
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

"""chat_template: renders a chat to one text. Follows Hugging Face's conventions, in Jinja's
immutable sandbox.

A template is a program that comes with a model, and messages come from anyone, so that rendering
may take any memory and time. The process that runs this code has limits (sandbox_process.py), so
none are checked here. Of a tokenizer it knows only the templates and the texts of special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import TokenizerError, UsageError
from penstock.text.chat import check_messages, check_options, cut, marked, pick_template
from penstock.text.template_reads import ASK, find_reads
from penstock.text.turns import Message, Reads, as_read

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Returns the prompt text of a conversation. Encode it with add_special_tokens=False: templates
    write BOS themselves.

    continue_final_message: the text ends with the last message's content, so that the model
    continues it. template_kwargs: further variables of the template. tools: functions the model may
    call, in OpenAI's form.

    Raises UsageError (malformed messages, or the template refuses them or fails) and TokenizerError
    (no template, or an invalid one).
    """
    source = pick_template(tokenizer.chat_templates, tools=bool(tools))
    checked = check_messages(messages)
    check_options(
        add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
    )
    if continue_final_message and "content" not in checked[-1]:
        message = (
            "continue_final_message needs some text in the last message: there is nothing to go on"
            " with"
        )
        raise UsageError(message, param="continue_final_message")
    turns = as_read(checked, _reads_of(source, tuple(tokenizer.special_tokens.items())))
    variables: dict[str, Any] = {**tokenizer.special_tokens, **(template_kwargs or {})}
    variables.update(
        messages=marked(turns) if continue_final_message else turns,
        tools=tools,
        documents=variables.get("documents"),
        add_generation_prompt=add_generation_prompt,
    )
    text = _run(source, variables)
    return cut(text, turns) if continue_final_message else text


@lru_cache(maxsize=16)
def _reads_of(source: str, special_tokens: tuple[tuple[str, str], ...]) -> Reads:
    """Returns how a template expects its messages (turns.Reads), found by test renderings; cached
    per template. Raises TokenizerError for an invalid template."""
    variables: dict[str, Any] = {
        **dict(special_tokens),
        "documents": None,
        "add_generation_prompt": True,
    }

    def run(messages: list[Message]) -> str | None:
        try:
            return _run(source, {**variables, "messages": messages})
        except UsageError:
            return None

    for tools in (
        None,
        [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}],
    ):
        variables["tools"] = tools
        if run([ASK]) is not None:  # a template that is only for tools fails without tools
            break
    return find_reads(run)


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Returns the parsed template; cached. Raises TokenizerError for an invalid template."""
    try:
        return _environment().from_string(source)
    except Exception as error:
        # not only Jinja's errors: it compiles templates to Python, which has limits of its own (20
        # nested loops, long numbers)
        line = getattr(error, "lineno", None) if isinstance(error, jinja2.TemplateError) else None
        where = f" at line {line}" if line else ""
        raise TokenizerError(
            f"the model's chat template is not valid Jinja{where}: {error}"
        ) from error


def _run(source: str, variables: dict[str, Any]) -> str:
    template = compile_template(source)
    try:
        return template.render(variables)
    except jinja2.TemplateError as error:
        raise _refusal(error, source) from error
    except MemoryError:
        raise
    except (
        Exception
        # a template is a program, and may fail in any way on messages that it doesn't expect
    ) as error:
        # Names only the error's type, since its text may contain parts of a message.
        message = f"the model's chat template fails on these messages ({type(error).__name__})"
        raise UsageError(message, param="messages") from error


def _refusal(error: jinja2.TemplateError, source: str) -> UsageError:
    """Returns the error for a template's raise_exception, or for an undefined name. The error's
    rule goes to logs: it repeats a text that stands in the template itself, but only the error's
    type for any other text, which may contain parts of a message."""
    refuses, said = "the model's chat template refuses these messages", str(error)
    kind = f"{refuses} ({type(error).__name__})"
    message = f"{refuses}: {said}" if said else kind
    return UsageError(message, param="messages", rule=message if said in source else kind)


class _GenerationTag(Extension):
    """The Jinja tag {% generation %} ... {% endgeneration %}, which marks the assistant's part for
    training. Only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
        optimized=False,  # no constant folding at compile time, since 10 ** (10 ** 9) is a constant
        # Jinja also folds printed constants, unless `finalize` takes the context
        finalize=_as_it_is,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@jinja2.pass_context
def _as_it_is(_: Any, value: Any) -> Any:
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The template filter `tojson`, as in transformers: unlike Jinja's own, it does not escape
    HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

"""Chat templates, run: the conventions of Hugging Face in Jinja's immutable sandbox, messages in
and one text out.

A template is a program that came with a model, and messages come from anybody: together they may
take any memory and any time. What bounds them is the process that this runs in (`sandbox_process`),
so nothing here counts. It knows no tokenizer beyond its templates and the texts of its special
tokens.
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

    continue_final_message: the text ends where the last message's content does, so that the model
    goes on with it. template_kwargs: further variables of the template. tools: those that may be
    called, in OpenAI's form.

    Raises UsageError (messages that are malformed, or that the template refuses or fails on) and
    TokenizerError (no template, or one that isn't valid).
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
    """Returns how a template reads messages, asked of it once. Raises TokenizerError where it isn't
    valid."""
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
        if run([ASK]) is not None:  # a template of tools alone fails without
            break
    return find_reads(run)


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Returns the template, parsed once. Raises TokenizerError where it isn't valid."""
    try:
        return _environment().from_string(source)
    except Exception as error:
        # Jinja makes Python of it: that has faults of its own (20 nested loops, long numbers)
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
    ) as error:  # a template is a program: on messages it didn't foresee it fails in any way at all
        # Its kind alone: what it says may hold what a message says.
        message = f"the model's chat template fails on these messages ({type(error).__name__})"
        raise UsageError(message, param="messages") from error


def _refusal(error: jinja2.TemplateError, source: str) -> UsageError:
    """What a template said by raise_exception, or Jinja of a name that isn't there. Words that
    stand in the template are the model's; others may be built of a message, so that the rule is
    their kind alone."""
    refuses, said = "the model's chat template refuses these messages", str(error)
    kind = f"{refuses} ({type(error).__name__})"
    message = f"{refuses}: {said}" if said else kind
    return UsageError(message, param="messages", rule=message if said in source else kind)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's part for training; here its
    body alone counts."""

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
        optimized=False,  # no constant is worked out while it compiles, for 10 ** (10 ** 9) is one;
        # nor one that is put out, which Jinja does unless this asks for the context
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
    """As transformers': no HTML in it is escaped, as Jinja's own would be."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

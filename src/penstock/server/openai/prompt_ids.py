"""Turns a body's prompts into token ids. The prompts are texts, ids or chats. Chats, long texts and
many texts go to the sandbox; many ids are checked in several turns of the event loop. Knows body
structs, the tokenizer and the model's sizes; no sampling."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from penstock.errors import ContextLengthError, TokenizerError, UsageError, too_long
from penstock.sandbox.sandbox_process import ChatJob, Job, Reply, TextJob
from penstock.server.openai.checked_forms import CheckedForms
from penstock.server.openai.forms import BaseForm, ChatForm, CompletionForm
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import USUAL
from penstock.server.openai.message_forms import Message
from penstock.server.openai.tool_forms import Json
from penstock.text.chat import pick_template
from penstock.text.parsers.parser_registry import NO_PARSERS, AnswerParsers

if TYPE_CHECKING:
    from penstock.engine.build_engine import EngineFacts
    from penstock.request import StopWhen
    from penstock.text.tokenizer import Tokenizer

LONG_TEXT = 4_096  # characters above which a text is tokenized in the sandbox; about 2 ms of work
A_TEXT = 64  # characters that each text counts as in addition to its length
ENDING = 1_024  # number of last characters of a rendered chat, which show how its answer begins
# messages, calls and tools of a chat above which a thread prepares its sandbox job
MANY_PARTS = 256
# characters of several texts that make up one sandbox job; other jobs run in between
A_JOB = 262_144

Result = TypeVar("Result")
# function that runs jobs in a sandbox until they are done or the client leaves
Sandboxed = Callable[[Sequence[Job]], Awaitable[list[Reply]]]


class Aside(Protocol):
    """Function that runs work in a thread instead of the event loop."""

    def __call__(self, work: Callable[[], Result], /) -> Awaitable[Result]: ...


@dataclass(frozen=True, slots=True)
class PromptTools:
    """Functions and settings that turn bodies into calls. facts: the model's sizes and defaults.
    check_pattern: checks a pattern of stop_when. turn_ids: token ids checked in one turn of the
    event loop. parsers: parsers for tool calls and reasoning in answers of chats. forms: cache of
    answer formats known to be valid."""

    facts: EngineFacts
    tokenizer: Tokenizer | None
    sandboxed: Sandboxed
    aside: Aside
    check_pattern: Callable[[str], Awaitable[None]]
    turn_ids: int = USUAL.turn_ids
    parsers: AnswerParsers = NO_PARSERS
    forms: CheckedForms = field(default_factory=CheckedForms)


@dataclass(slots=True)
class TokenizedPrompt:
    """A prompt as token ids. text: the prompt as the client sent it, if it was a text and nothing
    was cut off. ending: the end of a rendered chat."""

    ids: list[int]
    text: str | None = None
    ending: str = ""


async def check_stop_when(stop_when: StopWhen | None, tools: PromptTools) -> None:
    """Raises HttpError for a stop_when pattern that cannot be served. Called before any prompt is
    tokenized."""
    if stop_when is None:
        return
    try:
        await tools.check_pattern(stop_when.pattern)
    except UsageError as error:
        raise HttpError(error.rule, param=error.param) from error


async def completion_prompts(
    prompt: str | list[Any], form: CompletionForm, tools: PromptTools
) -> list[TokenizedPrompt]:
    """Tokenizes `prompt`, which counts instead of form.prompt. Raises HttpError,
    ContextLengthError."""
    if isinstance(prompt, str):
        return await _text_prompts([prompt], form, tools)
    if not prompt:
        raise HttpError("prompt is an empty list: give at least one prompt", param="prompt")
    if type(prompt[0]) is int:
        return await _id_prompts([prompt], form, tools)
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return await _text_prompts(prompt, form, tools)
    if kinds == {list}:
        return await _id_prompts(prompt, form, tools)
    raise HttpError(
        "prompt must be text, a list of texts, token ids, or a list of token-id lists",
        param="prompt",
    )


async def _text_prompts(
    texts: list[str], form: CompletionForm, tools: PromptTools
) -> list[TokenizedPrompt]:
    tokenizer = tools.tokenizer
    if tokenizer is None:
        raise HttpError("this server has no tokenizer: send token ids as prompt", param="prompt")
    special, keep = form.add_special_tokens is not False, _kept(form)
    _check_characters(max(map(len, texts)), form, tools.facts, tokenizer)
    if sum(map(len, texts)) + A_TEXT * len(texts) <= LONG_TEXT:
        batch = tokenizer.encode_batch(texts, add_special_tokens=special)
    else:
        done = await _done([TextJob(part, special, keep) for part in _parts(texts)], form, tools)
        batch = [ids for part in done for ids in part.ids]
    if not all(batch):
        raise HttpError("a prompt is empty: give it at least one token", param="prompt")
    return [_cut(TokenizedPrompt(ids, text), form) for ids, text in zip(batch, texts, strict=True)]


def _parts(texts: list[str]) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > A_JOB:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    yield part


async def _done(jobs: Sequence[Job], form: BaseForm, tools: PromptTools) -> list[Reply]:
    try:
        return await tools.sandboxed(jobs)
    except HttpError:  # an error of the sandbox (a timeout, say), not of the text
        raise
    except TokenizerError as error:
        # the model has no valid chat template, so the request gets status 400
        raise HttpError(str(error), param=_param(form)) from error
    except ContextLengthError as error:
        raise ContextLengthError(str(error), param=_param(form)) from error
    except UsageError as error:
        raise HttpError(
            error.rule, param=_param(form) if error.param == "prompt" else error.param
        ) from error


async def _id_prompts(
    prompts: list[list[Any]], form: CompletionForm, tools: PromptTools
) -> list[TokenizedPrompt]:
    """Checks prompts of token ids. Skips ids that are cut off. Raises HttpError, and
    ContextLengthError before it checks a too long prompt's ids."""
    keep = _kept(form)
    for ids in prompts:
        check_length(len(ids) if keep is None else min(len(ids), keep), form, tools.facts)
    found, looked = [], 0
    for ids in prompts:
        found.append(_id_prompt(ids if keep is None else ids[-keep:], tools.facts))
        looked += len(found[-1].ids)
        if looked > tools.turn_ids:
            await asyncio.sleep(0)
            looked = 0
    return found


def _id_prompt(ids: Sequence[Any], facts: EngineFacts) -> TokenizedPrompt:
    if not ids:
        raise HttpError("a prompt is empty: give it at least one token", param="prompt")
    if set(map(type, ids)) != {int}:
        raise HttpError(
            "a list of token ids holds something that is no whole number", param="prompt"
        )
    check_id(min(ids), facts.vocab_size, "prompt")
    check_id(max(ids), facts.vocab_size, "prompt")
    return TokenizedPrompt(list(ids))


def _kept(form: BaseForm) -> int | None:
    """Returns how many of a prompt's last tokens to keep (truncate_prompt_tokens); None: all.
    Raises HttpError."""
    keep = form.truncate_prompt_tokens
    if keep is not None and keep < 1:
        raise HttpError("truncate_prompt_tokens must be at least 1", param="truncate_prompt_tokens")
    return keep


def _cut(prompt: TokenizedPrompt, form: BaseForm) -> TokenizedPrompt:
    keep = _kept(form)
    return (
        prompt if keep is None or len(prompt.ids) <= keep else TokenizedPrompt(prompt.ids[-keep:])
    )


async def chat_prompt(form: ChatForm, tools: PromptTools) -> TokenizedPrompt:
    """Renders a chat by the model's template and tokenizes it. Raises HttpError,
    ContextLengthError."""
    if tools.tokenizer is None:
        raise HttpError(
            "chat needs a tokenizer, and this server has none: send token ids to completions"
        )
    _check_characters(
        sum(message.size for message in form.messages), form, tools.facts, tools.tokenizer
    )
    kwargs = _template_kwargs(form, tools.tokenizer)

    def job_of() -> ChatJob:
        return ChatJob(
            messages=plain_messages(form),
            add_generation_prompt=form.add_generation_prompt,
            continue_final_message=form.continue_final_message,
            template_kwargs=kwargs,
            tools=[each.tool.told() for each in form.tools] if form.tools else None,
            add_special_tokens=bool(form.add_special_tokens),
            keep=_kept(form),
        )

    parts = (
        len(form.messages)
        + sum(len(each.tool_calls or ()) for each in form.messages)
        + len(form.tools or ())
    )
    job = job_of() if parts <= MANY_PARTS else await tools.aside(job_of)
    (done,) = await _done([job], form, tools)
    if not done.ids[0]:
        raise HttpError(
            "these messages make an empty prompt: put some text in them", param="messages"
        )
    prompt = _cut(TokenizedPrompt(done.ids[0]), form)
    prompt.ending = form.messages[-1].text if form.continue_final_message else done.text[-ENDING:]
    return prompt


def _template_kwargs(form: ChatForm, tokenizer: Tokenizer) -> Json | None:
    """Returns chat_template_kwargs with reasoning_effort added. Raises HttpError if the template
    doesn't use reasoning_effort."""
    effort, given = form.reasoning_effort, form.chat_template_kwargs
    if effort is None:
        return given
    template = template_of(form, tokenizer)
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort, **(given or {})}
    if effort == "none" and "enable_thinking" in template:
        return {"enable_thinking": False, **(given or {})}
    message = (
        "reasoning_effort with this value is not read by the model's chat template: leave it out"
    )
    raise HttpError(message, param="reasoning_effort", code="unsupported_parameter")


def template_of(form: ChatForm, tokenizer: Tokenizer) -> str:
    """Returns the template that renders a chat. Raises HttpError if the model has none."""
    try:
        return pick_template(tokenizer.chat_templates, tools=bool(form.tools))
    except TokenizerError as error:
        raise HttpError(str(error), param=_param(form)) from error


def _check_characters(size: int, form: BaseForm, facts: EngineFacts, tokenizer: Tokenizer) -> None:
    """Raises ContextLengthError if a text of `size` characters can't fit into the context, unless
    truncate_prompt_tokens cuts it."""
    most = facts.max_model_len * tokenizer.longest
    if form.truncate_prompt_tokens is None and size > most:
        raise ContextLengthError(
            f"{too_long(facts.max_model_len)}, {size} characters: shorten it, or cut it with"
            " truncate_prompt_tokens",
            param=_param(form),
        )


def _param(form: BaseForm) -> str:
    return "prompt" if isinstance(form, CompletionForm) else "messages"


def check_length(size: int, form: BaseForm, facts: EngineFacts) -> None:
    """Raises ContextLengthError for a prompt of `size` tokens that leaves no room for an output
    token."""
    if size >= facts.max_model_len:
        raise ContextLengthError(
            f"{too_long(facts.max_model_len)}, {size} tokens, and one at least is to be made: "
            "shorten it, or cut it with truncate_prompt_tokens",
            param=_param(form),
        )


def check_id(token: int, vocab_size: int, param: str) -> None:
    """Raises HttpError for a token id outside the vocabulary. param: the body's field."""
    if not 0 <= token < vocab_size:
        message = (
            f"{param} has a token id outside the vocabulary: ids go from 0 to {vocab_size - 1}"
        )
        raise HttpError(message, param=param)


def plain_messages(form: ChatForm) -> list[Json]:
    """Returns a chat's messages as the dicts that text.chat checks."""
    return [_plain(message) for message in form.messages]


def _plain(message: Message) -> Json:
    fields = {
        "role": message.role,
        "content": msgspec.to_builtins(message.content),
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning": message.thought,
    }
    told: Json = {name: value for name, value in fields.items() if value is not None}
    if message.tool_calls:
        told["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": msgspec.to_builtins(call.function)}
            for call in message.tool_calls
        ]
    return told

"""Bodies to requests: the prompts' ids and the SamplingParams of a form.

A call holds everything that the answer needs to know of what was asked. It knows forms, the tokenizer and the model's
facts; it submits nothing and builds no answer. Long texts, and many, are rendered and tokenised in a thread, off the
event loop; many ids are looked at in turns of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.errors import ContextLengthError, TokenizerError, UsageError
from penstock.request import MAX_SALT, MAX_SAMPLES, SamplingParams
from penstock.server.forms import ChatForm, CompletionForm, Form, prompts_in
from penstock.server.refusals import HttpError
from penstock.text.chat import render

if TYPE_CHECKING:
    from penstock.engine.open import EngineFacts
    from penstock.text.tokenizer import Tokenizer

MAX_CHOICES = 65_536  # prompts x n of one body
LONGEST_TIMEOUT = 7 * 24 * 3600  # seconds
MAX_STOPS = 1_024  # stop strings, and stop ids
MAX_STOP_LENGTH = 1_024  # characters
MAX_SALT_LENGTH = 1_024  # characters
LONG_TEXT = 4_096  # characters; about 2 ms of tokenising
A_TEXT = 64  # characters that a text or a message costs as much as, however short it is
TURN = 32_768  # token ids that are looked at in one turn of the loop; about 3 ms
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
# Fields of a form that go into SamplingParams under their own name.
_SAMPLING = [knob.name for knob in fields(SamplingParams) if knob.name in set(Form.__struct_fields__) - {"logit_bias"}]

Result = TypeVar("Result")


class Aside(Protocol):
    """Does long work off the loop."""

    def __call__(self, work: Callable[[], Result], /) -> Awaitable[Result]: ...


@dataclass(slots=True)
class Prompt:
    """`text` is what was sent, where it was text and none of it was cut off."""

    ids: list[int]
    text: str | None = None


@dataclass(slots=True, kw_only=True)
class Call:
    """One body, ready for the engine, and how its answer is to look.

    echo: the prompt stands before the text.             only_prompt: max_tokens 0 with echo; the one token is dropped.
    logprobs: how many, or None.                         prompt_logprobs: asked for by name, beside those of echo.
    """

    prompts: list[Prompt]
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    echo: bool = False
    only_prompt: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    timeout: float | None = None  # seconds from the body to the answer's end
    tenant: int = 0  # whose it is, for the engine's line
    salt: int = 0  # whose cached blocks it shares

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.sampling.n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


def size_of(form: CompletionForm | ChatForm) -> tuple[int, int]:
    """Choices that a form asks for, and about how many prompt tokens it has: for the queue, before anything is checked
    or tokenised. Four characters are a token, about, in any language that has words."""
    n = form.n if form.n is not None and 1 <= form.n <= MAX_SAMPLES else 1
    if isinstance(form, ChatForm):
        return n, sum(1 + len(message.text) // 4 for message in form.messages)
    prompt = form.prompt
    if isinstance(prompt, str):
        return n, 1 + len(prompt) // 4
    if not prompt or type(prompt[0]) is int:
        return n, 1 + len(prompt)
    sizes = [
        1 + len(part) // 4 if isinstance(part, str) else len(part) for part in prompt if isinstance(part, str | list)
    ]
    return min(n * len(prompt), MAX_CHOICES), 1 + sum(sizes)


async def completion_call(
    form: CompletionForm, facts: EngineFacts, tokenizer: Tokenizer | None, aside: Aside = asyncio.to_thread
) -> Call:
    """Raises UsageError."""
    only_prompt = form.echo and form.max_tokens == 0
    if form.echo and tokenizer is None:
        raise HttpError("echo needs text, and this server has no tokenizer: leave it out", param="echo")
    given = _completion_sampling(form, facts, detokenize=tokenizer is not None)
    if prompts_in(form.prompt) * given.n > MAX_CHOICES:
        message = f"prompts x n is above {MAX_CHOICES} choices a body: send several bodies"
        raise HttpError(message, param="n")
    prompts = await _completion_prompts(form, facts, tokenizer, aside)
    call = _call(form, given, prompts, facts)
    call.echo, call.only_prompt = form.echo, only_prompt
    return call


async def chat_call(
    form: ChatForm, facts: EngineFacts, tokenizer: Tokenizer | None, aside: Aside = asyncio.to_thread
) -> Call:
    """Raises UsageError."""
    if tokenizer is None:
        raise HttpError("chat needs a tokenizer, and this server has none: send token ids to completions")
    given = _chat_sampling(form, facts)
    messages = [_plain(message.role, message.text, message.name) for message in form.messages]

    def prompt_ids() -> list[int]:
        text = _render(tokenizer, messages, form)
        return tokenizer.encode(text, add_special_tokens=bool(form.add_special_tokens))

    long = _long([message["content"] for message in messages]) or form.chat_template_kwargs is not None
    ids = await aside(prompt_ids) if long else prompt_ids()
    if not ids:
        raise HttpError("these messages make an empty prompt: put some text in them", param="messages")
    return _call(form, given, [_cut(Prompt(ids), form)], facts)


def check_sampling(form: CompletionForm | ChatForm, facts: EngineFacts) -> None:
    """What can be said of a form's sampling before its prompt is read. Raises UsageError."""
    if isinstance(form, CompletionForm):
        _completion_sampling(form, facts, detokenize=True)
    else:
        _chat_sampling(form, facts)


def _completion_sampling(form: CompletionForm, facts: EngineFacts, *, detokenize: bool) -> SamplingParams:
    if form.echo and form.max_tokens == 0:  # only the prompt is wanted; the engine makes one token at least
        form.max_tokens = 1
    given = sampling_of(form, facts, {"max_tokens": 16, "logprobs": form.logprobs, "detokenize": detokenize})
    if form.echo and form.logprobs is not None:  # the prompt's own tokens are listed too
        given.prompt_logprobs = max(form.logprobs, form.prompt_logprobs or 0)
    return given


def _chat_sampling(form: ChatForm, facts: EngineFacts) -> SamplingParams:
    if form.max_completion_tokens is not None:
        form.max_tokens = form.max_completion_tokens
    logprobs = (form.top_logprobs or 0) if form.logprobs else None
    return sampling_of(form, facts, {"max_tokens": facts.sampling_defaults.get("max_tokens"), "logprobs": logprobs})


def sampling_of(form: Form, facts: EngineFacts, more: dict[str, Any]) -> SamplingParams:
    """The model's defaults, then the route's (`more`), then the form's fields, checked. Values that the model's size
    bounds anyway are cut to it, so that nothing larger crosses the channel."""
    _check_sizes(form, facts.vocab_size)
    knobs: dict[str, Any] = {**facts.sampling_defaults, **more}
    for name in _SAMPLING:
        value = getattr(form, name)
        if value is not None:
            knobs[name] = value
    if form.logit_bias is not None:
        knobs["logit_bias"] = _bias(form.logit_bias, facts.vocab_size)
    if knobs["max_tokens"] is not None:
        knobs["max_tokens"] = min(knobs["max_tokens"], facts.max_model_len)
    if knobs.get("min_tokens", 0) >= facts.max_model_len:
        message = f"min_tokens must be below the context of {facts.max_model_len} tokens: lower it"
        raise HttpError(message, param="min_tokens")
    if knobs.get("top_k", 0) > facts.vocab_size:
        knobs["top_k"] = 0
    for token in knobs.get("stop_token_ids") or ():
        _check_id(token, facts.vocab_size, "stop_token_ids")
    try:
        return SamplingParams(**knobs)
    except UsageError as error:
        raise HttpError(error.rule, param=error.param) from error


def _check_sizes(form: Form, vocab_size: int) -> None:
    """What the body's own limit leaves room for, and no answer needs."""
    stops = [form.stop] if isinstance(form.stop, str) else form.stop or []
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        message = f"stop holds at most {MAX_STOPS} strings of {MAX_STOP_LENGTH} characters: send fewer"
        raise HttpError(message, param="stop")
    if form.stop_token_ids is not None and len(form.stop_token_ids) > MAX_STOPS:
        raise HttpError(f"stop_token_ids holds at most {MAX_STOPS} ids: send fewer", param="stop_token_ids")
    if form.logit_bias is not None and len(form.logit_bias) > vocab_size:
        raise HttpError("logit_bias names more ids than the vocabulary has: name each once", param="logit_bias")


def _call(form: CompletionForm | ChatForm, sampling: SamplingParams, prompts: list[Prompt], facts: EngineFacts) -> Call:
    if form.stream and form.prompt_logprobs is not None:
        raise HttpError("prompt_logprobs are not streamed: leave stream out", param="prompt_logprobs")
    if form.timeout is not None and not 0 < form.timeout <= LONGEST_TIMEOUT:
        raise HttpError(f"timeout must be above 0 and at most {LONGEST_TIMEOUT} seconds", param="timeout")
    for prompt in prompts:
        _check_length(len(prompt.ids), form, facts)
    return Call(
        prompts=prompts,
        sampling=sampling,
        stream=form.stream,
        include_usage=form.stream_options is not None and form.stream_options.include_usage,
        logprobs=sampling.logprobs,
        prompt_logprobs=form.prompt_logprobs,
        return_token_ids=form.return_token_ids,
        tokens_as_ids=form.return_tokens_as_token_ids or not sampling.detokenize,
        timeout=form.timeout,
        salt=_salt(form.cache_salt),
    )


def _check_length(size: int, form: Form, facts: EngineFacts) -> None:
    if size >= facts.max_model_len:
        raise ContextLengthError(
            f"a prompt has {size} tokens and the context {facts.max_model_len}, with room for one at least to be made: "
            "shorten it, or cut it with truncate_prompt_tokens",
            param="prompt" if isinstance(form, CompletionForm) else "messages",
        )


async def _completion_prompts(
    form: CompletionForm, facts: EngineFacts, tokenizer: Tokenizer | None, aside: Aside
) -> list[Prompt]:
    prompt = form.prompt
    if isinstance(prompt, str):
        return await _text_prompts([prompt], form, tokenizer, aside)
    if not prompt:
        raise HttpError("prompt is an empty list: give at least one prompt", param="prompt")
    if type(prompt[0]) is int:
        return await _id_prompts([prompt], form, facts)
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return await _text_prompts(prompt, form, tokenizer, aside)
    if kinds == {list}:
        return await _id_prompts(prompt, form, facts)
    raise HttpError("prompt must be text, a list of texts, token ids, or a list of token-id lists", param="prompt")


async def _text_prompts(
    texts: list[str], form: CompletionForm, tokenizer: Tokenizer | None, aside: Aside
) -> list[Prompt]:
    if tokenizer is None:
        raise HttpError("this server has no tokenizer: send token ids as prompt", param="prompt")
    special = form.add_special_tokens is not False

    def encode() -> list[list[int]]:
        return tokenizer.encode_batch(texts, add_special_tokens=special)

    batch = await aside(encode) if _long(texts) else encode()
    if not all(batch):
        raise HttpError("a prompt is empty: give it at least one token", param="prompt")
    return [_cut(Prompt(ids, text), form) for ids, text in zip(batch, texts, strict=True)]


async def _id_prompts(prompts: list[list[Any]], form: CompletionForm, facts: EngineFacts) -> list[Prompt]:
    """Of what is too long, and of what is cut off, no id is looked at."""
    keep = _kept(form)
    for ids in prompts:
        _check_length(len(ids) if keep is None else min(len(ids), keep), form, facts)
    found, looked = [], 0
    for ids in prompts:
        found.append(_id_prompt(ids if keep is None else ids[-keep:], facts))
        looked += len(found[-1].ids)
        if looked > TURN:
            await asyncio.sleep(0)
            looked = 0
    return found


def _id_prompt(ids: Sequence[Any], facts: EngineFacts) -> Prompt:
    if not ids:
        raise HttpError("a prompt is empty: give it at least one token", param="prompt")
    if set(map(type, ids)) != {int}:
        raise HttpError("a list of token ids holds something that is no whole number", param="prompt")
    _check_id(min(ids), facts.vocab_size, "prompt")
    _check_id(max(ids), facts.vocab_size, "prompt")
    return Prompt(list(ids))


def _kept(form: Form) -> int | None:
    """How many tokens of a prompt are kept at most, the last ones; None: all."""
    keep = form.truncate_prompt_tokens
    if keep is not None and keep < 1:
        raise HttpError("truncate_prompt_tokens must be at least 1", param="truncate_prompt_tokens")
    return keep


def _cut(prompt: Prompt, form: Form) -> Prompt:
    keep = _kept(form)
    return prompt if keep is None or len(prompt.ids) <= keep else Prompt(prompt.ids[-keep:])


def _check_id(token: int, vocab_size: int, param: str) -> None:
    if not 0 <= token < vocab_size:
        message = f"{param} has a token id outside the vocabulary: ids go from 0 to {vocab_size - 1}"
        raise HttpError(message, param=param)


def _bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in bias.items():
        if _TOKEN_ID.fullmatch(key) is None:
            raise HttpError("logit_bias has a key that is no token id", param="logit_bias")
        _check_id(int(key), vocab_size, "logit_bias")
        out[int(key)] = value
    return out


def _salt(text: str | None) -> int:
    """The engine's number of a salt: two texts have one by an accident of 1 in 2^62."""
    if text is None:
        return 0
    if not 0 < len(text) <= MAX_SALT_LENGTH:
        raise HttpError(f"cache_salt must be 1 to {MAX_SALT_LENGTH} characters, or left out", param="cache_salt")
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % MAX_SALT


def _plain(role: str, content: str, name: str | None) -> dict[str, str]:
    message = {"role": role, "content": content}
    if name is not None:
        message["name"] = name
    return message


def _render(tokenizer: Tokenizer, messages: list[dict[str, str]], form: ChatForm) -> str:
    try:
        return render(
            tokenizer,
            messages,
            add_generation_prompt=form.add_generation_prompt,
            template_kwargs=form.chat_template_kwargs,
        )
    except TokenizerError as error:  # no template in this model: asking it to chat is the fault
        raise HttpError(str(error), param="messages") from error
    except UsageError as error:
        raise HttpError(error.rule, param=error.param) from error


def _long(texts: Sequence[str]) -> bool:
    """Whether it takes longer to tokenise these than others' streams can wait."""
    return sum(map(len, texts)) + A_TEXT * len(texts) > LONG_TEXT

"""Translates body structs into calls. A call holds the SamplingParams, the prompts (prompt_ids.py),
and the settings that the answer needs. Knows forms (forms.py) and the model's sizes and defaults;
submits nothing and builds no answer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.errors import UsageError
from penstock.request import MAX_SALT, MAX_SAMPLES, SamplingParams
from penstock.server.openai.answer_forms import (
    STRUCTURED,
    check_form,
    field_of,
    renamed,
    structured,
)
from penstock.server.openai.answer_reading import AnswerReading, MakeReader, check_auto
from penstock.server.openai.forms import (
    BaseForm,
    ChatForm,
    CompletionForm,
    StreamOptions,
    prompts_in,
)
from penstock.server.openai.generate_form import TokensForm
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.prompt_ids import (
    PromptTools,
    TokenizedPrompt,
    chat_prompt,
    check_id,
    check_length,
    check_stop_when,
    completion_prompts,
)
from penstock.server.openai.responses_forms import ResponsesChat
from penstock.server.openai.scoring_forms import ScoringBody, ScoringForm, scoring_prompts
from penstock.server.openai.tool_forms import Json
from penstock.text.bad_words import bad_word_ids

if TYPE_CHECKING:
    from penstock.engine.build_engine import EngineFacts

MAX_CHOICES = 65_536  # most choices (prompts times n) of one body
LONGEST_TIMEOUT = 7 * 24 * 3600  # most seconds of a request's `timeout`
MAX_STOP_TOKENS = 1_024  # most ids in stop_token_ids
MAX_SALT_LENGTH = 1_024  # most characters of a cache_salt
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
# fields of a form that have the same name in SamplingParams
_SAMPLING = [
    knob.name
    for knob in fields(SamplingParams)
    if knob.name
    in set(BaseForm.__struct_fields__) - {"logit_bias", "structured_outputs", "stop_when"}
]


class SamplingFacts(Protocol):
    """A model's limits and defaults of sampling parameters. EngineFacts has them; checks without an
    engine use others."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def sampling_defaults(self) -> Mapping[str, float | int]: ...


@dataclass(frozen=True, slots=True)
class TokensOnly:
    """Settings of an answer without text. request_id: the client's id for the answer. columns:
    True: logprobs in columns."""

    request_id: str | None
    columns: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One body, ready for the engine, and the settings of its answer.

    echo: put the prompt before the text. only_prompt: True for max_tokens 0 with echo, so that the
    one sampled token is dropped. logprobs: number of likely tokens per token, or None.
    prompt_logprobs: the body's prompt_logprobs; echo may need other logprobs of the prompt too.
    include_usage: send a last event with the token counts. continuous_usage: send the counts in
    every event too.
    """

    prompts: list[TokenizedPrompt]
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    chat: bool = False
    # True if samples are new messages, and don't continue the prompt's text or last message
    answers: bool = False
    continuous_usage: bool = False
    echo: bool = False
    only_prompt: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    timeout: float | None = None  # seconds from the body to the end of the answer
    # number of the API key, by which the engine's scheduler shares time between keys
    tenant: int = 0
    salt: int = 0  # number of the cache_salt; only requests with the same one share cached blocks
    # function that makes the parser of one answer; None: all text is content
    reader: MakeReader | None = None
    include_reasoning: bool = True
    # set only for /inference/v1/generate, whose answers have no text
    tokens_only: TokensOnly | None = None
    scoring: ScoringBody | None = None  # set only for /generative_scoring, which returns no text
    form_field: str = STRUCTURED  # field of the body that the answer format came from
    asked: Json | None = None  # fields of the body that the answer of /v1/responses repeats

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.sampling.n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def size(self) -> int:
        """Number of tokens that count against the request limits."""
        sampling = self.sampling
        form = (
            0
            if sampling.structured_outputs is None
            else len(self.prompts) * (sampling.structured_outputs.size // 4)
        )
        return (
            self.prompt_tokens
            + form
            + len(sampling.logit_bias or ())
            + len(sampling.allowed_token_ids or ())
        )


def size_of(form: CompletionForm | ChatForm) -> tuple[int, int]:
    """Returns a body's number of choices and an estimate of its prompt tokens, before anything is
    checked or tokenized. Four characters count as a token, which is about right for most languages.
    An entry of logit_bias or allowed_token_ids counts as a token too."""
    choices, tokens = _prompts_size(form)
    return choices, tokens + len(form.logit_bias or ()) + len(form.allowed_token_ids or ())


def _prompts_size(form: CompletionForm | ChatForm) -> tuple[int, int]:
    n = form.n if form.n is not None and 1 <= form.n <= MAX_SAMPLES else 1
    if isinstance(form, ChatForm):
        return n, sum(1 + message.size // 4 for message in form.messages) + _tools_size(form) // 4
    prompt = form.prompt
    if isinstance(prompt, str):
        return n, 1 + len(prompt) // 4
    if not prompt or type(prompt[0]) is int:
        return n, 1 + len(prompt)
    sizes = [
        1 + len(part) // 4 if isinstance(part, str) else len(part)
        for part in prompt
        if isinstance(part, str | list)
    ]
    return min(n * len(prompt), MAX_CHOICES), 1 + sum(sizes)


def _tools_size(form: ChatForm) -> int:
    """Returns the approximate number of characters of a chat's tools."""
    return len(msgspec.json.encode(form.tools)) if form.tools else 0


async def make_call(form: CompletionForm | ChatForm, tools: PromptTools, tenant: int = 0) -> Call:
    """Turns a body's struct into a call. tenant: number of the API key. Raises UsageError."""
    if isinstance(form, ScoringForm):
        prompts = await scoring_prompts(form, tools)
        params = await completion_params(form, tools)
        return params.call(prompts, tools.facts, tenant)
    if isinstance(form, CompletionForm):
        params = await completion_params(form, tools)
        prompts = await completion_prompts(form.prompt, form, tools)
        return params.call(prompts, tools.facts, tenant)
    check_auto(form, tools.parsers)
    given = _chat_sampling(form, tools.facts)
    await check_stop_when(given.stop_when, tools)
    prompts = [await chat_prompt(form, tools)]
    reading = AnswerReading(form, given, prompts[0], tools)
    form_field = field_of(form, of_tools=form.must_call or given.structured_outputs is None)
    try:
        given = reading.held()
    except UsageError as error:
        raise renamed(error, form_field) from error
    await _check_texts(given, tools)
    await check_form(given, tools, form_field)
    return _call(
        form,
        given,
        prompts,
        tools.facts,
        tenant=tenant,
        form_field=form_field,
        answers=not form.continue_final_message,
        reader=reading.reader,
        include_reasoning=form.include_reasoning,
        asked=form.asked if isinstance(form, ResponsesChat) else None,
    )


@dataclass(frozen=True, slots=True)
class CompletionParams:
    """The part of a completion that doesn't depend on its prompt, so that many prompts can share
    it."""

    form: CompletionForm
    sampling: SamplingParams
    only_prompt: bool

    def call(self, prompts: list[TokenizedPrompt], facts: EngineFacts, tenant: int = 0) -> Call:
        """Returns the call of the engine for these prompts. Raises ContextLengthError."""
        form = self.form
        tokens_only = None
        if isinstance(form, TokensForm):
            tokens_only = TokensOnly(form.request_id, form.columns)
        return _call(
            form,
            self.sampling,
            prompts,
            facts,
            tenant=tenant,
            form_field=field_of(form),
            echo=form.echo,
            only_prompt=self.only_prompt,
            tokens_only=tokens_only,
            scoring=form.body if isinstance(form, ScoringForm) else None,
        )


async def completion_params(
    form: CompletionForm, tools: PromptTools, *, shown: bool = True
) -> CompletionParams:
    """Checks a completion's fields and returns its parameters. shown: True if the answer holds
    text. Raises UsageError. Of the prompts only the number is checked."""
    only_prompt, text = form.echo and form.max_tokens == 0, tools.tokenizer is not None
    if form.echo and not text:
        raise HttpError(
            "echo needs text, and this server has no tokenizer: leave it out", param="echo"
        )
    shown = shown and not isinstance(form, TokensForm)
    given = _completion_sampling(form, tools.facts, detokenize=text, shown=shown)
    if prompts_in(form.prompt) * given.n > MAX_CHOICES:
        message = f"prompts x n is above {MAX_CHOICES} choices a body: send several bodies"
        raise HttpError(message, param="n")
    await check_stop_when(given.stop_when, tools)
    await _check_texts(given, tools)
    await check_form(given, tools, field_of(form))
    return CompletionParams(form, given, only_prompt)


def read_sampling(form: CompletionForm | ChatForm, facts: SamplingFacts) -> SamplingParams:
    """Returns the sampling parameters of a body before its prompt is tokenized.
    Raises UsageError."""
    if isinstance(form, CompletionForm):
        return _completion_sampling(form, facts)
    return _chat_sampling(form, facts)


def _completion_sampling(
    form: CompletionForm, facts: SamplingFacts, *, detokenize: bool = True, shown: bool = True
) -> SamplingParams:
    usual = {"max_tokens": 16, "logprobs": form.logprobs, "detokenize": detokenize}
    fixed = {}
    if form.echo and form.max_tokens == 0:
        fixed["max_tokens"] = 1  # the engine makes one token at least
    if form.echo and form.logprobs is not None:  # the prompt's tokens get logprobs too
        fixed["prompt_logprobs"] = max(form.logprobs, form.prompt_logprobs or 0)
    return sampling_of(form, facts, usual, fixed, shown=shown)


def _chat_sampling(form: ChatForm, facts: SamplingFacts) -> SamplingParams:
    logprobs = (form.top_logprobs or 0) if form.logprobs else None
    usual = {"max_tokens": facts.sampling_defaults.get("max_tokens"), "logprobs": logprobs}
    most = form.max_completion_tokens
    return sampling_of(form, facts, usual, {} if most is None else {"max_tokens": most})


def sampling_of(
    form: BaseForm,
    facts: SamplingFacts,
    usual: dict[str, Any],
    fixed: Mapping[str, Any],
    *,
    shown: bool = True,
) -> SamplingParams:
    """Returns checked sampling parameters. A value comes from `fixed`, else from the form's fields,
    else from the route's defaults (`usual`), else from the model's. Values that the model's size
    limits anyway are cut to it, so that messages to the engine stay small. shown: False if the
    answer has no text; then none is made, unless a stop string or an answer format needs it."""
    _check_asked(form)
    _check_sizes(form, facts.vocab_size)
    knobs: dict[str, Any] = {**facts.sampling_defaults, **usual}
    for name in _SAMPLING:
        value = getattr(form, name)
        if value is not None:
            knobs[name] = value
    knobs.update(fixed)
    if form.logit_bias is not None:
        knobs["logit_bias"] = _bias(form.logit_bias, facts.vocab_size)
    if knobs["max_tokens"] is not None:
        knobs["max_tokens"] = min(knobs["max_tokens"], facts.max_model_len)
    if knobs.get("min_tokens", 0) >= facts.max_model_len:
        message = f"min_tokens must be below the context of {facts.max_model_len} tokens: lower it"
        raise HttpError(message, param="min_tokens")
    if knobs.get("top_k", 0) > facts.vocab_size:
        knobs["top_k"] = 0
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        for token in knobs.get(name) or ():
            check_id(token, facts.vocab_size, name)
    try:
        stop_when = None if form.stop_when is None else form.stop_when.made
        answer = structured(form)
        if not (shown or knobs.get("stop") or stop_when or answer):
            knobs["detokenize"] = False
        return SamplingParams(**knobs, structured_outputs=answer, stop_when=stop_when)
    except HttpError:
        raise
    except UsageError as error:
        named = renamed(error, field_of(form))
        raise HttpError(named.rule, param=named.param) from error


def _check_asked(form: BaseForm) -> None:
    """Raises HttpError for fields that are invalid with any prompt. Called before the prompt is
    tokenized."""
    if form.stream and form.prompt_logprobs is not None:
        raise HttpError(
            "prompt_logprobs are not streamed: leave stream out", param="prompt_logprobs"
        )
    if form.timeout is not None and not 0 < form.timeout <= LONGEST_TIMEOUT:
        raise HttpError(
            f"timeout must be above 0 and at most {LONGEST_TIMEOUT} seconds", param="timeout"
        )
    if form.cache_salt is not None and not 0 < len(form.cache_salt) <= MAX_SALT_LENGTH:
        raise HttpError(
            f"cache_salt must be 1 to {MAX_SALT_LENGTH} characters, or left out", param="cache_salt"
        )


def _check_sizes(form: BaseForm, vocab_size: int) -> None:
    """Raises HttpError for lists that are longer than any answer needs."""
    if form.stop_token_ids is not None and len(form.stop_token_ids) > MAX_STOP_TOKENS:
        raise HttpError(
            f"stop_token_ids holds at most {MAX_STOP_TOKENS} ids: send fewer",
            param="stop_token_ids",
        )
    for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
        if len(getattr(form, name) or ()) > vocab_size:
            raise HttpError(
                f"{name} names more ids than the vocabulary has: name each once", param=name
            )


async def _check_texts(sampling: SamplingParams, tools: PromptTools) -> None:
    """Raises UsageError for stop strings and bad words that cannot be served."""
    await _make_stops(sampling, tools)
    await _check_words(sampling, tools)


async def _make_stops(sampling: SamplingParams, tools: PromptTools) -> None:
    """Computes, in a thread, the tokens that can end a stop string, unless they are known.
    Otherwise the engine's client would do it on the event loop, where a body's worst strings take
    200 ms. Raises UsageError."""
    tokenizer = tools.tokenizer
    if tokenizer is None or not sampling.stop:
        return
    stops, skip = sampling.stop_strings, sampling.skip_special_tokens
    if not tokenizer.has_stops(stops, skip_special_tokens=skip):
        await tools.aside(
            lambda: tokenizer.stop_strings(stops, skip_special_tokens=skip).watch_bits()
        )


async def _check_words(sampling: SamplingParams, tools: PromptTools) -> None:
    """Raises UsageError for bad words that cannot be tokenized. Called before the request goes to
    the engine."""
    tokenizer, words = tools.tokenizer, sampling.bad_words
    if words and tokenizer is None:
        raise HttpError(
            "bad_words need text, and this server has no tokenizer: leave them out",
            param="bad_words",
        )
    if words and tokenizer is not None:
        await tools.aside(lambda: bad_word_ids(tokenizer, words))


def _call(
    form: CompletionForm | ChatForm,
    sampling: SamplingParams,
    prompts: list[TokenizedPrompt],
    facts: EngineFacts,
    **more: Any,
) -> Call:
    """Builds the call. more: fields of Call that depend on the route. Raises ContextLengthError for
    a too long prompt."""
    for prompt in prompts:
        check_length(len(prompt.ids), form, facts)
    options = form.stream_options or StreamOptions()
    return Call(
        prompts=prompts,
        sampling=sampling,
        chat=isinstance(form, ChatForm),
        stream=form.stream,
        include_usage=options.usage,
        continuous_usage=options.usage and options.continuous_usage_stats,
        logprobs=sampling.logprobs,
        prompt_logprobs=form.prompt_logprobs,
        return_token_ids=form.return_token_ids,
        tokens_as_ids=form.return_tokens_as_token_ids or not sampling.detokenize,
        timeout=form.timeout,
        salt=_salt(form.cache_salt),
        **more,
    )


def _bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in bias.items():
        if _TOKEN_ID.fullmatch(key) is None:
            raise HttpError("logit_bias has a key that is no token id", param="logit_bias")
        check_id(int(key), vocab_size, "logit_bias")
        out[int(key)] = value
    return out


def _salt(text: str | None) -> int:
    """Returns the engine's number for a cache_salt; two texts collide with probability 2^-62."""
    if text is None:
        return 0
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % MAX_SALT

"""Inputs of LLM's methods. Converts the inputs of `generate` and `chat`, in all formats of vLLM, to
lists. Defines the input and output of `LLM.stream`. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from penstock.engine.group_stop import GroupStop
from penstock.errors import UsageError
from penstock.request import CompletionOutput, SamplingParams

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

TextOrIds = str | Sequence[int]
# {"prompt": text} or {"prompt_token_ids": ids}: vLLM's TextPrompt and TokensPrompt
AnyPrompt = TextOrIds | dict[str, Any]
Message = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One request of a long job. key: returned with each of its samples. samples: indices below
    params.n of the samples to make; None: all. group_stop: ends the request early, in place of
    params.stop_when. The last four fields are options of messages: see `text.chat`."""

    key: Any
    prompt: TextOrIds | None = None
    messages: list[Message] | None = None
    params: SamplingParams
    samples: Sequence[int] | None = None
    group_stop: GroupStop | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def answers(self) -> bool:
        """True if the samples are new messages; False if they continue the prompt's text or last
        message."""
        return self.messages is not None and not self.continue_final_message


@dataclass(slots=True, kw_only=True)
class Finished:
    """One finished sample of a Prompt. With `output` None: the error of a prompt that could not
    run."""

    key: Any
    output: CompletionOutput | None
    error: str | None
    prompt_tokens: int


def as_list(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[TextOrIds]:
    """Returns a list of prompts, each a text or token ids. Raises UsageError."""
    if isinstance(prompts, (str, dict)):
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        raise UsageError(
            f"prompts is {type(prompts).__name__}: give a text, a list of token ids, or a list of"
            " them"
        )
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(p, Integral) for p in listed):
        return [listed]
    listed = [
        _of_dict(place, prompt) if isinstance(prompt, dict) else prompt
        for place, prompt in enumerate(listed)
    ]
    for place, prompt in enumerate(listed):
        if not isinstance(prompt, (str, Sequence)):
            raise UsageError(
                f"prompt {place} is {type(prompt).__name__}: give a text or a list of token ids"
            )
    return listed


def _of_dict(place: int, prompt: dict[str, Any]) -> Any:
    """Returns the text or ids of vLLM's TextPrompt or TokensPrompt. Raises UsageError."""
    if prompt.keys() not in ({"prompt"}, {"prompt_token_ids"}):
        keys = ", ".join(map(repr, prompt)) or "nothing"
        raise UsageError(
            f"prompt {place} is a dict with {keys}: give it 'prompt' or 'prompt_token_ids' alone"
        )
    return next(iter(prompt.values()))


def params_for(
    prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Returns one SamplingParams for each prompt. Raises UsageError."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise UsageError(
            "sampling_params must be a SamplingParams, or a list with one for each prompt"
        )
    if len(params) != len(prompts):
        raise UsageError(
            f"{len(prompts)} prompts and {len(params)} sampling_params: give one, or one for each"
            " prompt"
        )
    return list(params)


def ids_of(prompt: TextOrIds, tokenizer: Tokenizer | None, limit: int) -> list[int]:
    """Returns a prompt's ids for a context of `limit` tokens. Raises UsageError,
    ContextLengthError, TokenizerError."""
    if isinstance(prompt, str):
        return needed(tokenizer, "a text prompt").encode_prompt(prompt, limit)
    # Fast path for a list of ints, since `token` takes a microsecond per id.
    if set(map(type, prompt)) == {int}:
        return list(prompt)
    return [token(each) for each in prompt]


def needed(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    """Returns the tokenizer. Raises UsageError if it is None. what: name of the use that needs it,
    for the error."""
    if tokenizer is None:
        raise UsageError(
            f"{what} needs a tokenizer: give token ids, or leave skip_tokenizer_init off"
        )
    return tokenizer


def token(value: Any) -> int:
    """Returns a token id as an int. Raises UsageError."""
    # numpy's integers count as Integral too
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"a prompt of token ids holds {value!r}: give whole numbers")
    return int(value)

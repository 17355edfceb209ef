"""Structs of the answers of routes that generate text. An answer is made as one of these and
encoded by msgspec, and /openapi.json's response schemas are made from them. A field that is UNSET is
left out of the JSON. Knows OpenAI's names and vLLM's; no call, no encoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from penstock.request import FinishReason

T = TypeVar("T")
if TYPE_CHECKING:
    Encoded = Union[T, Raw]  # noqa: UP007 - an alias with a type variable
else:
    Encoded = Annotated[T, "a value that may be encoded already"]
Json = dict[str, Any]


class ErrorFields(Struct, forbid_unknown_fields=True):
    """An error. param: the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(Struct):
    """The answer to a request that failed."""

    error: ErrorFields


class PromptDetails(Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(Struct):
    """Draft tokens that turned out right, and wrong."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenCounts(Struct):
    """Token counts. A prompt counts once, whatever n is. Completion details are there if tokens
    were drafted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Head(Struct, kw_only=True):
    """The first fields of a body or an event."""

    id: str
    object: str
    created: int
    model: str


class Ending(Struct, kw_only=True, gc=False):
    """The last fields of a choice. weights_version: left out until the weights were updated."""

    finish_reason: FinishReason | Literal["tool_calls"] | None = None
    stop_reason: int | str | None = None
    weights_version: str | UnsetType = UNSET


# --- logprobs


class CompletionLogprobs(Struct):
    """OpenAI's logprobs of a completion: a list per field, with an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenLogprob(Struct):
    """A token's logprob in a chat, and its most likely alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob] | UnsetType = UNSET


class ChatLogprobs(Struct):
    """OpenAI's logprobs of a chat."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(Struct):
    """vLLM's logprob of a prompt's token, by token id."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


# --- completions


class TokensEnding(Ending, kw_only=True):
    """The last fields of a completion's or chat's choice, with those that a body asks for."""

    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Encoded[list[int]] | UnsetType = UNSET
    prompt_logprobs: Encoded[PromptLogprobs] | UnsetType = UNSET


class CompletionChoice(TokensEnding):
    """One sample of a completion, or its part in an event."""

    index: int
    text: str
    logprobs: Encoded[CompletionLogprobs | None] = None


class Completion(Head, kw_only=True):
    """The answer of /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: Annotated[list[CompletionChoice], Meta(min_length=1)]
    usage: TokenCounts


class CompletionChunk(Head, kw_only=True):
    """An event of /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: TokenCounts | UnsetType | None = UNSET


class PackedChoice(Ending):
    """One sample of a line of /v1/bulk with `packed`: int32 ids and float32 logprobs in base64."""

    index: int
    token_ids: str
    logprobs: str | None


# --- chats


class MadeFunction(Struct):
    """The function of a call. name: left out in events after a call's first."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class MadeCall(Struct, kw_only=True):
    """A tool call, or its part in an event. index: the call's number, in events alone."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: MadeFunction


class Parsed(Struct, kw_only=True, gc=False):
    """Fields that parsers find in a chat's answer beside its content. reasoning_content: the older
    name of reasoning."""

    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET


class ChatMessage(Parsed):
    """The message of a chat's choice."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None


class MessageDelta(Parsed):
    """The new part of a choice's message in an event. role: in its first event."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(TokensEnding):
    """One sample of a chat."""

    index: int
    message: ChatMessage
    logprobs: Encoded[ChatLogprobs | None] = None


class ChatCompletion(Head, kw_only=True):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: Annotated[list[ChatChoice], Meta(min_length=1)]
    usage: TokenCounts


class ChatChunkChoice(TokensEnding):
    """A sample's part in an event of a chat."""

    index: int
    delta: MessageDelta
    logprobs: Encoded[ChatLogprobs | None] = None


class ChatCompletionChunk(Head, kw_only=True):
    """An event of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: TokenCounts | UnsetType | None = UNSET


# --- /inference/v1/generate


class GeneratedLogprobs(Struct, kw_only=True):
    """Logprobs as a chat's (the first two fields), or in columns: a list per field, with an entry
    per token; an id of -1 means none."""

    content: list[TokenLogprob] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    logprobs: list[float] | UnsetType = UNSET
    ranks: list[int | None] | UnsetType = UNSET
    top_token_ids: list[list[int]] | UnsetType = UNSET
    top_logprobs: list[list[float]] | UnsetType = UNSET


class IdsEnding(Ending, kw_only=True):
    """The last fields of a choice without text."""

    token_ids: list[int] = []


class GeneratedChoice(IdsEnding):
    """One sample as token ids, or its part in an event."""

    index: int
    logprobs: Encoded[GeneratedLogprobs | None] = None


class GeneratedChunk(Struct, kw_only=True):
    """An event of /inference/v1/generate."""

    request_id: str
    created: int
    model: str
    choices: list[GeneratedChoice]
    usage: TokenCounts | UnsetType | None = UNSET


class Generated(GeneratedChunk, kw_only=True):
    """The answer of /inference/v1/generate."""

    choices: Annotated[list[GeneratedChoice], Meta(min_length=1)]
    usage: TokenCounts
    prompt_logprobs: Encoded[PromptLogprobs | None] = None
    kv_transfer_params: None = None


# --- /generative_scoring


class Score(Struct, kw_only=True):
    """An item's score. label_probs: the probability of each label; the score is the first's."""

    index: int
    object: Literal["score"] = "score"
    score: float | None = None
    label_probs: list[float] | None = None
    weights_version: str | UnsetType = UNSET


class Scores(Head, kw_only=True):
    """The answer of /generative_scoring."""

    object: Literal["list"] = "list"
    data: list[Score]
    usage: TokenCounts


# --- /v1/responses

ItemType = Literal["message", "reasoning", "function_call"]
Status = Literal["in_progress", "completed", "incomplete"]


class ContentPart(Struct, kw_only=True):
    """The text of an output item. annotations, logprobs: empty; a message's alone."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Json] | UnsetType = UNSET
    logprobs: list[Json] | UnsetType = UNSET


class OutputItem(Struct, kw_only=True):
    """An item of a response's output, with the fields of its type: call_id, name and arguments are
    a call's, role a message's, summary (empty) reasoning's, content that of the last two."""

    id: str
    type: ItemType
    status: Status = "in_progress"
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[Json] | UnsetType = UNSET
    content: list[ContentPart] | UnsetType = UNSET


class InputDetails(PromptDetails):
    """Details of a response's input tokens."""

    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """Details of a response's output tokens."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """A response's token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """Why a response is incomplete: `abort` or `max_output_tokens`."""

    reason: str


class Response(Struct, kw_only=True):
    """The answer of /v1/responses. From `instructions` to `tools` it repeats the body's fields."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool = False
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: Json
    parallel_tool_calls: bool
    reasoning: Json
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    output: Encoded[list[OutputItem]] = []
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    weights_version: str | UnsetType = UNSET


class ResponseEvent(Struct, kw_only=True):
    """An event of /v1/responses, with the fields of its type."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: ContentPart | UnsetType = UNSET
    logprobs: list[Json] | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET

"""Structs ("forms") of OpenAI's request bodies. Converts JSON bytes to a checked form, or raises an
error that names the field. Other checks are elsewhere: ranges of sampling parameters in
SamplingParams, token ids in translate.py, and fields that no form declares in
unsupported_fields.py. Knows no engine, no text, no HTTP."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock.request import MAX_LOGPROBS, NO_VOCABULARY, StopWhen
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import USUAL, HttpLimits
from penstock.server.openai.json_budget import check_values
from penstock.server.openai.message_forms import Message, sift_message
from penstock.server.openai.tool_forms import FunctionForm, Json, NamedTool, ToolChoice, ToolForm
from penstock.server.openai.unsupported_fields import (
    CHAT,
    COMPLETION,
    STREAM_OPTIONS,
    sift,
    unmarked_tools,
)
from penstock.text.chat import OPTIONS, check_options
from penstock.text.parsers.tool import Tool, check_tools

# integers that fit into a message to the engine (64 bits)
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's stream_options. include_usage: send one more event at the end with the token counts.
    continuous_usage_stats: send the counts in every event too, as vLLM does; include_usage must
    then be true or left out.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool = False

    @property
    def usage(self) -> bool:
        return self.continuous_usage_stats if self.include_usage is None else self.include_usage


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's json_schema object. Name and description change nothing. strict: refuse unknown
    keywords of the schema; else ignore them. Without a schema the answer may be any object."""

    name: str | None = None
    description: str | None = None
    schema: Json | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's response_format; type `text` means free text. The last fields belong to vLLM's
    structural_tag (see text.structural_tag)."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[Json] | None = None
    triggers: list[str] | None = None
    format: Json | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's structured_outputs, with `lenient` added. Exactly one of the first five fields, or
    structural_tag, is given. request.StructuredOutputsParams explains the fields."""

    json: str | Json | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    lenient: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | Json | None = None

    @property
    def given(self) -> Json:
        """Returns the fields that the client gave, by name."""
        return {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None
        }


class StopWhenForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """stop_when: a condition on the n samples that ends a request early; see request.StopWhen."""

    pattern: str
    agree: Int = 1

    @property
    def made(self) -> StopWhen:
        """Returns this condition as a StopWhen. Raises UsageError."""
        return StopWhen(pattern=self.pattern, agree=self.agree)


class BaseForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that completions and chats share. None: not given, so that the model's or the route's
    default applies. An empty `model` counts as not given."""

    model: str | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    min_tokens: Int | None = None
    max_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    seed: Int | None = None
    prompt_logprobs: Int | None = None
    logprob_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stop_when: StopWhenForm | None = None
    # name of the body's field with the answer format
    format_field: ClassVar[str] = "response_format"

    def __post_init__(self) -> None:
        self.model = self.model or None


class CompletionForm(BaseForm, kw_only=True):
    """The body of /v1/completions. prompt: a text, a list of texts, token ids, or a list of lists
    of token ids."""

    prompt: str | list[Any]
    echo: bool = False
    logprobs: Int | None = None
    best_of: Int | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatForm(BaseForm, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool = False
    top_logprobs: Int | None = None
    max_completion_tokens: Int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Json | None = None
    tools: list[ToolForm] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: Effort | None = None

    @property
    def called_tools(self) -> list[Tool]:
        """The tools that an answer may call, by tool_choice: all, the named one, or none."""
        choice = self.tool_choice
        if choice == "none":
            return []
        named = choice.function.name if isinstance(choice, NamedTool) else None
        return [form.tool for form in self.tools or () if named in (None, form.function.name)]

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


FormT = TypeVar("FormT", bound=Struct)


def read_completion(body: bytes | bytearray, limits: HttpLimits = USUAL) -> CompletionForm:
    """Parses a completion's body. Raises HttpError."""
    return completion_form(read_object(body, limits), limits)


def completion_form(raw: Json, limits: HttpLimits) -> CompletionForm:
    """Converts a body's JSON object to its form. Raises HttpError."""
    raw = sift(raw, CompletionForm.__struct_fields__, COMPLETION)
    _sift_stream_options(raw)
    _sift_forms(raw)
    if "prompt" not in raw:
        raise HttpError(
            "prompt is missing: text, a list of texts, token ids or a list of them", param="prompt"
        )
    if prompts_in(raw["prompt"]) > limits.max_prompts:
        raise HttpError(
            f"prompt lists more than {limits.max_prompts} prompts: send several bodies",
            param="prompt",
        )
    form = convert(raw, CompletionForm)
    if form.best_of is not None and form.best_of != (1 if form.n is None else form.n):
        message = (
            "best_of is served only where it equals n: leave it out, or choose among n on your side"
        )
        raise HttpError(message, param="best_of", code="unsupported_parameter")
    return form


def prompts_in(prompt: Any) -> int:
    """Returns the number of prompts in a body's `prompt`. A list that begins with an integer is one
    prompt of token ids."""
    return len(prompt) if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else 1


def read_chat(body: bytes | bytearray, limits: HttpLimits = USUAL) -> ChatForm:
    """Parses a chat's body. Raises HttpError."""
    return chat_form(read_object(body, limits), limits)


def chat_form(raw: Json, limits: HttpLimits) -> ChatForm:
    """Converts a body's JSON object to its form. Raises HttpError."""
    raw = sift(raw, ChatForm.__struct_fields__, CHAT)
    _sift_stream_options(raw)
    _sift_forms(raw)
    if raw.get("tools") == []:
        del raw["tools"]
    if "tools" in raw:
        raw["tools"] = unmarked_tools(raw["tools"], ToolForm, FunctionForm)
    messages = raw.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HttpError("messages must be a list of at least one message", param="messages")
    _check_length(messages, limits)
    raw["messages"] = [
        sift_message(message, f"messages[{at}]") for at, message in enumerate(messages)
    ]
    form = convert(raw, ChatForm)
    check_chat(form)
    return form


def check_chat(form: ChatForm) -> None:
    """Checks the fields of a chat that don't depend on the prompt. Raises HttpError, UsageError."""
    if form.top_logprobs is not None and not 0 <= form.top_logprobs <= MAX_LOGPROBS:
        rule = f"top_logprobs must be between 0 and {MAX_LOGPROBS}"
        raise HttpError(NO_VOCABULARY if form.top_logprobs == -1 else rule, param="top_logprobs")
    if form.top_logprobs and not form.logprobs:
        raise HttpError("top_logprobs needs logprobs: true", param="top_logprobs")
    check_options(**{name: getattr(form, name) for name in OPTIONS})
    _check_tools(form)
    if (
        None not in (form.max_tokens, form.max_completion_tokens)
        and form.max_tokens != form.max_completion_tokens
    ):
        message = "max_tokens and max_completion_tokens differ: give one of them"
        raise HttpError(message, param="max_completion_tokens")


def _check_tools(form: ChatForm) -> None:
    check_tools([each.tool for each in form.tools or ()])
    choice = form.tool_choice
    if form.must_call and not form.tools:
        raise HttpError(
            "tool_choice needs tools: name at least one, or leave it out", param="tool_choice"
        )
    if isinstance(choice, NamedTool) and not form.called_tools:
        raise HttpError("tool_choice names a tool that is not among tools", param="tool_choice")


def _check_length(messages: list[Any], limits: HttpLimits) -> None:
    if len(messages) > limits.max_messages:
        raise HttpError(
            f"there are more than {limits.max_messages} messages: send fewer", param="messages"
        )
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    if sum(len(content) for content in contents if isinstance(content, list)) > limits.max_parts:
        raise HttpError(
            f"the messages have more than {limits.max_parts} parts: join some", param="messages"
        )


def read_object(body: bytes | bytearray, limits: HttpLimits = USUAL) -> Json:
    """Parses a body to a JSON object, after checking the number of its values. Raises HttpError."""
    check_values(body, limits)
    try:
        raw = msgspec.json.decode(body)
    # raised for a number outside the range of a double, or a too large integer
    except msgspec.ValidationError as error:
        raise HttpError("the body has a number that is out of range: make it smaller") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(
            f"the body is not JSON: {_reason(error, body)}", code="invalid_json"
        ) from error
    except RecursionError as error:
        raise HttpError("the body is nested too deep: flatten it", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise HttpError("the body must be a JSON object", code="invalid_json")
    return raw


def _reason(error: Exception, body: bytes | bytearray) -> str:
    if body.startswith(b"\x1f\x8b"):
        return "it is compressed by gzip; send it plain"
    if body.startswith(b"\xef\xbb\xbf"):
        return "it begins with a byte order mark; leave that out"
    return reason_of(error)


def reason_of(error: Exception) -> str:
    """Returns what is wrong with invalid JSON and at which byte, for an error message."""
    if isinstance(error, UnicodeDecodeError):
        return "a string is not UTF-8"
    return str(error).removeprefix("JSON is malformed: ")


def _sift_stream_options(raw: Json) -> None:
    options = raw.get("stream_options")
    if options is None:
        return
    if not isinstance(options, dict):
        raise HttpError("stream_options must be an object", param="stream_options")
    if raw.get("stream") is not True and any(options.values()):
        raise HttpError("stream_options needs stream: true", param="stream_options")
    known = StreamOptions.__struct_fields__
    raw["stream_options"] = sift(options, known, STREAM_OPTIONS, "stream_options.")


def _sift_forms(raw: Json) -> None:
    """Raises HttpError for unknown fields of the answer formats and of stop_when."""
    for name, form in (
        ("structured_outputs", StructuredOutputs),
        ("response_format", ResponseFormat),
        ("stop_when", StopWhenForm),
    ):
        if isinstance(raw.get(name), dict):
            raw[name] = kept = sift(raw[name], form.__struct_fields__, {}, f"{name}.")
            if isinstance(kept.get("json_schema"), dict):
                known = JsonSchema.__struct_fields__
                kept["json_schema"] = sift(kept["json_schema"], known, {}, f"{name}.json_schema.")


# msgspec's errors have the field's path after this text; the text before it may quote the client
_AT = " - at `$"


def convert(raw: Json, form: type[FormT], where: str = "") -> FormT:
    """Converts a JSON object to its form. where: its path in the body, for errors. Raises
    HttpError, which names the wrong field."""
    try:
        return msgspec.convert(raw, form, strict=True)
    except msgspec.ValidationError as error:
        what, at, place = str(error).rpartition(_AT)
        what, inner = (what, place.removesuffix("`")) if at else (place, "")
        named = (where + inner).removeprefix(".") or None
        # don't quote the client's value
        what = re.sub(r"enum value .*", "value", what, flags=re.DOTALL)
        what = what.replace("`", "").replace("array", "list").replace(" | null", "")
        message = f"{named}: {what[0].lower()}{what[1:]}" if named else what
        raise HttpError(message, param=named) from error
    except RecursionError as error:
        raise HttpError("the body is nested too deep: flatten it", code="invalid_json") from error

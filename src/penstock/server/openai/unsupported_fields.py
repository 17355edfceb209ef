"""Policies for fields that Penstock's bodies lack. They are fields of OpenAI's and vLLM's bodies.
Such a field is accepted with values that change nothing (null is one), else refused with status 400
and a message that names it and an alternative. A policy is an Argument, as for vLLM's arguments
(vllm_arguments). Knows names and values, no body struct and no engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from penstock.server.openai.http_errors import HttpError
from penstock.vllm_arguments.argument import Argument, named
from penstock.vllm_arguments.request_table import SAMPLING

LONGEST_NAME = 80  # most characters of a field's name that an error repeats
_TAG = "a tag for OpenAI's own records; it changes no token"
_FUNCTIONS = "OpenAI's older name: say tools and tool_choice"
_ONE = "llguidance makes all masks; structured_outputs has whitespace_pattern"
_LEAVE = "not served: leave it out"
_TEXT_ALONE = "only text is served"
_AS_SAMPLING = (
    "use_beam_search",
    "early_stopping",
    "length_penalty",
    "spaces_between_special_tokens",
    "thinking_token_budget",
)

# Fields of completions and chats. Older names of vLLM that people send are listed too, for a better
# error message.
BOTH: dict[str, Argument] = {
    **{name: SAMPLING[name] for name in _AS_SAMPLING},
    **named("user safety_identifier", str, _TAG),
    **named("metadata", dict, _TAG),
    **named(
        "prompt_cache_key",
        str,
        "routes between OpenAI's machines; our cache finds equal prompts itself",
    ),
    **named(
        "prompt_cache_retention", ("in_memory",), "the prefix cache is in memory; leave it out"
    ),
    **named(
        "prompt_cache_options", ({},), "the prefix cache has no options a request; leave it out"
    ),
    **named("session_id", str, "groups requests for those who route them; it changes no token"),
    **named("store", (False,), "answers are not stored; keep them on your side"),
    **named("service_tier", ("auto", "default"), "there is one tier; leave it out"),
    **named("priority", (0,), "requests have one priority; leave it out"),
    **named(
        "detokenize", (True,), "answers hold text; ask for return_token_ids to get ids beside it"
    ),
    **named("guided_decoding_backend", str, _ONE),
    **named(
        "guided_whitespace_pattern",
        (),
        "say structured_outputs: {json: ..., whitespace_pattern: ...}",
    ),
    # no value is accepted, since even {} is a schema, which any JSON matches
    **named("guided_json", (), "say structured_outputs: {json: ...}"),
    **named("guided_regex", (), "say structured_outputs: {regex: ...}"),
    **named("guided_choice", (), "say structured_outputs: {choice: [...]}"),
    **named("guided_grammar", (), "say structured_outputs: {grammar: ...}"),
    **named("logits_processors", ([],), "code from clients is not run"),
    **named("repetition_detection", ({},), "cancel the request, or give a stop string"),
    **named("truncation_side", ("left",), "truncate_prompt_tokens keeps the last"),
    **named("stream_interval", (1,), "tokens are sent as they come; leave it out"),
    **named("watermarking", (False,), _LEAVE),
    **named("vllm_xargs kv_transfer_params ec_transfer_params", ({},), _LEAVE),
    **named("routed_experts_prompt_start", (0,), _LEAVE),
    **named("return_token_offsets", (False,), "logprobs of completions have text_offset"),
    **named("return_mm_kwargs", bool, "only of a route that renders; here it changes nothing"),
    **named("request_id", (), "ids of answers are made by the server; read `id` of the answer"),
    **named("mm_processor_kwargs media_io_kwargs", ({},), _TEXT_ALONE),
}

COMPLETION: dict[str, Argument] = {
    **BOTH,
    **named(
        "suffix",
        ("",),
        "nothing is filled in before it; put it in the prompt as the model wants it",
    ),
    **named("prompt_embeds", (), "prompts are text or token ids"),
    **named("messages", (), "a chat goes to /v1/chat/completions; here give a prompt"),
}

CHAT: dict[str, Argument] = {
    **BOTH,
    **named("prompt", (), "a prompt goes to /v1/completions; here give messages"),
    **named("best_of", (), "not served in chat: ask for n samples"),
    **named("functions", ([],), _FUNCTIONS),
    **named("function_call", ("none", "auto"), _FUNCTIONS),
    **named("modalities", (["text"],), _TEXT_ALONE),
    **named("audio", (), _TEXT_ALONE),
    **named("moderation", (), "no moderation is run; run it on your side"),
    **named("prediction", (), "predicted outputs are not served; leave it out"),
    **named("verbosity", ("medium",), "say it in a message"),
    # refused, since even {} asks for a search
    **named("web_search_options", (), "nothing is fetched from the web"),
    **named("documents", ([],), "put them in a message"),
    **named(
        "chat_template",
        ("",),
        "templates are the server's: it is started with --chat-template FILE",
    ),
    **named(
        "return_prompt_text", (False,), "ask for return_token_ids, which tells the prompt's ids"
    ),
    **named("echo", (False,), "not served in chat: you have the messages"),
}

_STATELESS = "nothing is kept between responses: send what was said in input"
RESPONSES: dict[str, Argument] = {
    **{
        name: BOTH[name]
        for name in (
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "service_tier",
        )
    },
    **named("store", (False,), _STATELESS),
    **named("background", (False,), "a response is waited for; /v1/batches has what isn't"),
    **named("previous_response_id conversation prompt", (), _STATELESS),
    **named(
        "include",
        ([], ["reasoning.encrypted_content"]),
        "reasoning is given as it is; nothing can be added",
    ),
    **named("truncation", ("disabled",), "nothing is dropped from input: send less"),
    **named("top_logprobs", (0,), "logprobs are in /v1/chat/completions"),
    **named("max_tool_calls", (), "counts calls of built-in tools, and none is run here"),
    **named("context_management", ([],), "nothing is dropped from input: send less"),
    **named("moderation", (), "no moderation is run; run it on your side"),
    **named(
        "stream_options",
        ({}, {"include_obfuscation": False}),
        "events are not padded; leave it out",
    ),
    **named("messages", (), "a chat goes to /v1/chat/completions; here give input"),
    **named("max_tokens max_completion_tokens", (), "here it is called max_output_tokens"),
    **named("response_format", (), "here it is called text.format"),
    **named("n", (1,), "a response is one sample: /v1/chat/completions has n"),
}

# Anthropic's cache_control, which some clients send to every server, in messages, message parts and
# tools
CACHE_MARK = named(
    "cache_control", dict, "marks what to cache; our cache finds equal beginnings by itself"
)

MESSAGE: dict[str, Argument] = {
    **CACHE_MARK,
    **named("refusal", ("",), "refusals are not served; put the text in content"),
    **named("function_call", (), _FUNCTIONS),
    **named("audio", (), _TEXT_ALONE),
    **named("annotations", ([],), "notes on the web are not served; leave them out"),
    **named(
        "parsed", object, "what openai's parse() read of content, sent back with it; content counts"
    ),
}

CALLED: dict[str, Argument] = {  # fields of a function that an earlier answer called
    **named(
        "parsed_arguments",
        object,
        "what openai's parse() read of arguments, sent back; arguments count",
    ),
}

STREAM_OPTIONS = named("include_obfuscation", (False,), "events are not padded; leave it out")

# policies listed in /openapi.json, by the name of the body's struct
BY_FORM: dict[str, Mapping[str, Argument]] = {
    "CompletionForm": COMPLETION,
    "ChatForm": CHAT,
    "ResponsesForm": RESPONSES,
    "Message": MESSAGE,
    "TextPart": CACHE_MARK,
    "ToolForm": CACHE_MARK,
    "FunctionForm": CACHE_MARK,
    "FunctionTool": CACHE_MARK,
    "CalledFunction": CALLED,
    "StreamOptions": STREAM_OPTIONS,
}


def unmarked(raw: Any, form: type[Struct], where: str) -> Any:
    """Returns a message part or a tool without its cache_control. form: its struct, which checks
    types and other names later. Raises HttpError for a cache_control that is no object."""
    if not isinstance(raw, dict) or raw.keys().isdisjoint(CACHE_MARK):
        return raw
    return sift(
        raw, {*form.__struct_fields__, *(raw.keys() - CACHE_MARK.keys())}, CACHE_MARK, f"{where}."
    )


def unmarked_tools(tools: Any, form: type[Struct], function: type[Struct] | None = None) -> Any:
    """Returns the tools of a body without cache_control. form, function: structs of a tool and of
    its `function`."""
    if not isinstance(tools, list):
        return tools
    found = [unmarked(tool, form, f"tools[{at}]") for at, tool in enumerate(tools)]
    for at, tool in enumerate(found):
        if function is not None and isinstance(tool, dict) and "function" in tool:
            inner = unmarked(tool["function"], function, f"tools[{at}].function")
            found[at] = {**tool, "function": inner}
    return found


def sift(
    raw: Mapping[str, Any],
    known: Collection[str],
    policies: Mapping[str, Argument],
    where: str = "",
) -> dict[str, Any]:
    """Returns the fields of `raw` that are in `known`; null counts as left out. policies: other
    fields, and the values that are accepted and ignored. where: prefix of the field's name in
    errors. Raises HttpError for any other field or value."""
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        if name in known:
            if value is not None:
                kept[name] = value
            continue
        shown = where + name[:LONGEST_NAME]
        policy = policies.get(name)
        if policy is None:
            raise HttpError(
                f"unknown field {shown}: leave it out", param=shown, code="unknown_parameter"
            )
        if value is not None and not policy.takes(value, raw):
            which = "" if not policy.taken else " with this value"
            note = policy.note.removeprefix("not served: ")
            raise HttpError(
                f"{shown} is not served{which}: {note}", param=shown, code="unsupported_parameter"
            )
    return kept

"""Makes docs/http.md: the fields of each route from the server's forms, with types, ranges and
defaults, and the limits with their numbers. The words beside a field or a limit are here; a field
or a limit without any is an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields as fields_of

from penstock.request import SamplingParams
from penstock.server.api_server.openapi_schemas import request_schemas
from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.online.request_limits import QUEUED_A_ROW, QUEUED_TOKENS
from penstock.server.openai import unsupported_fields as fates
from penstock.server.openai.forms import BaseForm, ChatForm, CompletionForm
from penstock.server.openai.generate_form import GenerateForm
from penstock.server.openai.http_limits import HttpLimits
from penstock.server.openai.responses_forms import ResponsesForm
from penstock.server.openai.scoring_forms import ScoringBody
from penstock.server.openai.token_forms import MOST_IDS
from penstock.vllm_arguments.argument import Argument

CONTEXT, VOCABULARY = 1_000_000_007, 1_000_000_009  # stand for a model's own numbers in schemas
WORDS = {
    CONTEXT - 1: "context - 1",
    VOCABULARY - 1: "vocabulary - 1",
    VOCABULARY: "vocabulary",
}
OPENING = """\
What each route reads, with type ("whole": a whole number), range and, in brackets, the default; the
model's generation_config.json comes first. `null` counts as left out, an unknown field is a 400. Routes:
[server.md](server.md); a running server's `/openapi.json` has the model's own numbers.
"""
DEFAULTS = {"max_tokens": "16; chat: the context"}
NOTES = {
    "model": "404 if it is another; empty counts as left out",
    "n": "",
    "temperature": "0 is greedy; below 1e-6 it is 1e-6",
    "top_p": "",
    "top_k": "-1 and 0: all",
    "min_p": "against the likeliest",
    "repetition_penalty": "",
    "presence_penalty": "of output",
    "frequency_penalty": "of output",
    "logit_bias": "token id to number, -100 to 100",
    "allowed_token_ids": "no others",
    "min_tokens": "no end before",
    "max_tokens": "beyond the context the answer ends with it",
    "stop": "of 2,048 characters together",
    "stop_token_ids": "",
    "bad_words": "of 2,048 characters together, 16 tokens each",
    "ignore_eos": "go on past end ids; not beside a form",
    "seed": "left out: drawn",
    "prompt_logprobs": "not streamed",
    "logprob_token_ids": "up to 20: their logprobs in place of the likeliest; leave `logprobs` out",
    "include_stop_str_in_output": "",
    "skip_special_tokens": "",
    "add_special_tokens": "completions: true, chat: false",
    "truncate_prompt_tokens": "keeps the last",
    "return_token_ids": "",
    "return_tokens_as_token_ids": "`token_id:N` in logprobs",
    "stream": "",
    "stream_options": "`include_usage`: one more event with counts; `continuous_usage_stats`: counts in each event",
    "timeout": "seconds from the body's end to the answer's",
    "cache_salt": "requests of different salts share no cached blocks",
    "response_format": "[a form](structured.md)",
    "structured_outputs": "[a form](structured.md)",
    "stop_when": "`pattern`, `agree`: [early stop](server.md#early-stop)",
    "prompt": "choice = prompt * n + sample",
    "echo": "also with `max_tokens` 0",
    "logprobs": "",
    "best_of": "only if it equals `n`",
    "messages": "`role`, `content`, `name`, `tool_calls`, `tool_call_id`, `reasoning`",
    "top_logprobs": "needs `logprobs`",
    "max_completion_tokens": "",
    "add_generation_prompt": "",
    "continue_final_message": "with `add_generation_prompt: false`; goes on inside the last message",
    "chat_template_kwargs": "",
    "tools": "[functions](tools.md)",
    "tool_choice": "`auto` if left out",
    "parallel_tool_calls": "",
    "include_reasoning": "",
    "reasoning_effort": "for templates that read it",
    "input": "text or items",
    "instructions": "",
    "max_output_tokens": "",
    "text": "`format`: `text`, `json_object`, `json_schema`",
    "reasoning": "`effort`",
    "metadata": "said again",
    "token_ids": "",
    "sampling_params": "a completion's fields but those that shape text",
    "request_id": "1 to 128 of letters, digits, `_ . : -`",
    "logprobs_format": "`columns`: a list a field",
    "query": "",
    "items": "texts or lists of ids, up to 8,192",
    "label_token_ids": "each once",
    "apply_softmax": "among the labels; false: among all tokens",
    "item_first": "items before the query",
}
TYPES = {  # that a schema tells at length, or not at all
    "prompt": "text, ids, or a list of either",
    "query": "text, ids",
    "token_ids": "list of whole",
    "label_token_ids": "list of whole, up to 20",
    "seed": "whole, 64 bits",
    "tool_choice": "text, object",
    "stop": "text, or a list of up to 64",
}
KINDS = {"str": "text", "bool": "bool", "int": "whole", "float": "number", "dict": "object"}
LIMITS: dict[str, tuple[str, str]] = {
    "max_body_bytes": ("a body; a line of a batch", "413"),
    "max_values": ("values in a body", "400"),
    "max_texts": ("texts and names in a body", "400"),
    "max_lists": ("lists and objects in a body", "400"),
    "max_prompts": ("prompts of a body; x n: 65,536", "400"),
    "max_messages": ("messages, or items of a response", "400"),
    "max_parts": ("content parts of all messages", "400"),
    "max_answer_bytes": ("whole answers held together", "400 `answer_too_large` for the largest"),
    "max_reading_bytes": ("all bodies on their way in", "those above 64 KiB stop at 128 MiB: 429"),
    "max_large_bytes": ("bodies above 1 MiB, until they are ids", "503 `server_busy`"),
    "body_seconds": ("for a body, and 1 s more for each 16 KiB", "408"),
    "drain_seconds": ("for running requests after the first signal", "503 `shutting_down`"),
    "step_timeout": ("for a step of an engine with work", "the engine ends"),
    "max_num_queued_reqs": ("samples that wait or run", "429 `queue_full`"),
    "max_num_queued_tokens": ("prompt tokens that wait or run", "429 `queue_full`"),
    "request_seconds": ("for a request (`--request-timeout`)", "408 `timeout`"),
    "max_header_bytes": ("request line and headers", "431"),
    "header_seconds": ("for them to come", "408"),
    "stall_seconds": ("that a reader may leave 48 KiB untaken", "closed, cancelled"),
    "max_connections": ("connections that wait for answers", "429 `too_many_connections`"),
}
INNER = {"turn_ids", "turn_tokens", "turn_events", "piece_bytes"}  # of the loop's turns
UNSAID = {
    "max_num_queued_reqs": f"{QUEUED_A_ROW} a row",
    "max_num_queued_tokens": f"{QUEUED_TOKENS >> 20} Mi",
    "request_seconds": "none",
    "max_connections": "the process's descriptors",
}
BATCH_LIMITS = {
    "max_lines": ("lines of a file", "the batch is `failed`"),
    "max_file_bytes": ("a file (10^6 bytes)", "413"),
    "max_line_bytes": ("a line", "an error of the line"),
    "max_errors": ("errors told in full", "the numbers of the others"),
    "max_unfinished": ("batches of an owner that are not over", "429 `too_many_batches`"),
    "max_files": ("files of an owner", "400 `too_many_files`"),
    "running_batches": ("batches side by side", "the next ones wait"),
}

BESIDE = """\
Beside these `/inference/v1/generate` takes `model`, `stream`, `stream_options`, `cache_salt` and `timeout`.
"""
OTHERS = f"""\
## Other bodies

Weights and sleep: [server.md](server.md#weights-and-sleep).

route | fields
--- | ---
`/tokenize` | `model`, `add_special_tokens`, `return_token_strs`; `prompt` (one text, to 1 MB) or `messages`
`/detokenize` | `tokens` (up to {MOST_IDS:,} ids), `model`
`/v1/bulk`, a line | a completion's with one `prompt`, or a chat's; `custom_id` or `id`; `packed` (completions); \
or OpenAI's batch envelope; no `stream`
`/v1/files` (multipart) | `file`, `purpose` (`batch`)
`/v1/batches` | `input_file_id`, `endpoint`, `completion_window` (`24h`), `metadata`
"""


def http_page(note: str) -> str:
    """Fields by route, fields that are only taken or refused, limits."""
    schemas = request_schemas("MODEL", CONTEXT, VOCABULARY)
    base = {each.name for each in fields_of(BaseForm)}
    parts = [f"# HTTP: fields and limits\n\n{note}\n{OPENING}"]
    for title, form, schema, skipped in (
        ("Completions and chat", BaseForm, "CompletionForm", set()),
        ("`/v1/completions`", CompletionForm, "CompletionForm", base),
        ("`/v1/chat/completions`", ChatForm, "ChatForm", base),
        ("`/v1/responses`", ResponsesForm, "ResponsesForm", set()),
        ("`/inference/v1/generate`", GenerateForm, None, set()),
        ("`/generative_scoring`", ScoringBody, None, set()),
    ):
        known = schemas[schema]["properties"] if schema else {}
        parts.append(
            f"## {title}\n\n{_fields(form, known, skipped, title == 'Completions and chat')}"
        )
        if form is GenerateForm:
            parts.append(BESIDE)
    parts.append(OTHERS)
    parts.append(_fates())
    parts.append(f"## Limits\n\n{_limits(HttpLimits(), LIMITS, INNER)}")
    parts.append(f"With `--state-dir`:\n\n{_limits(BatchJobLimits(), BATCH_LIMITS, None)}")
    return "\n".join(part for part in parts if part)


def _fields(form: type[Struct], known: Mapping[str, Any], skipped: set[str], common: bool) -> str:
    usual = {each.name: each.default for each in fields(SamplingParams)}
    told = set() if common else {each.name for each in fields_of(BaseForm)} - skipped
    if form is ResponsesForm:
        told |= {each.name for each in fields_of(ChatForm)}
    lines = ["field | type, range (default) | note", "--- | --- | ---"]
    for each in fields_of(form):
        if each.name in skipped | told:
            continue
        kind = TYPES.get(each.name) or _kind(known.get(each.name, {})) or _plain(each.type)
        default: Any = each.default
        if default is NODEFAULT:
            default = "required" if each.default_factory is NODEFAULT else ""
        elif default is None:
            default = usual.get(each.name) if form is not ScoringBody else None
        shown = DEFAULTS.get(each.name) if common else None
        usually = shown or _said(default)
        kind += f" ({usually})" if usually else ""
        if each.name not in NOTES:
            raise SystemExit(f"scripts/docs_http.py has no words for the field {each.name}")
        lines.append(f"`{each.name}` | {kind} | {NOTES[each.name]}")
    again = [each.name for each in fields_of(form) if each.name in told]
    if again:
        lines += ["", f"As above: {_quoted(again)}."]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _said(value: Any) -> str:
    if value is None or value == "":
        return ""
    return str(value).lower() if isinstance(value, (bool, int, float)) else str(value)


def _plain(kind: Any) -> str:
    text = str(getattr(kind, "__name__", kind)).replace("typing.", "")
    if "Literal" in text:
        return ", ".join(f"`{each}`" for each in kind.__args__ if isinstance(each, str))
    for name, word in (("list", "list"), ("dict", "object"), *KINDS.items()):
        if name in text:
            return word
    return "object"


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema's type and range in a few words; empty where it has none to tell."""
    options = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    told = [word for each in options if (word := _one(each))]
    return " or ".join(dict.fromkeys(told))


def _one(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum")
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"] if each and each != "MODEL") or (
            "text" if kind == "string" else ""
        )
    if kind in ("integer", "number"):
        word = "whole" if kind == "integer" else "number"
        if low is None and high is None:
            return word
        open_low = "above " if "exclusiveMinimum" in schema else ""
        if high is None or high >= 2**63 - 1:
            return f"{word}, {low:g} or more" if low != -(2**63) else word
        return f"{word}, {open_low}{low:g} to {WORDS.get(high, f'{high:,g}')}"
    if kind == "array":
        most, inner = schema.get("maxItems"), _kind(schema.get("items", {}))
        inner = "text" if inner.startswith("text") else inner.partition(",")[0]
        bound = f", up to {WORDS.get(most, f'{most:,}')}" if most else ""
        return f"list of {inner or 'objects'}{bound}"
    if kind == "string":
        return f"text, up to {schema['maxLength']:,}" if "maxLength" in schema else "text"
    return {"boolean": "bool", "object": "object"}.get(
        str(kind), "object" if "$ref" in schema else ""
    )


def _fates() -> str:
    parts = ["## Fields that change nothing, or are refused\n"]
    parts.append(
        "Both routes: completions and chat. Refused: a 400 with the way out, unless null or, where"
        " values follow, one of them.\n"
    )
    parts.append("where | taken at any value | refused but at | refused\n--- | --- | --- | ---")
    both = fates.BOTH
    for where, table in (
        ("both routes", both),
        ("completions", _without(fates.COMPLETION, both)),
        ("chat", _without(fates.CHAT, both)),
        ("responses", _without(fates.RESPONSES, both)),
        ("a message", fates.MESSAGE),
        ("a call", fates.CALLED),
        ("`stream_options`", fates.STREAM_OPTIONS),
    ):
        free = [name for name, fate in table.items() if isinstance(fate.taken, type)]
        some: dict[str, list[str]] = {}
        for name, fate in table.items():
            if fate.taken and name not in free:
                some.setdefault(_values(fate), []).append(name)
        none = [name for name, fate in table.items() if not fate.taken]
        told = "; ".join(f"{_quoted(names)}: {values}" for values, names in some.items())
        parts.append(f"{where} | {_quoted(free)} | {told} | {_quoted(none)}")
    return "\n".join(parts) + "\n"


def _without(table: Mapping[str, Argument], both: Mapping[str, Argument]) -> dict[str, Argument]:
    return {name: fate for name, fate in table.items() if both.get(name) is not fate}


def _values(fate: Argument) -> str:
    if not isinstance(fate.taken, tuple):
        return str(fate.taken)
    words = []
    for value in fate.taken:
        if value in ({}, [], ""):
            words.append("empty")
        else:
            words.append("no `include_obfuscation`" if isinstance(value, dict) else _first(value))
    return ", ".join(dict.fromkeys(words))


def _first(value: Any) -> str:
    return _said(value[0] if isinstance(value, list) else value)


def _limits(limits: Any, words: Mapping[str, tuple[str, str]], inner: set[str] | None) -> str:
    """A row a limit. inner: names that are not told; None: all without words aren't."""
    lines = ["limit | of | past it", "--- | --- | ---"]
    told = [each for each in fields(limits) if each.name in words]
    missing = {each.name for each in fields(limits)} - set(words) - (inner or set())
    if inner is not None and missing:
        raise SystemExit(f"scripts/docs_http.py has no words for {sorted(missing)}")
    for each in told:
        value = getattr(limits, each.name)
        shown = UNSAID[each.name] if value is None else _amount(each.name, value)
        what, past = words[each.name]
        lines.append(f"{shown} | {what} | {past}")
    return "\n".join(lines) + "\n"


def _amount(name: str, value: float) -> str:
    if name.endswith(("seconds", "timeout")):
        return f"{value:g} s"
    if not name.endswith("bytes"):
        return f"{value:,}"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value % size == 0:
            return f"{value // size:.0f} {unit}"
    return f"{value / 1e6:.0f} MB"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

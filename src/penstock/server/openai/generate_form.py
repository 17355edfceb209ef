"""Parses bodies of vLLM's /inference/v1/generate. They have token ids and sampling parameters, and
become the form of a completion. Knows forms (forms.py); no engine.

{"token_ids": [1, 2], "sampling_params": {"max_tokens": 16, "logprobs": 0}}
"""

from __future__ import annotations

import re
from typing import Any, Literal

from msgspec import Struct

from penstock.server.openai.forms import (
    BaseForm,
    CompletionForm,
    completion_form,
    convert,
    read_object,
)
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import USUAL, HttpLimits
from penstock.server.openai.tool_forms import Json
from penstock.server.openai.unsupported_fields import COMPLETION, LONGEST_NAME, sift
from penstock.vllm_arguments.argument import Argument, named

_OWN = {"request_id", "token_ids", "sampling_params", "logprobs_format"}
# fields of the body that are not in sampling_params
OUTSIDE = {"model", "stream", "stream_options", "cache_salt", "timeout"}
# fields allowed in sampling_params: a completion's, except those for the answer's format
INSIDE = (
    {*BaseForm.__struct_fields__, "logprobs"}
    - OUTSIDE
    - {
        "return_token_ids",
        "return_tokens_as_token_ids",
        "add_special_tokens",
        "response_format",
    }
)
GENERATE: dict[str, Argument] = {
    **named("priority", (0,), "requests have one priority; leave it out"),
    **named("features", (), "only text is served"),
    **named("kv_transfer_params ec_transfer_params", ({},), "not served: leave it out"),
    **named(
        "assistant_tokens_mask token_offsets", (), "it is of who rendered the prompt: leave it out"
    ),
    **named("prompt", (), "prompts are token_ids here: /v1/completions takes text"),
}
SAMPLING: dict[str, Argument] = {
    **COMPLETION,
    **named("detokenize", bool, "answers are of ids, whatever it says"),
    **named("output_kind", (2,), "stream says whether answers come as they grow"),
    **named("flat_logprobs", (False,), 'say "logprobs_format": "columns" beside sampling_params'),
}
REQUEST_ID = "[A-Za-z0-9_.:-]{1,128}"


class GenerateForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body's fields that a completion doesn't have. logprobs_format: `content`, as in chats, or
    `columns`, with one list per field."""

    token_ids: list[int]
    sampling_params: Json
    request_id: str | None = None
    logprobs_format: Literal["content", "columns"] = "content"


class TokensForm(CompletionForm, kw_only=True):
    """A completion from token ids, answered with token ids. request_id: the client's, returned as
    the answer's id. columns: return logprobs in columns."""

    request_id: str | None = None
    columns: bool = False


def read_generate(body: bytes | bytearray, limits: HttpLimits = USUAL) -> TokensForm:
    """Parses the body of POST /inference/v1/generate. Raises HttpError."""
    raw = sift(read_object(body, limits), _OWN | OUTSIDE, GENERATE)
    for name in ("token_ids", "sampling_params"):
        if name not in raw:
            raise HttpError(
                f"{name} is missing: the prompt's ids, and how to sample from them", param=name
            )
    own = convert({name: value for name, value in raw.items() if name in _OWN}, GenerateForm)
    if own.request_id is not None and re.fullmatch(REQUEST_ID, own.request_id) is None:
        rule = "request_id must be 1 to 128 letters, digits or any of _ . : -, or be left out"
        raise HttpError(rule, param="request_id")
    if not own.token_ids:
        raise HttpError("token_ids must hold one id at least", param="token_ids")
    outside = {name: raw[name] for name in OUTSIDE & raw.keys()}
    form = completion_form(
        {**outside, **_sampling(own.sampling_params), "prompt": own.token_ids}, limits
    )
    fields: dict[str, Any] = {
        name: getattr(form, name) for name in CompletionForm.__struct_fields__
    }
    shown = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return TokensForm(
        **fields | shown, request_id=own.request_id, columns=own.logprobs_format == "columns"
    )


def _sampling(raw: Json) -> Json:
    """Returns the given sampling parameters by name; null counts as left out. Raises HttpError for
    a field that is not allowed."""
    for name in sorted(raw.keys() & ({*OUTSIDE, *CompletionForm.__struct_fields__} - INSIDE))[:1]:
        where = f"sampling_params.{name[:LONGEST_NAME]}"
        raise HttpError(
            f"{where} is no sampling parameter: leave it out", param=where, code="unknown_parameter"
        )
    return sift(raw, INSIDE, SAMPLING, "sampling_params.")

"""JSON Schemas of every body: the forms', told as truly as a schema can, and what comes back. Types are msgspec's;
null, the ranges of SamplingParams, the model's limits and the accepted fields are added. What hangs on several fields,
or on a prompt's tokens, stands in no schema and is a 400. It knows forms and facts; no route, no request.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.request import FINISH_REASONS, MAX_LOGPROBS, MAX_SAMPLES, MAX_SEED, MAX_STOP_CHARACTERS, MAX_STOPS
from penstock.row_table import RANGES
from penstock.server.batch import batches, files
from penstock.server.openai import unsupported_fields
from penstock.server.openai.forms import ChatForm, CompletionForm
from penstock.server.openai.translate import LONGEST_TIMEOUT, MAX_SALT_LENGTH, MAX_STOP_TOKENS
from penstock.vllm_arguments import Argument

Json = dict[str, Any]
_PREFIX = "#/components/schemas/"
_TEXT: Json = {"type": "string"}
_WHOLE: Json = {"type": "integer"}
_REAL: Json = {"type": "number"}
_FLAG: Json = {"type": "boolean"}
_NULL: Json = {"type": "null"}
_KINDS: dict[type, Json] = {str: _TEXT, bool: _FLAG, dict: {"type": "object"}}
_TAKEN = {
    "CompletionForm": unsupported_fields.COMPLETION,
    "ChatForm": unsupported_fields.CHAT,
    "Message": unsupported_fields.MESSAGE,
    "StreamOptions": unsupported_fields.STREAM_OPTIONS,
}


def ref(name: str) -> Json:
    return {"$ref": _PREFIX + name}


# --- what is asked


def request_schemas(model: str, longest: int, vocabulary: int) -> dict[str, Json]:
    """The forms' components for a model of this name, context and vocabulary."""
    _, found = msgspec.json.schema_components((CompletionForm, ChatForm), ref_template=_PREFIX + "{name}")
    told = _ranges(model, longest, vocabulary)
    special = {"CompletionForm": _completion_ranges(vocabulary), "ChatForm": _chat_ranges()}
    for form, policies in _TAKEN.items():
        schema = found[form]
        known: dict[str, Json] = {**told, **special[form]} if form in special else {}
        properties: Json = schema["properties"]
        for name in properties:
            kind = {**properties, **known}[name]
            properties[name] = kind if name in schema.get("required", ()) else _or_null(kind)
        properties |= {name: _harmless(policy) for name, policy in policies.items() if policy.taken}
    return found


def _ranges(model: str, longest: int, vocabulary: int) -> dict[str, Json]:
    """Fields of both routes by name."""
    return {
        **{name: _real(*bounds) for name, bounds in RANGES.items()},
        "model": {"type": "string", "enum": [model, ""]},
        "n": _whole(1, MAX_SAMPLES),
        "top_k": _whole(-1),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": _real(*RANGES["logit_bias"]),
            "maxProperties": vocabulary,
        },
        "allowed_token_ids": {
            "type": "array",
            "items": _whole(0, vocabulary - 1),
            "minItems": 1,
            "maxItems": vocabulary,
        },
        "min_tokens": _whole(0, longest - 1),
        "max_tokens": _whole(1),
        "stop": _one_or_more({**_TEXT, "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}, maxItems=MAX_STOPS),
        "bad_words": {
            "type": "array",
            "items": {**_TEXT, "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
            "maxItems": MAX_STOPS,
        },
        "stop_token_ids": {"type": "array", "items": _whole(0, vocabulary - 1), "maxItems": MAX_STOP_TOKENS},
        "seed": _whole(-(2**63), MAX_SEED),
        "prompt_logprobs": _whole(0, MAX_LOGPROBS),
        "truncate_prompt_tokens": _whole(1),
        "timeout": _real(0, LONGEST_TIMEOUT, open_low=True),
        "cache_salt": {**_TEXT, "minLength": 1, "maxLength": MAX_SALT_LENGTH},
    }


def _completion_ranges(vocabulary: int) -> dict[str, Json]:
    ids = {"type": "array", "items": _whole(0, vocabulary - 1), "minItems": 1}
    several = [{"type": "array", "items": each, "minItems": 1} for each in (_TEXT, ids)]
    return {
        "prompt": {"anyOf": [_TEXT, ids, *several]},
        "max_tokens": _whole(0),  # 0 with echo alone
        "logprobs": _whole(0, MAX_LOGPROBS),
        "best_of": _whole(1, MAX_SAMPLES),
    }


def _chat_ranges() -> dict[str, Json]:
    return {
        "messages": {"type": "array", "items": ref("Message"), "minItems": 1},
        "max_completion_tokens": _whole(1),
        "top_logprobs": _whole(0, MAX_LOGPROBS),
    }


def _harmless(policy: Argument) -> Json:
    """The values of a field that is accepted and changes nothing."""
    if isinstance(policy.taken, type):
        return {**_or_null(_KINDS[policy.taken]), "description": policy.note}
    return {"enum": [*policy.taken, None], "description": policy.note}


def _or_null(schema: Json) -> Json:
    """Adds null, which counts as left out."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind != _NULL]
    plain = [{key: value for key, value in kind.items() if key != "default"} for kind in kinds]
    found: Json = {"anyOf": [*plain, _NULL]}
    return found if schema.get("default") is None else {**found, "default": schema["default"]}


def _whole(low: int, high: int = 2**63 - 1) -> Json:
    return {**_WHOLE, "minimum": low, "maximum": high}


def _real(low: float, high: float, open_low: bool = False) -> Json:
    return {**_REAL, "exclusiveMinimum" if open_low else "minimum": low, "maximum": high}


def _one_or_more(item: Json, **more: Any) -> Json:
    return {"anyOf": [item, {"type": "array", "items": item, **more}]}


UPLOAD: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}},
    "additionalProperties": False,
}

_, _OBJECTS = msgspec.json.schema_components((files.FileObject, batches.BatchObject, batches.BatchForm))
BATCH = _OBJECTS["BatchForm"]

# --- what comes back


def _object(**always: Json) -> Json:
    """An object that always has these fields."""
    return {"type": "object", "required": list(always), "properties": always}


def _list(item: str, **more: Json) -> Json:
    return _object(object={"const": "list"}, data={"type": "array", "items": ref(item)}, **more)


_PAGE: dict[str, Json] = {"first_id": _or_null(_TEXT), "last_id": _or_null(_TEXT), "has_more": _FLAG}
_FINISH = {"enum": [*FINISH_REASONS, None]}
_USAGE = _object(
    prompt_tokens=_WHOLE,
    completion_tokens=_WHOLE,
    total_tokens=_WHOLE,
    prompt_tokens_details=_object(cached_tokens=_WHOLE),
)
_LOGPROBS = _or_null({"type": "object"})
_ENDING: dict[str, Json] = {"logprobs": _LOGPROBS, "finish_reason": _FINISH, "stop_reason": {}}


def _answer(kind: str, **choice: Json) -> Json:
    choices = {"type": "array", "items": _object(index=_WHOLE, **choice, **_ENDING), "minItems": 1}
    head = {"id": _TEXT, "object": {"const": kind}, "created": _WHOLE, "model": _TEXT}
    return _object(**head, choices=choices, usage=_USAGE)


ANSWERS: dict[str, Json] = {
    "Error": _object(
        error={
            **_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT)),
            "additionalProperties": False,
        }
    ),
    "Completion": _answer("text_completion", text=_TEXT),
    "ChatCompletion": _answer(
        "chat.completion", message=_object(role={"const": "assistant"}, content=_TEXT, refusal=_NULL)
    ),
    "Model": _object(id=_TEXT, object={"const": "model"}, created=_WHOLE, owned_by=_TEXT, max_model_len=_WHOLE),
    "Models": _list("Model"),
    "File": _OBJECTS["FileObject"],
    "Files": _list("File", **_PAGE),
    "DeletedFile": _object(id=_TEXT, object={"const": "file"}, deleted={"const": True}),
    "Batch": _OBJECTS["BatchObject"],
    "Batches": _list("Batch", **_PAGE),
    "Live": _object(live={"const": True}),
    "Ready": _object(ready=_FLAG),
    "EngineState": _object(alive=_FLAG, seconds_since_step=_REAL, step_timeout=_REAL),
    "Version": _object(version=_TEXT),
}

"""JSON Schemas of the bodies in /openapi.json. They are made from the structs of requests, with
ranges added, and of answers. Knows body structs and limits; no operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.request import (
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    WHOLE,
)
from penstock.row_table import RANGES
from penstock.server.batch import batches
from penstock.server.online.control_handlers import UpdateWeightsForm
from penstock.server.openai.forms import ChatForm, CompletionForm
from penstock.server.openai.generate_form import (
    GENERATE,
    INSIDE,
    OUTSIDE,
    REQUEST_ID,
    GenerateForm,
)
from penstock.server.openai.responses_forms import ResponsesForm
from penstock.server.openai.scoring_forms import POLICIES as SCORING
from penstock.server.openai.scoring_forms import ScoringBody
from penstock.server.openai.translate import LONGEST_TIMEOUT, MAX_SALT_LENGTH, MAX_STOP_TOKENS
from penstock.server.openai.unsupported_fields import BY_FORM
from penstock.vllm_arguments.argument import Argument

Json = dict[str, Any]
EVENTS = "text/event-stream"
BYTES = "application/octet-stream"
LINES = "application/x-ndjson"
_PREFIX = "#/components/schemas/"
TEXT: Json = {"type": "string"}
_WHOLE: Json = {"type": "integer"}
_REAL: Json = {"type": "number"}
_FLAG: Json = {"type": "boolean"}
_NULL: Json = {"type": "null"}
_KINDS: dict[type, Json] = {str: TEXT, bool: _FLAG, dict: {"type": "object"}, object: {}}


def ref(name: str) -> Json:
    return {"$ref": _PREFIX + name}


_MESSAGES: Json = {"type": "array", "items": ref("Message"), "minItems": 1}
_FORMS = (
    CompletionForm,
    ChatForm,
    ResponsesForm,
    GenerateForm,
    ScoringBody,
    UpdateWeightsForm,
    batches.BatchForm,
)
# other fields of a form that are accepted or refused, by the form's name
_POLICIES = {**BY_FORM, "GenerateForm": GENERATE, "ScoringBody": SCORING}


def request_schemas(model: str, longest: int, vocabulary: int) -> dict[str, Json]:
    """Returns the request schemas by name, for a model of this name, context length (`longest`) and
    vocabulary size."""
    _, found = msgspec.json.schema_components(_FORMS, ref_template=_PREFIX + "{name}")
    told = _ranges(model, longest, vocabulary)
    special = _special(vocabulary)
    for form, policies in _POLICIES.items():
        schema = found[form]
        known: dict[str, Json] = {**told, **special[form]} if form in special else {}
        properties: Json = schema["properties"]
        for name in properties:
            kind = {**properties, **known}[name]
            properties[name] = kind if name in schema.get("required", ()) else _or_null(kind)
        properties |= {name: _harmless(policy) for name, policy in policies.items() if policy.taken}
    completion, generate = (
        found[form]["properties"] for form in ("CompletionForm", "GenerateForm")
    )
    generate |= {name: completion[name] for name in OUTSIDE}
    generate["sampling_params"]["properties"] = {
        **{name: completion[name] for name in INSIDE},
        "max_tokens": _or_null(told["max_tokens"]),  # 0 is for `echo`, which is not here
    }
    return found


def _ranges(model: str, longest: int, vocabulary: int) -> dict[str, Json]:
    """Returns the schemas of the fields that completions and chats share, by field name."""
    return {
        **{name: _real(*bounds) for name, bounds in RANGES.items()},
        **{name: _whole(*WHOLE[name]) for name in WHOLE.keys() - {"logprobs"}},
        "model": {"type": "string", "enum": [model, ""]},
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
        "stop": _one_or_more(
            {**TEXT, "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}, maxItems=MAX_STOPS
        ),
        "bad_words": {
            "type": "array",
            "items": {**TEXT, "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
            "maxItems": MAX_STOPS,
        },
        "stop_token_ids": {
            "type": "array",
            "items": _whole(0, vocabulary - 1),
            "maxItems": MAX_STOP_TOKENS,
        },
        "truncate_prompt_tokens": _whole(1),
        "timeout": _real(0, LONGEST_TIMEOUT, open_low=True),
        "cache_salt": {**TEXT, "minLength": 1, "maxLength": MAX_SALT_LENGTH},
    }


def _special(vocabulary: int) -> dict[str, dict[str, Json]]:
    """Returns the schemas of fields that only one form has, by form and field name."""
    ids = {"type": "array", "items": _whole(0, vocabulary - 1), "minItems": 1}
    texts, several = ({"type": "array", "items": each, "minItems": 1} for each in (TEXT, ids))
    logprobs = _whole(*WHOLE["logprobs"])
    return {
        "CompletionForm": {
            "prompt": {"anyOf": [TEXT, ids, texts, several]},
            "max_tokens": _whole(0),  # 0 is only valid with echo
            "logprobs": logprobs,
            "best_of": _whole(*WHOLE["n"]),
        },
        "ChatForm": {
            "messages": _MESSAGES,
            "max_completion_tokens": _whole(1),
            "top_logprobs": logprobs,
        },
        "ResponsesForm": {"max_output_tokens": _whole(1)},
        "GenerateForm": {"token_ids": ids, "request_id": {**TEXT, "pattern": f"^{REQUEST_ID}$"}},
        "ScoringBody": {
            "query": {"anyOf": [TEXT, ids]},
            "items": {"anyOf": [texts, several]},
            "label_token_ids": {**ids, "maxItems": MAX_LOGPROBS, "uniqueItems": True},
        },
    }


def _harmless(policy: Argument) -> Json:
    """Returns the schema of a field that is accepted and changes nothing."""
    if isinstance(policy.taken, type):
        return {**_or_null(_KINDS[policy.taken]), "description": policy.note}
    return {"enum": [*policy.taken, None], "description": policy.note}


def _or_null(schema: Json) -> Json:
    """Returns the schema with null allowed, which means that the field was left out."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind != _NULL]
    plain = [{key: value for key, value in kind.items() if key != "default"} for kind in kinds]
    found: Json = {"anyOf": [*plain, _NULL]}
    return found if schema.get("default") is None else {**found, "default": schema["default"]}


def _whole(low: int, high: int | None = None) -> Json:
    return {**_WHOLE, "minimum": low, "maximum": 2**63 - 1 if high is None else high}


def _real(low: float, high: float, open_low: bool = False) -> Json:
    return {**_REAL, "exclusiveMinimum" if open_low else "minimum": low, "maximum": high}


def _one_or_more(item: Json, **more: Any) -> Json:
    return {"anyOf": [item, {"type": "array", "items": item, **more}]}


UPLOAD: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
    "additionalProperties": False,
}
TOKENIZE: Json = {
    "type": "object",
    "properties": {
        "model": TEXT,
        "prompt": TEXT,
        "messages": _MESSAGES,
        "add_special_tokens": _FLAG,
        "return_token_strs": _FLAG,
    },
    "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
}
DETOKENIZE: Json = {
    "type": "object",
    "required": ["tokens"],
    "properties": {"model": _or_null(TEXT), "tokens": {"type": "array", "items": _WHOLE}},
    "additionalProperties": False,
}


def answer_schemas(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, Json]:
    """Returns the schemas of these answers and their parts by name. A field with a default is
    required too: only one that is UNSET is left out of an answer."""
    _, found = msgspec.json.schema_components(kinds, ref_template=_PREFIX + "{name}")
    for schema in found.values():
        given, properties = schema["required"], schema["properties"]
        schema["required"] = [
            name for name in properties if "default" in properties[name] or name in given
        ]
        for each in properties.values():
            each.pop("default", None)
    return found

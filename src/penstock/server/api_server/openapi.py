"""Builds the OpenAPI document /openapi.json. It has a description of each operation, and the JSON
Schemas of all bodies.

The request schemas are as exact as a schema can be: msgspec's types, with null, the ranges of
SamplingParams, the model's limits and the accepted vLLM fields added. Conditions on several fields,
or on a prompt's tokens, are in no schema; a request that breaks them gets status 400. All errors
have the same schema. Knows operations and body structs; no request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from penstock import __version__
from penstock.server.api_server.openapi_schemas import (
    EVENTS,
    LINES,
    TEXT,
    Json,
    answer_schemas,
    ref,
    request_schemas,
)
from penstock.server.online.auth import OPEN_PATHS, AccessPolicy
from penstock.server.online.buffered import JSON
from penstock.server.openai.answer_objects import Error

# --- operations of the HTTP API


@dataclass(frozen=True, slots=True)
class Told:
    """Description of an operation. answer: the answer's struct, or its media type. body: the
    request body by media type. events: struct of an event, if answers may be streamed. query:
    query parameters. again: True if status 503 has the same body as 200.
    """

    answer: type[Struct] | str
    body: Json | None = None
    events: type[Struct] | None = None
    query: tuple[Json, ...] = ()
    again: bool = False


BULK: Json = {
    LINES: {"schema": {**TEXT, "description": "a completion's body a line, with a custom_id"}}
}


def in_json(schema: Json, **example: Any) -> Json:
    """Returns the OpenAPI description of a JSON body with this schema. example: fields of a valid
    body."""
    return {JSON: {"schema": schema, **({"example": example} if example else {})}}


def asked(name: str, **schema: Any) -> Json:
    """Returns the OpenAPI description of an optional query parameter."""
    return {"name": name, "in": "query", "required": False, "schema": schema}


def page(most: int) -> tuple[Json, ...]:
    """Returns the query parameters of a paged list with at most `most` entries per page."""
    return asked("after", type="string"), asked("limit", type="integer", minimum=1, maximum=most)


_ID = "$response.body#/id"
_OF_BATCH = {"parameters": {"batch_id": _ID}}
_OF_FILE = {"parameters": {"file_id": _ID}}
# OpenAPI links from an operation's answer to the inputs of other operations, for tools that call
# several in sequence.
_LINKS: dict[str, dict[str, Json]] = {
    "POST /v1/files": {
        "GET /v1/files/{file_id}": _OF_FILE,
        "GET /v1/files/{file_id}/content": _OF_FILE,
        "DELETE /v1/files/{file_id}": _OF_FILE,
        "POST /v1/batches": {"requestBody": {"input_file_id": _ID}},
    },
    "POST /v1/batches": {
        "GET /v1/batches/{batch_id}": _OF_BATCH,
        "POST /v1/batches/{batch_id}/cancel": _OF_BATCH,
    },
}


def describe(
    operations: Mapping[str, tuple[str, Told]],
    *,
    model: str,
    longest: int,
    vocabulary: int,
    access: AccessPolicy,
) -> Json:
    """Returns the OpenAPI document of `operations`, each with its handler's name, for a model of
    this name, context length and vocabulary size, under this access policy."""
    paths: dict[str, Json] = {}
    ids = {}
    for operation, (name, told) in operations.items():
        method, path = operation.lower().split(" ")
        ids[operation] = re.sub(r"\W", "_", f"{name}{path}") + f"_{method}"
        paths.setdefault(path, {})[method] = {
            "summary": name.replace("_", " ").title(),
            "operationId": ids[operation],
            **_described(told, path, access),
        }
    for source, links in _LINKS.items():
        method, path = source.lower().split(" ")
        found = {
            ids[target]: {"operationId": ids[target], **link} for target, link in links.items()
        }
        paths[path][method]["responses"]["200"]["links"] = found
    kinds = {
        kind
        for _, told in operations.values()
        for kind in (told.answer, told.events)
        if isinstance(kind, type)
    }
    answers = answer_schemas(sorted({Error, *kinds}, key=lambda kind: kind.__name__))
    components: Json = {"schemas": request_schemas(model, longest, vocabulary) | answers}
    if access.keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "Penstock", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _described(told: Told, path: str, access: AccessPolicy) -> Json:
    good = {"description": "As asked.", "content": _content(told)}
    error = {
        "description": "It is not served; the message says why.",
        "content": in_json(ref(Error.__name__)),
    }
    found: Json = {
        "responses": {"200": good, **({"503": good} if told.again else {}), "default": error}
    }
    named = [
        {**asked(name, type="string"), "in": "path", "required": True}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if named or told.query:
        found["parameters"] = [*named, *told.query]
    if told.body is not None:
        found["requestBody"] = {"required": True, "content": told.body}
    if access.keys and path not in OPEN_PATHS:
        found["security"] = [{"key": []}]
    return found


def _content(told: Told) -> Json:
    """Returns the OpenAPI content of an answer. A media type without a schema stands for bytes or
    text."""
    if isinstance(told.answer, str):
        return {told.answer: {}}
    found = in_json(ref(told.answer.__name__))
    if told.events is not None:
        kinds = {"anyOf": [ref(told.events.__name__), ref(Error.__name__)]}
        data = {**TEXT, "contentMediaType": JSON, "contentSchema": kinds}
        event = {"data": {"anyOf": [data, {"const": "[DONE]"}]}}
        found[EVENTS] = {"schema": {"type": "object", "required": ["data"], "properties": event}}
    return found

"""What /openapi.json says of each operation beyond its path: bodies, parameters, every status that it may answer, in
one table that a test holds against the routes. It knows operations and schemas; no request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from penstock import __version__
from penstock.server.batch import batches, files
from penstock.server.online.auth import OPEN_PATHS, PROBES, AccessPolicy
from penstock.server.online.buffered import JSON
from penstock.server.process.openapi_schemas import ANSWERS, BATCH, UPLOAD, Json, ref, request_schemas

EVENTS = "text/event-stream"
BYTES = "application/octet-stream"
_ANYWHERE = (400, 408, 431, 500)  # bytes that are no request, headers that are too slow or too large, a fault of ours
_STATUSES = {
    200: "As asked.",
    400: "The request cannot be served as it is; `param` names the field.",
    401: "No API key, or a wrong one.",
    403: "The Host or the Origin is not this server's.",
    404: "There is nothing of this name here.",
    408: "It, or its answer, took longer than is allowed.",
    409: "Something stands against it now that may not later.",
    413: "The body is too large.",
    429: "As much as is taken is under way: send it again after the seconds in Retry-After.",
    431: "The headers are too large.",
    500: "A fault of the server, or of the engine at this request.",
    503: "Not at this moment: the server or its engine is on its way out, or has no room for a large body.",
    507: "The disk of the server's state folder is full, or fails.",
}


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of an operation: what it answers with (names of schemas or media types), the statuses beside those
    of all, its body by media type, its query's parameters. again: what it says at 503 is what it says at 200."""

    answers: tuple[str, ...]
    statuses: tuple[int, ...] = ()
    body: Json | None = None
    query: tuple[Json, ...] = ()
    again: bool = False


def _json(schema: Json) -> Json:
    return {JSON: {"schema": schema}}


def _asked(name: str, **schema: Any) -> Json:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _page(most: int) -> tuple[Json, ...]:
    return _asked("after", type="string"), _asked("limit", type="integer", minimum=1, maximum=most)


_CREATING = (404, 413)
_FILES_QUERY = (*_page(files.MOST_LISTED), _asked("order", type="string", enum=["asc", "desc"]))
OPERATIONS = {
    "POST /v1/completions": Told(("Completion", EVENTS), (*_CREATING, 503), _json(ref("CompletionForm"))),
    "POST /v1/chat/completions": Told(("ChatCompletion", EVENTS), (*_CREATING, 503), _json(ref("ChatForm"))),
    "GET /v1/models": Told(("Models",)),
    "GET /v1/models/{model}": Told(("Model",), (404,)),
    "POST /v1/files": Told(("File",), (*_CREATING, 507), {"multipart/form-data": {"schema": UPLOAD}}),
    "GET /v1/files": Told(("Files",), (404, 507), query=(*_FILES_QUERY, _asked("purpose", type="string"))),
    "GET /v1/files/{file_id}": Told(("File",), (404, 507)),
    "GET /v1/files/{file_id}/content": Told((BYTES,), (404, 507)),
    "DELETE /v1/files/{file_id}": Told(("DeletedFile",), (404, 409, 507)),
    "POST /v1/batches": Told(("Batch",), (*_CREATING, 507), _json(BATCH)),
    "GET /v1/batches": Told(("Batches",), (404, 507), query=_page(batches.MOST_LISTED)),
    "GET /v1/batches/{batch_id}": Told(("Batch",), (404, 507)),
    "POST /v1/batches/{batch_id}/cancel": Told(("Batch",), (404, 409, 507)),
    "GET /health/live": Told(("Live",)),
    "GET /health/ready": Told(("Ready",), (503,), again=True),
    "GET /health": Told(("Ready",), (503,), again=True),
    "GET /health/engine": Told(("EngineState",), (503,), again=True),
    "GET /version": Told(("Version",)),
    "GET /metrics": Told((CONTENT_TYPE_LATEST.partition(";")[0],)),
}

_ID = "$response.body#/id"
_OF_BATCH = {"parameters": {"batch_id": _ID}}
_OF_FILE = {"parameters": {"file_id": _ID}}
# What the answer of one operation is to others, for tools that follow operations one after another.
LINKS: dict[str, dict[str, Json]] = {
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


def describe(operations: Mapping[str, str], *, model: str, longest: int, vocabulary: int, access: AccessPolicy) -> Json:
    """Returns the document of these operations, each with the name of who serves it, for a model of this name, context
    and vocabulary, with this access policy. Every operation must be in the table."""
    paths: dict[str, Json] = {}
    ids = {}
    for operation, name in operations.items():
        method, path = operation.lower().split(" ")
        ids[operation] = re.sub(r"\W", "_", f"{name}{path}") + f"_{method}"
        paths.setdefault(path, {})[method] = {
            "summary": name.replace("_", " ").title(), "operationId": ids[operation],
            **_described(OPERATIONS[operation], path, access),
        }  # fmt: skip
    for source, links in LINKS.items():
        method, path = source.lower().split(" ")
        told = {ids[target]: {"operationId": ids[target], **link} for target, link in links.items()}
        paths[path][method]["responses"]["200"]["links"] = told
    components: Json = {"schemas": request_schemas(model, longest, vocabulary) | ANSWERS}
    if access.keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "Penstock", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _described(told: Told, path: str, access: AccessPolicy) -> Json:
    found: Json = {"responses": _responses(told, path, access)}
    named = [{**_asked(name, type="string"), "in": "path", "required": True} for name in re.findall(r"{(\w+)}", path)]
    if named or told.query:
        found["parameters"] = [*named, *told.query]
    if told.body is not None:
        found["requestBody"] = {"required": True, "content": told.body}
    if access.keys and path not in OPEN_PATHS:
        found["security"] = [{"key": []}]
    return found


def _responses(told: Told, path: str, access: AccessPolicy) -> Json:
    good = {"description": _STATUSES[200], "content": _content(told.answers)}
    found: Json = {"200": good}
    for status in sorted({*_ANYWHERE, *told.statuses, *_access_statuses(path, access)}):
        found[str(status)] = {"description": _STATUSES[status], "content": _json(ref("Error"))}
    if told.again:
        found["503"] = {**good, "description": _STATUSES[503]}
    if "429" in found:
        found["429"]["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    return found


def _access_statuses(path: str, access: AccessPolicy) -> tuple[int, ...]:
    crowded = () if path.startswith(PROBES) else (429,)
    if path in OPEN_PATHS:
        return crowded
    return (*((401,) if access.keys else ()), *((403,) if access.asks_host else ()), *crowded)


def _content(answers: tuple[str, ...]) -> Json:
    """A media type without a schema is bytes or text as they come."""
    found: Json = {}
    for answer in answers:
        found |= _json(ref(answer)) if answer in ANSWERS else {answer: {}}
    return found

"""The server's routes and error answers. Any input gets an answer in OpenAI's format. Knows HTTP;
the handlers do the work, and openapi.py describes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache, partial, wraps
from typing import IO, Any, Literal, get_args

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from penstock import __version__
from penstock.engine.control import Mode
from penstock.errors import FaultError, PenstockError
from penstock.sandbox.sandbox_process import Tokens
from penstock.server.api_server.not_served import not_served
from penstock.server.api_server.openapi import BULK, Told, asked, describe, in_json, page
from penstock.server.api_server.openapi_schemas import (
    BYTES,
    DETOKENIZE,
    LINES,
    TOKENIZE,
    UPLOAD,
    ref,
)
from penstock.server.batch import batches, files
from penstock.server.batch.bulk import BulkService, post_bulk
from penstock.server.batch.manager import BatchManager
from penstock.server.online import control_handlers, handlers, token_handlers
from penstock.server.online.access_log import AccessLog
from penstock.server.online.active_call import ClientGoneError
from penstock.server.online.app_state import AppState, EngineState, Readiness
from penstock.server.online.auth import PROBES, ROOT, AccessPolicy, AuthMiddleware, key_of
from penstock.server.online.buffered import json_response
from penstock.server.online.cors import PageAccess
from penstock.server.online.request_limits import NOBODY
from penstock.server.openai import answer_objects as made
from penstock.server.openai.http_errors import CLOSED_BY_CLIENT, FAILED, HttpError, check_model

WHAT = {
    "service": "penstock, an inference engine that serves OpenAI's HTTP API",
    "api": "/v1",
    "openapi": "/openapi.json",
    "health": "/health",
    "docs": "docs/server.md in Penstock's sources; `penstock serve --help`",
}


def build_app(
    service: AppState,
    access: AccessPolicy | None = None,
    access_log: IO[bytes] | None = None,
    manager: BatchManager | None = None,
) -> Starlette:
    """Returns the ASGI application over a running engine. access: access policy; None: everybody.
    access_log: file that gets a line per request. manager: manager of files and batches; None
    without a folder for them (--state-dir)."""
    access = access or AccessPolicy()
    routes = [
        ServerRoute(operation, work, service, told) for operation, (work, told) in _ONLINE.items()
    ]
    routes += [
        ServerRoute(operation, _owned(work), manager, told)
        for operation, (work, told) in _BATCHES.items()
    ]
    routes.append(ServerRoute("POST /v1/bulk", post_bulk, BulkService(service), Told(LINES, BULK)))
    described = cache(lambda: _describe(service, access, routes))

    async def get_openapi(request: Request) -> Response:
        return json_response(described())

    middleware = [Middleware(AuthMiddleware, access=access)]
    # CORS comes before authentication: a preflight request has no key, and a page must be able to
    # read error answers.
    if access.origins:
        middleware.insert(0, Middleware(PageAccess, access=access))
    if access_log is not None:  # outermost, so that refused requests are logged too
        middleware.insert(0, Middleware(AccessLog, file=access_log))
    errors: dict[Any, Any] = {
        PenstockError: _on_ours,
        HTTPException: _on_http,
        ClientGoneError: _on_gone,
        ClientDisconnect: _on_gone,
        Exception: partial(_on_fault, access),
    }
    every = [*routes, Route("/openapi.json", get_openapi), Route(ROOT, get_root)]
    app = Starlette(routes=every, middleware=middleware, exception_handlers=errors)
    app.router.redirect_slashes = False
    return app


class ServerRoute(Route):
    """The route of one operation, given as `GET /path`, with its handler and description. Health
    probes also answer HEAD, which some load balancers use."""

    def __init__(
        self,
        operation: str,
        work: Callable[[Any, Request], Awaitable[Response]],
        over: Any,
        told: Told,
    ) -> None:
        method, path = operation.split(" ")
        super().__init__(path, partial(work, over), name=work.__name__)
        self.methods = {method, "HEAD"} if path.startswith(PROBES) else {method}
        self.operation, self.told = f"{method} {self.path_format}", told

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self}  # the access log reads the route there


class Model(Struct, kw_only=True):
    """OpenAI's model object."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["penstock"] = "penstock"
    max_model_len: int


class Models(Struct, kw_only=True):
    """The answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Live(Struct):
    """The answer of GET /health/live."""

    live: bool = True


class Version(Struct):
    """The answer of GET /version."""

    version: str


class ServerLoad(Struct):
    """The answer of GET /load. server_load: samples asked for and not answered yet."""

    server_load: int


async def get_root(request: Request) -> Response:
    """GET /: answers what this server is, for a visitor with a browser. Doesn't name the model,
    since the path needs no key."""
    return json_response(WHAT)


async def get_models(service: AppState, request: Request) -> Response:
    return json_response(Models(data=[_card(service)]))


async def get_model(service: AppState, request: Request) -> Response:
    check_model(request.path_params["model"], service.model)
    return json_response(_card(service))


async def get_live(service: AppState, request: Request) -> Response:
    return json_response(Live())


async def get_ready(service: AppState, request: Request) -> Response:
    return json_response(service.readiness(), 200 if service.ready else 503)


async def get_engine(service: AppState, request: Request) -> Response:
    state, well = service.engine_state()
    return json_response(state, 200 if well else 503)


async def get_version(service: AppState, request: Request) -> Response:
    return json_response(Version(__version__))


async def get_load(service: AppState, request: Request) -> Response:
    """GET /load: answers the number of samples that were requested from this process and not
    answered yet."""
    return json_response(ServerLoad(service.request_limits.reqs.total))


async def get_metrics(service: AppState, request: Request) -> Response:
    return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})


_FORM = in_json(ref("CompletionForm"), prompt="Once upon a time", max_tokens=16)
_CHAT = in_json(
    ref("ChatForm"), messages=[{"role": "user", "content": "Who are you?"}], max_tokens=16
)
_RESPONSE = in_json(ref("ResponsesForm"), input="Who are you?", max_output_tokens=16)
_SLEEP_QUERY = (
    asked("level", type="integer", enum=[1, 2]),
    asked("mode", type="string", enum=[*get_args(Mode)]),
)
_WAKE_QUERY = (asked("tags", type="array", items={"enum": ["weights", "kv_cache"]}),)
_FILES_QUERY = (*page(files.MOST_LISTED), asked("order", type="string", enum=["asc", "desc"]))
_ONLINE: dict[str, tuple[Callable[[AppState, Request], Awaitable[Response]], Told]] = {
    "POST /v1/completions": (
        handlers.post_completions,
        Told(made.Completion, _FORM, made.CompletionChunk),
    ),
    "POST /v1/chat/completions": (
        handlers.post_chat,
        Told(made.ChatCompletion, _CHAT, made.ChatCompletionChunk),
    ),
    "POST /inference/v1/generate": (
        handlers.post_generate,
        Told(made.Generated, in_json(ref("GenerateForm")), made.GeneratedChunk),
    ),
    "POST /v1/responses": (
        handlers.post_responses,
        Told(made.Response, _RESPONSE, made.ResponseEvent),
    ),
    "POST /generative_scoring": (
        handlers.post_scoring,
        Told(made.Scores, in_json(ref("ScoringBody"))),
    ),
    "POST /tokenize": (token_handlers.post_tokenize, Told(Tokens, in_json(TOKENIZE))),
    "POST /detokenize": (
        token_handlers.post_detokenize,
        Told(token_handlers.Text, in_json(DETOKENIZE)),
    ),
    "GET /tokenizer_info": (token_handlers.get_tokenizer_info, Told(token_handlers.TokenizerInfo)),
    "GET /v1/models": (get_models, Told(Models)),
    "GET /v1/models/{model:path}": (get_model, Told(Model)),
    "GET /health/live": (get_live, Told(Live)),
    "GET /health/ready": (get_ready, Told(Readiness, again=True)),
    "GET /health": (get_ready, Told(Readiness, again=True)),
    "GET /health/engine": (get_engine, Told(EngineState, again=True)),
    "POST /admin/restart": (control_handlers.post_restart, Told(control_handlers.Restart)),
    "POST /update_weights": (
        control_handlers.post_update_weights,
        Told(control_handlers.Updated, in_json(ref("UpdateWeightsForm"))),
    ),
    "POST /reset_prefix_cache": (
        control_handlers.post_reset_prefix_cache,
        Told(control_handlers.Done),
    ),
    "POST /sleep": (control_handlers.post_sleep, Told(control_handlers.Slept, query=_SLEEP_QUERY)),
    "POST /wake_up": (
        control_handlers.post_wake_up,
        Told(control_handlers.Slept, query=_WAKE_QUERY),
    ),
    "GET /is_sleeping": (control_handlers.get_is_sleeping, Told(control_handlers.Sleeping)),
    "GET /weights_version": (
        control_handlers.get_weights_version,
        Told(control_handlers.WeightsVersion),
    ),
    "GET /ping": (get_live, Told(Live)),
    "POST /ping": (get_live, Told(Live)),
    "GET /load": (get_load, Told(ServerLoad)),
    "GET /version": (get_version, Told(Version)),
    "GET /metrics": (get_metrics, Told(CONTENT_TYPE_LATEST.partition(";")[0])),
}
_BATCHES: dict[str, tuple[Callable[[BatchManager, Request, str], Awaitable[Response]], Told]] = {
    "POST /v1/files": (
        files.post_file,
        Told(files.FileObject, {"multipart/form-data": {"schema": UPLOAD}}),
    ),
    "GET /v1/files": (
        files.list_files,
        Told(files.Files, query=(*_FILES_QUERY, asked("purpose", type="string"))),
    ),
    "GET /v1/files/{file_id}": (files.get_file, Told(files.FileObject)),
    "GET /v1/files/{file_id}/content": (files.get_content, Told(BYTES)),
    "DELETE /v1/files/{file_id}": (files.delete_file, Told(files.DeletedFile)),
    "POST /v1/batches": (batches.post_batch, Told(batches.BatchObject, in_json(ref("BatchForm")))),
    "GET /v1/batches": (
        batches.list_batches,
        Told(batches.Batches, query=page(batches.MOST_LISTED)),
    ),
    "GET /v1/batches/{batch_id}": (batches.get_batch, Told(batches.BatchObject)),
    "POST /v1/batches/{batch_id}/cancel": (batches.cancel_batch, Told(batches.BatchObject)),
}
NO_STATE = "this server keeps no files and no batches: start it with --state-dir FOLDER"


def _owned(
    work: Callable[[BatchManager, Request, str], Awaitable[Response]],
) -> Callable[..., Awaitable[Response]]:
    """Wraps a handler of files or batches: passes it the name of the request's API key, which owns
    files and batches. Without keys everybody sees all of them."""

    @wraps(work)
    async def serve(manager: BatchManager | None, request: Request) -> Response:
        if manager is None:
            raise HttpError(NO_STATE, status=404, code="not_served")
        key = key_of(request.scope)
        return await work(manager, request, NOBODY if key is None else key.name)

    return serve


async def _on_ours(request: Request, error: Any) -> Response:
    return handlers.refuse(request, error)


async def _on_http(request: Request, error: Any) -> Response:
    what, code = "there is no such path", "not_found"
    if error.status_code == 405:
        what, code = "this path takes another method", "method_not_allowed"
    message = f"{what}: GET /openapi.json lists what is served"
    if (instead := not_served(request.url.path)) is not None:
        message, code = instead, "not_served"
    response = handlers.refuse(request, HttpError(message, status=error.status_code, code=code))
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        response.headers["allow"] = _allowed(request)
    return response


async def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLOSED_BY_CLIENT)


async def _on_fault(access: AccessPolicy, request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, and uvicorn logs it.
    response = handlers.refuse(request, FaultError(FAILED))
    # this handler runs outside all middleware, so it adds the CORS headers itself
    response.headers.update(access.answer_headers(request.headers.raw))
    return response


def _allowed(request: Request) -> str:
    """Returns the methods of all routes of a path, for the Allow header. Starlette would name only
    the first route's."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return ", ".join(sorted(found))


def _card(service: AppState) -> Model:
    return Model(
        id=service.model,
        created=service.created,
        max_model_len=service.client.facts.max_model_len,
    )


def _describe(service: AppState, access: AccessPolicy, routes: list[ServerRoute]) -> dict[str, Any]:
    facts, operations = (
        service.client.facts,
        {route.operation: (route.name, route.told) for route in routes},
    )
    return describe(
        operations,
        model=service.model,
        longest=facts.max_model_len,
        vocabulary=facts.vocab_size,
        access=access,
    )

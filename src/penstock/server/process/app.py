"""The routes, three lines each, and the shape of every error. Knows HTTP; all work is handlers'.

Bodies are read by our own forms, so that any input at all gets an answer in OpenAI's shape; what /openapi.json says of
them is openapi's.
"""

from __future__ import annotations

from typing import IO, Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from penstock import __version__
from penstock.errors import FaultError, PenstockError
from penstock.server.batch.manager import BatchManager
from penstock.server.batch.routes import add_batch_routes
from penstock.server.online import handlers
from penstock.server.online.access_log import AccessLog
from penstock.server.online.active_call import ClientGoneError
from penstock.server.online.app_state import AppState
from penstock.server.online.auth import AccessPolicy, AuthMiddleware
from penstock.server.online.buffered import JSON
from penstock.server.openai.http_errors import CLOSED_BY_CLIENT, FAILED, HttpError, check_model
from penstock.server.process.openapi import describe


def build_app(
    service: AppState,
    access: AccessPolicy | None = None,
    access_log: IO[bytes] | None = None,
    manager: BatchManager | None = None,
) -> FastAPI:
    """Returns the ASGI application over a running engine. access_log: where a line for each request goes. manager:
    files and batches, where there is a state folder."""
    app = FastAPI(title="Penstock", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_openai_routes(app, service)
    add_batch_routes(app, manager)
    _add_health_routes(app, service)
    _add_error_shapes(app)
    _add_description(app, service, access or AccessPolicy())
    app.add_middleware(AuthMiddleware, access=access or AccessPolicy())
    if access_log is not None:
        app.add_middleware(AccessLog, file=access_log)
    return app


def _add_openai_routes(app: FastAPI, service: AppState) -> None:
    @app.post("/v1/completions")
    async def post_completions(request: Request) -> Response:
        return await handlers.post_completions(service, request)

    @app.post("/v1/chat/completions")
    async def post_chat(request: Request) -> Response:
        return await handlers.post_chat(service, request)

    @app.get("/v1/models")
    async def get_models() -> Response:
        return _json({"object": "list", "data": [_card(service)]})

    @app.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        check_model(model, service.model)
        return _json(_card(service))


def _add_health_routes(app: FastAPI, service: AppState) -> None:
    # Some load balancers probe by HEAD; it is no operation of its own in /openapi.json.
    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live")
    async def get_live() -> Response:
        return _json({"live": True})

    @app.head("/health/ready", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/health/ready")
    @app.get("/health")
    async def get_ready() -> Response:
        return _json({"ready": service.ready}, 200 if service.ready else 503)

    @app.head("/health/engine", include_in_schema=False)
    @app.get("/health/engine")
    async def get_engine() -> Response:
        state, well = service.engine_state()
        return _json(state, 200 if well else 503)

    @app.get("/version")
    async def get_version() -> Response:
        return _json({"version": __version__})

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})


def _add_error_shapes(app: FastAPI) -> None:
    @app.exception_handler(PenstockError)
    async def on_ours(request: Request, error: PenstockError) -> Response:
        return handlers.refuse(request, error)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        what, code = "there is no such path", "not_found"
        if error.status_code == 405:
            what, code = "this path takes another method", "method_not_allowed"
        message = f"{what}: GET /openapi.json lists what is served"
        response = handlers.refuse(request, HttpError(message, status=error.status_code, code=code))
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["allow"] = _allowed(request)
        return response

    @app.exception_handler(ClientGoneError)
    @app.exception_handler(ClientDisconnect)
    async def on_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLOSED_BY_CLIENT)

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, and uvicorn logs it: a fault of ours is never silent.
        return handlers.refuse(request, FaultError(FAILED))


def _allowed(request: Request) -> str:
    """The methods of a path, of all its routes: Starlette names those of the first alone."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return ", ".join(sorted(found))


def _card(service: AppState) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "penstock",
        "max_model_len": service.client.facts.max_model_len,
    }


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type=JSON)


def _add_description(app: FastAPI, service: AppState, access: AccessPolicy) -> None:
    plain, facts = app.openapi, service.client.facts

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = plain()
            describe(
                described, model=service.model, longest=facts.max_model_len, vocabulary=facts.vocab_size, access=access
            )
        return plain()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the schema

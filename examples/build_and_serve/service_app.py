"""The service over HTTP: POST /generate with {prompts, settings}; /openapi.json and /docs say how.

    python service_app.py MODEL [PORT]

It knows Starlette and the forms of `fitted_service`, which say what is taken and what comes back.
"""

from __future__ import annotations

import html
import json
import sys
from typing import Any

import uvicorn
from fitted_service import Batch, FittedService, Settings
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from penstock.errors import PenstockError

REF = "#/components/schemas/{model}"


class Asked(BaseModel):
    """A batch of prompts, and how to answer them."""

    model_config = ConfigDict(extra="forbid")

    prompts: list[str] = Field(
        min_length=1, description="Any number; the model was fitted to 128 at once."
    )
    settings: Settings = Settings()


def make_app(service: FittedService) -> Starlette:
    """Returns the application over a service that is ready."""

    async def generate(request: Request) -> Response:
        try:
            asked = Asked.model_validate_json(await request.body())
            batch = await run_in_threadpool(service.answer, asked.prompts, asked.settings)
        except ValidationError as error:
            return JSONResponse(
                {
                    "detail": error.errors(
                        include_url=False, include_context=False, include_input=False
                    )
                },
                422,
            )
        except PenstockError as error:
            return JSONResponse({"detail": str(error)}, 400)
        return JSONResponse(batch.model_dump())

    async def told(request: Request) -> Response:
        return JSONResponse(openapi())

    async def docs(request: Request) -> Response:
        return HTMLResponse(page(openapi(), str(request.base_url)))

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/openapi.json", told),
        Route("/docs", docs),
    ]
    return Starlette(routes=routes)


def openapi() -> dict[str, Any]:
    """Returns the OpenAPI document of the service, made of its forms."""
    schemas: dict[str, Any] = {}
    for form in (Asked, Batch):
        schema = form.model_json_schema(ref_template=REF)
        schemas |= schema.pop("$defs", {}) | {form.__name__: schema}
    body = {"application/json": {"schema": {"$ref": REF.format(model="Asked")}}}
    answer = {"application/json": {"schema": {"$ref": REF.format(model="Batch")}}}
    responses = {
        "200": {"description": "The answers, in the order of the prompts.", "content": answer},
        "400": {"description": "What the model cannot be asked, in a line."},
        "422": {"description": "A body that is not of the form, field by field."},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "A fitted service", "version": "1"},
        "paths": {
            "/generate": {
                "post": {
                    "summary": "Answers a batch of prompts.",
                    "operationId": "generate",
                    "requestBody": {"required": True, "content": body},
                    "responses": responses,
                }
            }
        },
        "components": {"schemas": schemas},
    }


def page(document: dict[str, Any], address: str) -> str:
    """Returns the document as a page that needs nothing else. address: the service's, as who asks
    has it."""
    schemas = document["components"]["schemas"].items()
    forms = "".join(
        f"<h2>{name}</h2><pre>{html.escape(json.dumps(form, indent=2))}</pre>"
        for name, form in schemas
    )
    example = json.dumps(
        {"prompts": ["Why does ice float?"], "settings": {"temperature": 0.1, "top_k": 1}}
    )
    curl = f"curl -X POST {address}generate -d '{example}'"
    return (
        f"<!doctype html><title>{document['info']['title']}</title><h1>POST"
        " /generate</h1><p>Answers a batch of prompts. The whole of it: <a"
        f" href='/openapi.json'>/openapi.json</a></p><pre>{html.escape(curl)}</pre>{forms}"
    )


def main(model: str, port: int) -> None:
    """Serves until it is stopped."""
    service = FittedService(model)
    try:
        uvicorn.run(make_app(service), host="127.0.0.1", port=port)
    finally:
        service.close()


if __name__ == "__main__":
    told = sys.argv[2] if len(sys.argv) > 2 else "8000"
    if not told.isdecimal():
        sys.exit(f"error: PORT is a number, not {told!r}")
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "demo", int(told))
    except PenstockError as error:
        sys.exit(f"error: {error}")

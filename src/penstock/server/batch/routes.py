"""The routes of files and batches, three lines each. Without a state folder each says how to get one.

It knows FastAPI and the manager; the work is files' and batches'.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from penstock.server.batch import batches, files
from penstock.server.batch.manager import BatchManager
from penstock.server.online.auth import key_of
from penstock.server.online.request_limits import NOBODY
from penstock.server.openai.http_errors import HttpError

NO_STATE = "this server keeps no files and no batches: start it with --state-dir FOLDER"


def add_batch_routes(app: FastAPI, batches_of: BatchManager | None) -> None:
    """Adds /v1/files and /v1/batches; None: there is no state folder."""

    def manager() -> BatchManager:
        if batches_of is None:
            raise HttpError(NO_STATE, status=404, code="not_served")
        return batches_of

    @app.post("/v1/files")
    async def post_file(request: Request) -> Response:
        return await files.post_file(manager(), request, owner_of(request))

    @app.get("/v1/files")
    async def list_files(request: Request) -> Response:
        return await files.list_files(manager(), request, owner_of(request))

    @app.get("/v1/files/{file_id}")
    async def get_file(file_id: str, request: Request) -> Response:
        return await files.get_file(manager(), file_id, owner_of(request))

    @app.get("/v1/files/{file_id}/content")
    async def get_content(file_id: str, request: Request) -> Response:
        return await files.get_content(manager(), file_id, owner_of(request))

    @app.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, request: Request) -> Response:
        return await files.delete_file(manager(), file_id, owner_of(request))

    @app.post("/v1/batches")
    async def post_batch(request: Request) -> Response:
        return await batches.post_batch(manager(), request, owner_of(request))

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        return await batches.list_batches(manager(), request, owner_of(request))

    @app.get("/v1/batches/{batch_id}")
    async def get_batch(batch_id: str, request: Request) -> Response:
        return await batches.get_batch(manager(), batch_id, owner_of(request))

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, request: Request) -> Response:
        return await batches.cancel_batch(manager(), batch_id, owner_of(request))


def owner_of(request: Request) -> str:
    """Returns whose files and batches a request may see: its key's; where there are no keys, everybody's."""
    key = key_of(request.scope)
    return NOBODY if key is None else key.name

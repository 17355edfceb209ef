"""The routes of files and batches. Without a state folder each says how to get one.

It knows the manager and whose a request is; the work is files' and batches'.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, update_wrapper

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.batch import batches, files
from penstock.server.batch.manager import BatchManager
from penstock.server.online.auth import key_of
from penstock.server.online.request_limits import NOBODY
from penstock.server.openai.http_errors import HttpError

NO_STATE = "this server keeps no files and no batches: start it with --state-dir FOLDER"
Work = Callable[[BatchManager, Request, str], Awaitable[Response]]

_ROUTES: dict[str, Work] = {
    "POST /v1/files": files.post_file,
    "GET /v1/files": files.list_files,
    "GET /v1/files/{file_id}": files.get_file,
    "GET /v1/files/{file_id}/content": files.get_content,
    "DELETE /v1/files/{file_id}": files.delete_file,
    "POST /v1/batches": batches.post_batch,
    "GET /v1/batches": batches.list_batches,
    "GET /v1/batches/{batch_id}": batches.get_batch,
    "POST /v1/batches/{batch_id}/cancel": batches.cancel_batch,
}


def batch_routes(manager: BatchManager | None) -> dict[str, partial[Awaitable[Response]]]:
    """Returns who serves each operation on files and batches; None: there is no state folder."""
    return {operation: partial(_served_by(work), manager) for operation, work in _ROUTES.items()}


def _served_by(work: Work) -> Callable[[BatchManager | None, Request], Awaitable[Response]]:
    async def serve(manager: BatchManager | None, request: Request) -> Response:
        if manager is None:
            raise HttpError(NO_STATE, status=404, code="not_served")
        key = key_of(request.scope)  # whose files and batches it may see; where there are no keys, everybody's
        return await work(manager, request, NOBODY if key is None else key.name)

    return update_wrapper(serve, work)

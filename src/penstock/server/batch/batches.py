"""/v1/batches: create, get, list, cancel. OpenAI's objects over the store and the manager.

It knows HTTP and what a batch is asked to be; how it runs is batch_job's.
"""

from __future__ import annotations

import time
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.batch.database import LONG, BatchRow, encoded
from penstock.server.batch.file_store import BATCH_ID, new_batch_id
from penstock.server.batch.files import conflict, file_in, limit_of, no_place, not_found, page, query, reply
from penstock.server.batch.manager import BatchManager
from penstock.server.batch.output_files import more_errors
from penstock.server.online.intake import Intake
from penstock.server.online.request_limits import LONGEST_WAIT
from penstock.server.openai import unsupported_fields
from penstock.server.openai.batch_line import ENDPOINTS
from penstock.server.openai.forms import read_object
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import HttpLimits
from penstock.vllm_arguments import named

WINDOW: Final = "24h"
MOST_LISTED, USUALLY_LISTED = 100, 20
MOST_PAIRS, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512  # of metadata
_KNOWN = ("input_file_id", "endpoint", "completion_window", "metadata")
_FATES = named("output_expires_after", (), "files stay until they are deleted")
_LIMITS = HttpLimits(max_body_bytes=64 * 1024)


async def post_batch(manager: BatchManager, request: Request, owner: str) -> Response:
    """POST /v1/batches. Raises HttpError."""
    intake = Intake(_LIMITS, manager.body_timeouts)
    with intake.place() as place:
        asked = unsupported_fields.sift(read_object(await intake.read(request, place)), _KNOWN, _FATES)
    endpoint, metadata = _check(asked)
    row = BatchRow(
        id=new_batch_id(), owner=owner, created_at=int(time.time()), endpoint=endpoint,
        input_file_id=asked["input_file_id"], metadata=None if metadata is None else encoded(metadata),
        model=manager.model,
    )  # fmt: skip
    await manager.state.call(_add, manager, row)
    manager.start(row)
    return reply(batch_object(manager, row))


def _add(manager: BatchManager, row: BatchRow) -> None:
    """Adds a batch, in the state's thread, so that nobody comes between: the file is there when the batch is. Raises
    HttpError."""
    database, most = manager.state.database, manager.limits.max_unfinished
    if file_in(database, row.input_file_id, row.owner, "input_file_id").purpose != "batch":
        raise HttpError("this file's purpose is not batch: upload the input with it", param="input_file_id")
    if database.count_unfinished(row.owner) >= most:
        message = f"{most} batches of yours are not over, and no more are taken: wait for one to end, or cancel one"
        raise HttpError(message, status=429, code="too_many_batches", headers={"retry-after": str(LONGEST_WAIT)})
    for batch_id in database.remove_over(row.owner, manager.limits.max_over):
        manager.state.file_store.remove_batch(batch_id)  # of one that failed by a fault it has lain there
    database.add_batch(row)


def _check(asked: dict[str, Any]) -> tuple[str, dict[str, str] | None]:
    """Returns endpoint and metadata. Raises HttpError."""
    for name in ("input_file_id", "endpoint", "completion_window"):
        if name not in asked:
            raise HttpError(f"{name} is missing", param=name, code="missing_required_parameter")
        if not isinstance(asked[name], str):
            raise HttpError(f"{name} must be a text", param=name)
    if asked["endpoint"] not in ENDPOINTS:
        message = f"this endpoint is not served in batches: {' and '.join(ENDPOINTS)} are"
        raise HttpError(message, param="endpoint", code="unsupported_value")
    if asked["completion_window"] != WINDOW:
        message = f"completion_window must be {WINDOW}; batches here don't expire"
        raise HttpError(message, param="completion_window", code="unsupported_value")
    return asked["endpoint"], _metadata(asked.get("metadata"))


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    message = (
        f"metadata must be an object of at most {MOST_PAIRS} texts by name, names up to {LONGEST_KEY} characters, "
        f"texts up to {LONGEST_VALUE}"
    )
    if not isinstance(given, dict) or len(given) > MOST_PAIRS:
        raise HttpError(message, param="metadata")
    for name, value in given.items():
        if len(name) > LONGEST_KEY or not isinstance(value, str) or len(value) > LONGEST_VALUE:
            raise HttpError(message, param="metadata")
    return given


async def list_batches(manager: BatchManager, request: Request, owner: str) -> Response:
    """GET /v1/batches, without errors that are long: those of a hundred may be 50 MB. Raises as list_files."""
    asked = query(request, {"after", "limit"})
    limit = limit_of(asked, USUALLY_LISTED, MOST_LISTED)
    rows = await manager.state.call(manager.state.database.list_batches, owner, asked.get("after"), limit + 1)
    if rows is None:
        raise no_place("batch")
    for row in rows:
        row.errors = more_errors(row.id) if row.errors == LONG else row.errors
    return page([batch_object(manager, row) for row in rows], limit)


async def get_batch(manager: BatchManager, request: Request, owner: str) -> Response:
    """GET /v1/batches/ID. Raises HttpError."""
    return reply(batch_object(manager, await _known(manager, request, owner)))


async def cancel_batch(manager: BatchManager, request: Request, owner: str) -> Response:
    """POST /v1/batches/ID/cancel: what is done stays. Raises HttpError."""
    state, batch_id = manager.state, (await _known(manager, request, owner)).id
    if await state.call(state.database.move, batch_id, ("validating", "in_progress"), "cancelling"):
        job = manager.job_of(batch_id)
        if job is not None:
            job.cancelled.set()
    row = await _known(manager, request, owner)
    if row.status not in ("cancelling", "cancelled"):
        raise conflict(f"a batch that is {row.status} cannot be cancelled", "batch_id")
    return reply(batch_object(manager, row))


async def _known(manager: BatchManager, request: Request, owner: str) -> BatchRow:
    row, batch_id = None, request.path_params["batch_id"]
    if BATCH_ID.fullmatch(batch_id) is not None:
        row = await manager.state.call(manager.state.database.batch, batch_id, owner)
    if row is None:
        raise not_found("there is no batch of this id: GET /v1/batches lists them", "batch_id")
    return row


class BatchObject(msgspec.Struct, kw_only=True):
    """OpenAI's batch object, with Unix seconds. Ours: `expected_at`, by the measured rate, and `waits_for`."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    model: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: Literal["24h"] = WINDOW
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: None = None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: None = None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: dict[Literal["total", "completed", "failed"], int]
    metadata: dict[str, str] | None
    expected_at: float | None = None
    waits_for: Literal["disk", "model", "turn"] | None = None


def batch_object(manager: BatchManager, row: BatchRow) -> BatchObject:
    """Returns a batch with its counts as of now."""
    job = None if row.over else manager.job_of(row.id)
    told = {name: getattr(row, name) for name in BatchObject.__struct_fields__ if hasattr(row, name)}
    told["model"] = row.model or manager.model
    told |= {name: msgspec.Raw(told[name].encode()) for name in ("errors", "metadata") if told[name] is not None}
    counted = row if job is None else job
    told["request_counts"] = {"total": row.total, "completed": counted.completed, "failed": counted.failed}
    if not row.over:
        told |= {"output_file_id": None, "error_file_id": None}
    if job is not None:
        told |= {"expected_at": job.expected_end, "waits_for": job.waits_for}
    return BatchObject(**told)

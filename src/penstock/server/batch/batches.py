"""/v1/batches: create, get, list, cancel. Answers with OpenAI's batch objects, from the database
and the manager. Knows HTTP and the body of a batch request; batch_job.py runs batches.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from penstock.server.batch.database import BatchErrors, BatchRow, encoded
from penstock.server.batch.file_store import BATCH_ID, new_batch_id
from penstock.server.batch.files import (
    Page,
    conflict,
    file_in,
    limit_of,
    no_place,
    not_found,
    page,
    query,
)
from penstock.server.batch.manager import BatchManager
from penstock.server.online.buffered import json_response
from penstock.server.online.intake import BodyRoom, Intake
from penstock.server.online.request_limits import LONGEST_WAIT
from penstock.server.openai import unsupported_fields
from penstock.server.openai.answer_objects import Encoded
from penstock.server.openai.batch_line import ENDPOINTS
from penstock.server.openai.forms import read_object
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import HttpLimits
from penstock.vllm_arguments.argument import named

MOST_LISTED, USUALLY_LISTED = 100, 20
_FATES = named("output_expires_after", (), "files stay until they are deleted")
_LIMITS = HttpLimits(max_body_bytes=64 * 1024)


class BatchForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None


_MUST_BE = {
    "input_file_id": "the id of an uploaded file",
    "endpoint": f"{' or '.join(ENDPOINTS)}: others are not served in batches",
    "completion_window": "24h; batches here don't expire",
    "metadata": "an object of at most 16 texts by name, names up to 64 characters, texts up to 512",
}


async def post_batch(manager: BatchManager, request: Request, owner: str) -> Response:
    """POST /v1/batches. Raises HttpError."""
    intake = Intake(_LIMITS, manager.body_timeouts)
    with BodyRoom(intake.large) as place:
        asked = unsupported_fields.sift(
            read_object(await intake.read(request, place)), BatchForm.__struct_fields__, _FATES
        )
    form = _check(asked)
    row = BatchRow(
        id=new_batch_id(),
        owner=owner,
        created_at=int(time.time()),
        endpoint=form.endpoint,
        input_file_id=form.input_file_id,
        metadata=None if form.metadata is None else encoded(form.metadata),
        model=manager.model,
    )
    await manager.state.call(_add, manager, row)
    manager.start(row)
    return json_response(batch_object(manager, row))


def _add(manager: BatchManager, row: BatchRow) -> None:
    """Adds a batch to the database. Runs in StateFolder's only thread, so that no other change
    comes between the check of its file and the insert. Raises HttpError."""
    database, most = manager.state.database, manager.limits.max_unfinished
    if file_in(database, row.input_file_id, row.owner, "input_file_id").purpose != "batch":
        raise HttpError(
            "this file's purpose is not batch: upload the input with it", param="input_file_id"
        )
    if database.count_unfinished(row.owner) >= most:
        message = (
            f"{most} batches of yours are not over, and no more are taken: wait for one to end, or"
            " cancel one"
        )
        raise HttpError(
            message, status=429, code="too_many_batches", headers={"retry-after": str(LONGEST_WAIT)}
        )
    database.add_batch(row)


def _check(asked: dict[str, Any]) -> BatchForm:
    """Converts the JSON object of a body. Raises HttpError,
    which names the bad field and its rule."""
    try:
        return msgspec.convert(asked, BatchForm)
    except msgspec.ValidationError as error:
        said = str(error).rpartition(" - at ")  # the text before it may quote the client's values
        missing = said[2].startswith("Object missing")
        name = next(name for name in BatchForm.__struct_fields__ if name in said[2])
        code = (
            "missing_required_parameter"
            if missing
            else "unsupported_value"
            if "enum" in said[0]
            else None
        )
        raise HttpError(f"{name} must be {_MUST_BE[name]}", param=name, code=code) from error


async def list_batches(manager: BatchManager, request: Request, owner: str) -> Response:
    """GET /v1/batches. Raises the errors of list_files."""
    asked = query(request, {"after", "limit"})
    limit = limit_of(asked, USUALLY_LISTED, MOST_LISTED)
    rows = await manager.state.call(
        manager.state.database.list_batches, owner, asked.get("after"), limit + 1
    )
    if rows is None:
        raise no_place("batch")
    return page(Batches, [batch_object(manager, row) for row in rows], limit)


async def get_batch(manager: BatchManager, request: Request, owner: str) -> Response:
    """GET /v1/batches/ID. Raises HttpError."""
    return json_response(batch_object(manager, await _known(manager, request, owner)))


async def cancel_batch(manager: BatchManager, request: Request, owner: str) -> Response:
    """POST /v1/batches/ID/cancel: stops a batch and keeps its finished results.
    Raises HttpError."""
    state, batch_id = manager.state, (await _known(manager, request, owner)).id
    if await state.call(state.database.move, batch_id, ("validating", "in_progress"), "cancelling"):
        job = manager.job_of(batch_id)
        if job is not None:
            job.cancelled.set()
    row = await _known(manager, request, owner)
    if row.status not in ("cancelling", "cancelled"):
        raise conflict(f"a batch that is {row.status} cannot be cancelled", "batch_id")
    return json_response(batch_object(manager, row))


async def _known(manager: BatchManager, request: Request, owner: str) -> BatchRow:
    row, batch_id = None, request.path_params["batch_id"]
    if BATCH_ID.fullmatch(batch_id) is not None:
        row = await manager.state.call(manager.state.database.batch, batch_id, owner)
    if row is None:
        raise not_found("there is no batch of this id: GET /v1/batches lists them", "batch_id")
    return row


class BatchObject(msgspec.Struct, kw_only=True):
    """OpenAI's batch object; times are Unix seconds. Two fields are Penstock's: `expected_at`, the
    expected end from the measured rate, and `waits_for` (see BatchJob)."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    model: str
    errors: Encoded[BatchErrors | None]
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
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
    metadata: Encoded[dict[str, str] | None]
    expected_at: float | None = None
    waits_for: Literal["disk", "model", "turn"] | None = None


class Batches(Page, kw_only=True):
    """The answer of GET /v1/batches."""

    data: list[BatchObject]


def batch_object(manager: BatchManager, row: BatchRow) -> BatchObject:
    """Returns the answer's object of a batch, with its present counts."""
    job = None if row.over else manager.job_of(row.id)
    told = {
        name: getattr(row, name) for name in BatchObject.__struct_fields__ if hasattr(row, name)
    }
    told["model"] = row.model or manager.model
    told |= {
        name: msgspec.Raw(told[name].encode())
        for name in ("errors", "metadata")
        if told[name] is not None
    }
    counted = row if job is None else job
    told["request_counts"] = {
        "total": row.total,
        "completed": counted.completed,
        "failed": counted.failed,
    }
    if not row.over:
        told |= {"output_file_id": None, "error_file_id": None}
    if job is not None:
        told |= {"expected_at": job.expected_end, "waits_for": job.waits_for}
    return BatchObject(**told)

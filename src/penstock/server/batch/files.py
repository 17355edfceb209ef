"""/v1/files: upload, list, get, content, delete. Answers with OpenAI's file objects, from the
database and the file store. Knows HTTP and the state folder (state_folder.py); of batches only
whether one still reads a file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.server.batch.database import BatchDatabase, FileRow
from penstock.server.batch.disk_errors import FileDamagedError, storage_errors
from penstock.server.batch.file_store import (
    FILE_ID,
    ContentDraft,
    close_behind,
    new_file_id,
    open_content,
)
from penstock.server.batch.manager import BatchManager
from penstock.server.batch.upload import UploadParser, too_large
from penstock.server.online.buffered import json_response
from penstock.server.online.intake import declared_size
from penstock.server.openai.http_errors import HttpError

FORM_BYTES = 64 * 1024  # bytes that a multipart body may have in addition to its file
MOST_LISTED = 10_000
READ_BYTES = 256 * 1024  # bytes of a file's content that are read at a time
# bytes of an upload that are collected before they are written; a slow upload takes about this much
# memory
WRITE_BYTES = 64 * 1024
_DIGITS = 9


async def post_file(manager: BatchManager, request: Request, owner: str) -> Response:
    """POST /v1/files: stores an upload. Raises HttpError or StorageError, and then leaves nothing
    on the disk."""
    most = manager.limits.max_file_bytes
    if declared_size(request) > most + FORM_BYTES:
        raise too_large(most)
    parser = UploadParser(request.headers.get("content-type", ""), most)
    return json_response(file_object(await _take(manager, request, parser, owner)))


async def _take(
    manager: BatchManager, request: Request, parser: UploadParser, owner: str
) -> FileRow:
    """Receives an upload and stores its content and its database row, or neither. Raises HttpError,
    StorageError."""
    state, file_id = manager.state, new_file_id()
    draft = await state.call(_draft, manager, file_id, owner)
    try:
        await _receive(manager, request, parser, draft)
        filename = _check_upload(parser)
        row = FileRow(
            id=file_id,
            owner=owner,
            created_at=int(time.time()),
            filename=filename,
            purpose="batch",
            bytes=draft.size,
            sha256=draft.sha256,
        )
        with storage_errors():
            await asyncio.to_thread(draft.sync)
        await state.call(_land, manager, draft, row)
    finally:
        await state.attempt(draft.drop)
    return row


# The next three functions run in the only thread that uses the database (state_folder.py), so no
# other change comes in between.


def _draft(manager: BatchManager, file_id: str, owner: str) -> ContentDraft:
    """Opens a draft for an upload. Raises HttpError, OSError."""
    _check_room(manager, owner)
    return manager.state.file_store.draft(file_id)


def _land(manager: BatchManager, draft: ContentDraft, row: FileRow) -> None:
    """Stores the content and its database row, or neither. Raises HttpError, OSError,
    sqlite3.Error."""
    _check_room(manager, row.owner)  # checked again, since other uploads may have ended meanwhile
    draft.keep()
    try:
        manager.state.database.add_file(row)
    except BaseException:
        manager.state.file_store.remove(row.id)
        raise


def _check_room(manager: BatchManager, owner: str) -> None:
    """Raises HttpError if the owner has too many files. Its status is not 429, since waiting
    doesn't help."""
    most = manager.limits.max_files
    if manager.state.database.count_files(owner) >= most:
        message = (
            f"you keep {most} files here, results among them, and no more are taken: delete some"
        )
        raise HttpError(message, code="too_many_files")


async def _receive(
    manager: BatchManager, request: Request, parser: UploadParser, draft: ContentDraft
) -> None:
    """Receives the body, and writes the file in it to the disk, WRITE_BYTES at a time. Raises
    HttpError (also if the body comes too slowly), StorageError, ShuttingDownError."""
    state, most, size = manager.state, manager.limits.max_file_bytes, 0
    try:
        async with manager.body_timeouts.within(manager.body_seconds, "the file") as more_time:
            async for piece in request.stream():
                size += len(piece)
                if size > most + FORM_BYTES:
                    raise too_large(most)
                more_time(size)
                parser.write(piece)
                while len(parser.pending) >= WRITE_BYTES:
                    await state.call(draft.write, parser.take(WRITE_BYTES))
            parser.end()
            await state.call(draft.write, parser.take(WRITE_BYTES))
    finally:
        parser.close()


def _check_upload(upload: UploadParser) -> str:
    """Checks the other fields of an upload, and returns the file's name. Raises HttpError."""
    for name in upload.fields:
        if name.startswith("expires_after"):
            message = "expires_after is not served: files stay until they are deleted"
            raise HttpError(message, param="expires_after", code="unsupported_parameter")
        if name != "purpose":
            shown = name[:80]
            raise HttpError(
                f"unknown field {shown}: leave it out", param=shown, code="unknown_parameter"
            )
    if upload.filename is None:
        raise HttpError("file is missing: send it as a part of the form", param="file")
    purpose = upload.fields.get("purpose")
    if purpose != "batch":
        message = (
            "purpose is missing: batch is served"
            if purpose is None
            else "this purpose is not served: batch is"
        )
        raise HttpError(
            message, param="purpose", code=None if purpose is None else "unsupported_value"
        )
    return upload.filename


async def list_files(manager: BatchManager, request: Request, owner: str) -> Response:
    """GET /v1/files. Raises HttpError."""
    asked = query(request, {"after", "limit", "order", "purpose"})
    limit = limit_of(asked, MOST_LISTED, MOST_LISTED)
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise HttpError("order must be asc or desc", param="order")
    after, purpose = asked.get("after"), asked.get("purpose")
    rows = await manager.state.call(
        manager.state.database.list_files, owner, purpose, after, limit + 1, order
    )
    if rows is None:
        raise no_place("file")
    return page(Files, [file_object(row) for row in rows], limit)


async def get_file(manager: BatchManager, request: Request, owner: str) -> Response:
    """GET /v1/files/ID. Raises HttpError."""
    return json_response(file_object(await known_file(manager, request, owner)))


async def get_content(manager: BatchManager, request: Request, owner: str) -> Response:
    """GET /v1/files/ID/content: answers the bytes as stored. If the disk fails meanwhile, the
    answer breaks off, which the client sees from its length. Raises HttpError, FileDamagedError,
    StorageError."""
    row = await known_file(manager, request, owner)
    try:
        with storage_errors():
            file = await asyncio.to_thread(
                open_content, manager.state.file_store.path(row.id), row.bytes
            )
    except FileDamagedError:
        # raises HttpError if another request has just deleted it
        await known_file(manager, request, owner)
        raise
    headers = {
        "content-length": str(row.bytes),
        "content-disposition": f'attachment; filename="{row.id}"',
    }
    return StreamingResponse(_pieces(file), media_type="application/octet-stream", headers=headers)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while piece := await asyncio.to_thread(file.read, READ_BYTES):
            yield piece
    finally:
        close_behind(file)


async def delete_file(manager: BatchManager, request: Request, owner: str) -> Response:
    """DELETE /v1/files/ID. Raises HttpError."""
    state, file_id = manager.state, request.path_params["file_id"]

    def remove() -> str | None:
        user = state.database.user_of(file_id)
        if user is None and state.database.remove_file(file_id, owner):
            state.file_store.remove(file_id)
        return user

    await known_file(manager, request, owner)
    user = await state.call(remove)
    if user is not None:
        raise conflict(f"{user} reads this file and is not over: cancel it first", "file_id")
    return json_response(DeletedFile(id=file_id))


async def known_file(manager: BatchManager, request: Request, owner: str) -> FileRow:
    """Returns the row of the file whose id is in the request's path. Raises HttpError."""
    return await manager.state.call(
        file_in, manager.state.database, request.path_params["file_id"], owner
    )


def file_in(database: BatchDatabase, file_id: str, owner: str, param: str = "file_id") -> FileRow:
    """Returns the row of a file. Runs in StateFolder's thread. param: the parameter with the
    id, for the error. Raises HttpError."""
    row = database.file(file_id, owner) if FILE_ID.fullmatch(file_id) is not None else None
    if row is None:
        raise not_found("there is no file of this id: GET /v1/files lists them", param)
    return row


class FileObject(msgspec.Struct, kw_only=True):
    """OpenAI's file object."""

    id: Annotated[str, msgspec.Meta(pattern=f"^{FILE_ID.pattern}$")]
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class DeletedFile(msgspec.Struct, kw_only=True):
    """The answer of DELETE /v1/files/ID."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Page(msgspec.Struct, kw_only=True):
    """A part of a list. has_more: there are further entries behind it."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Files(Page, kw_only=True):
    """The answer of GET /v1/files."""

    data: list[FileObject]


def file_object(row: FileRow) -> FileObject:
    return msgspec.convert(row, FileObject, from_attributes=True)


# --- HTTP helpers of /v1/files and /v1/batches


def page(kind: type[Page], found: list[Any], limit: int) -> Response:
    """Answers with a list of at most `limit` objects. found: the objects; one more than `limit`
    means that there are further ones."""
    shown, more = found[:limit], len(found) > limit
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_response(kind(data=shown, first_id=first, last_id=last, has_more=more))


def no_place(kind: str) -> HttpError:
    """Returns the error 404 for an `after` that doesn't exist. An empty page would look like the
    last page."""
    return not_found(
        f"there is no {kind} of this id to go on behind: list from the start again", "after"
    )


def not_found(message: str, param: str) -> HttpError:
    return HttpError(message, status=404, code="not_found", param=param)


def conflict(message: str, param: str) -> HttpError:
    """Returns the error 409 for a request that the present state doesn't allow."""
    return HttpError(message, status=409, code="conflict", param=param)


def query(request: Request, known: set[str]) -> dict[str, str]:
    """Returns the query parameters. Raises HttpError for a name that is not in `known`."""
    for name in request.query_params:
        if name not in known:
            shown = name[:80]
            raise HttpError(
                f"unknown parameter {shown}: leave it out", param=shown, code="unknown_parameter"
            )
    return dict(request.query_params)


def limit_of(asked: dict[str, str], usual: int, most: int) -> int:
    """Returns the query parameter `limit`. usual: its default. most: its maximum.
    Raises HttpError."""
    text = asked.get("limit")
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and 1 <= int(text) <= most):
        raise HttpError(f"limit must be a whole number between 1 and {most}", param="limit")
    return int(text)

"""Errors over HTTP: which status an error has, and its OpenAI-shaped body.

It knows the error tree and JSON; no route, no engine. A body says `{"error": {message, type, param,
code}}`, as the official clients read it. Messages name fields, never echo long input.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from penstock.errors import (
    CapacityError,
    ContextLengthError,
    EngineError,
    FaultError,
    NoReplicaError,
    PenstockError,
    ReplicaError,
    UsageError,
)

LONGEST_MESSAGE = 600  # characters; a message that quotes a value never carries a megabyte of it
FAILED = "the server failed at this request; its log says how"  # a FaultError's words
DIED = (
    "the engine died, and the server ends: send the request again once it runs, or to another one"
)
RESTART = 5  # seconds in which a replica may be back
CLOSED_BY_CLIENT = (
    499  # the client left before its answer began, as nginx has it: nobody reads it, it is for logs
)


class HttpError(UsageError):
    """A fault of the request that has a status or a code of its own."""

    status = 400
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.headers = dict(headers or {})
        self.status, self.code = status or self.status, code or self.code


def too_late() -> HttpError:
    """What a request hears that took longer than it, or the server, allows. Clients that try again
    by themselves would only take the same time again: the header, which the official ones read,
    tells them not to."""
    message = (
        "not answered in its time: give a longer timeout where the server allows one, or ask for"
        " less"
    )
    return HttpError(
        message, status=408, code="timeout", param="timeout", headers={"x-should-retry": "false"}
    )


def check_model(asked: str | None, served: str) -> None:
    """Raises HttpError for a model that isn't the one that is served; None is any."""
    if asked is not None and asked != served:
        message = (
            f"the model asked for is not served here; this server has {served}: ask for it by that"
            " name"
        )
        raise HttpError(message, status=404, code="model_not_found", param="model")


class ShuttingDownError(PenstockError):
    """The server is on its way out; the request was not finished."""


def shutting_down() -> ShuttingDownError:
    """What whoever still waits hears."""
    return ShuttingDownError("the server is shutting down: send the request again, to another one")


class SampleError(PenstockError):
    """A sample that the engine gave up, with what it said."""


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


# Of an error that has none of its own, the first that it is one of: its status and its code.
_OTHERS: tuple[tuple[type[PenstockError], int, str | None], ...] = (
    (ContextLengthError, 400, "context_length_exceeded"),
    (UsageError, 400, None),
    (CapacityError, 400, None),  # this machine has no room for it, however long it waits
    (ReplicaError, 500, "replica_died"),
    (NoReplicaError, 503, "no_replica"),
    (EngineError, 500, "engine_dead"),
    (SampleError, 500, "numerical_error"),
    (FaultError, 500, "internal"),
    (ShuttingDownError, 503, "shutting_down"),
    (PenstockError, 500, None),
)


def error_headers(error: PenstockError) -> dict[str, str]:
    """The headers of an error's answer: an id of its own, as whole answers have, and those of its
    kind."""
    own = error.headers if isinstance(error, HttpError) else {}
    if isinstance(error, NoReplicaError):
        own = {"retry-after": str(RESTART)}
    return {"x-request-id": new_request_id(), **own}


def new_request_id() -> str:
    """Returns an id for what got no answer that has one."""
    return f"req_{secrets.token_hex(16)}"


def status_of(error: PenstockError) -> int:
    if isinstance(error, HttpError):
        return error.status
    return next(status for kind, status, _ in _OTHERS if isinstance(error, kind))


def code_of(error: PenstockError) -> str | None:
    if isinstance(error, HttpError):
        return error.code
    return next(code for kind, _, code in _OTHERS if isinstance(error, kind))


def names_of(error: PenstockError) -> tuple[str | None, str | None]:
    """An error's code and param, as its body has them."""
    return code_of(error), None if error.param is None else _clean(error.param)


def body_of(error: PenstockError) -> bytes:
    """The JSON body of any error of ours."""
    status = status_of(error)
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    ours = isinstance(error, (ReplicaError, NoReplicaError)) or not isinstance(error, EngineError)
    # an engine's own words may name paths, for the log alone
    message = str(error) if ours else DIED
    return error_body(message, kind=kind, param=error.param, code=code_of(error))


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> bytes:
    """`{"error": ...}` with what UTF-8 cannot carry replaced, and a message of bounded length."""
    if len(message) > LONGEST_MESSAGE:
        message = message[: LONGEST_MESSAGE - 3] + "..."
    fields = {
        "message": _clean(message),
        "type": kind,
        "param": None if param is None else _clean(param),
        "code": code,
    }
    return msgspec.json.encode({"error": fields})


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()

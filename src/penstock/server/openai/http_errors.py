"""Errors over HTTP: an error's status and its body in OpenAI's form.

Knows the error classes and JSON; no route, no engine. The body is `{"error": {message, type, param,
code}}`, as the official clients read it. Messages name fields, and never repeat long input.
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

# characters; keeps a message that quotes a value from carrying a megabyte of it
LONGEST_MESSAGE = 600
FAILED = "the server failed at this request; its log says how"  # message of a FaultError
DIED = (
    "the engine died, and the server ends: send the request again once it runs, or to another one"
)
RESTART = 5  # seconds for Retry-After: a replica may be back by then
# the client left before its answer began; nginx's status, seen only in logs
CLOSED_BY_CLIENT = 499


class HttpError(UsageError):
    """An error of the request with its own status or code."""

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
    """Returns the error of a request that took longer than it or the server allows. Its header
    tells the official clients not to retry, since they would only take as long again."""
    message = (
        "not answered in its time: give a longer timeout where the server allows one, or ask for"
        " less"
    )
    return HttpError(
        message, status=408, code="timeout", param="timeout", headers={"x-should-retry": "false"}
    )


def check_model(asked: str | None, served: str) -> None:
    """Raises HttpError for a model other than the served one; None matches any."""
    if asked is not None and asked != served:
        message = (
            f"the model asked for is not served here; this server has {served}: ask for it by that"
            " name"
        )
        raise HttpError(message, status=404, code="model_not_found", param="model")


class ShuttingDownError(PenstockError):
    """Raised when the server shuts down before the request is finished."""


def shutting_down() -> ShuttingDownError:
    """Returns the error for requests that still wait at a shutdown."""
    return ShuttingDownError("the server is shutting down: send the request again, to another one")


class SampleError(PenstockError):
    """Raised for a sample that the engine gave up, with the engine's message."""


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


# Errors without a status of their own, by the first class that matches: status and code.
_OTHERS: tuple[tuple[type[PenstockError], int, str | None], ...] = (
    (ContextLengthError, 400, "context_length_exceeded"),
    (UsageError, 400, None),
    (CapacityError, 400, None),  # this machine can never run the request
    (ReplicaError, 500, "replica_died"),
    (NoReplicaError, 503, "no_replica"),
    (EngineError, 500, "engine_dead"),
    (SampleError, 500, "numerical_error"),
    (FaultError, 500, "internal"),
    (ShuttingDownError, 503, "shutting_down"),
    (PenstockError, 500, None),
)


def error_headers(error: PenstockError) -> dict[str, str]:
    """Returns the headers of an error's answer: a new request id, and those of its kind."""
    own = error.headers if isinstance(error, HttpError) else {}
    if isinstance(error, NoReplicaError):
        own = {"retry-after": str(RESTART)}
    return {"x-request-id": new_request_id(), **own}


def new_request_id() -> str:
    """Returns a request id for an answer that has no id of its own."""
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
    """Returns an error's code and param, as in its body."""
    return code_of(error), None if error.param is None else _clean(error.param)


def body_of(error: PenstockError) -> bytes:
    """Returns the JSON body of any error of ours."""
    status = status_of(error)
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    ours = isinstance(error, (ReplicaError, NoReplicaError)) or not isinstance(error, EngineError)
    # the engine's own message may name paths, and is only for the log
    message = str(error) if ours else DIED
    return error_body(message, kind=kind, param=error.param, code=code_of(error))


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> bytes:
    """Returns `{"error": ...}`, with characters that UTF-8 cannot encode replaced, and the message
    cut."""
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

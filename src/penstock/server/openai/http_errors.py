"""HTTP status and body of every error. Knows the error classes and JSON; no route, no engine. The
body is OpenAI's `{"error": {message, type, param, code}}`. Messages name fields, and never repeat
long input.
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
from penstock.server.openai.answer_objects import Error, ErrorFields

# characters of a message, since it may quote a long value
LONGEST_MESSAGE = 600
# the client's message after an unexpected error (FaultError)
FAILED = "the server failed at this request; its log says how"
DIED = (
    "the engine died, and the server ends: send the request again once it runs, or to another one"
)
# seconds in Retry-After after an engine's death; a replica may have started again by then
RESTART = 5
# status of a request whose client left before the answer began: nginx's, seen only in logs
CLOSED_BY_CLIENT = 499


class HttpError(UsageError):
    """An error with a status, code or headers of its own."""

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
    """Returns the error of a request that took longer than its own timeout or the server's. A
    header tells OpenAI's clients not to retry, since a retry would take as long again."""
    message = (
        "not answered in its time: give a longer timeout where the server allows one, or ask for"
        " less"
    )
    return HttpError(
        message, status=408, code="timeout", param="timeout", headers={"x-should-retry": "false"}
    )


def check_model(asked: str | None, served: str) -> None:
    """Raises HttpError if the requested model `asked` isn't the served one; None matches any."""
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
    """Raised for a sample that the engine ended with an error. The message is the engine's."""


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


# Status and code of the errors that are no HttpError, by the first class that matches.
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
    """Returns the headers of an error's answer: a new request id, and the headers of this kind of
    error."""
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
    """Returns an error's code and param, as they appear in its body."""
    return code_of(error), None if error.param is None else _clean(error.param)


def fields_of(error: PenstockError) -> ErrorFields:
    """Returns a PenstockError as the answer's fields. Cuts a message above LONGEST_MESSAGE."""
    status = status_of(error)
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    ours = isinstance(error, (ReplicaError, NoReplicaError)) or not isinstance(error, EngineError)
    # an EngineError's message may name paths, so it is only for the log
    message = str(error) if ours else DIED
    if len(message) > LONGEST_MESSAGE:
        message = message[: LONGEST_MESSAGE - 3] + "..."
    code, param = names_of(error)
    return ErrorFields(_clean(message), kind, param, code)


def body_of(error: PenstockError) -> bytes:
    """Returns the JSON body of a PenstockError."""
    return msgspec.json.encode(Error(fields_of(error)))


def _clean(text: str) -> str:
    """Returns the text with characters replaced that UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()

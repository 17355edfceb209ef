"""CORS for the origins of `--allowed-origin`. Answers preflight requests, which have no key, and
adds the headers that let a page of another site read an answer. Knows headers; auth.py decides who
has access."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.server.online.auth import AccessPolicy
from penstock.server.online.buffered import JSON
from penstock.server.openai.http_errors import HttpError, body_of

# answer headers that scripts of web pages may read
SHOWN = (
    "retry-after",
    "www-authenticate",
    "x-request-id",
    "x-should-retry",
)
KEPT = 600  # seconds for which a browser may cache a preflight


class PageAccess(CORSMiddleware):
    """Starlette's CORS middleware for the origins of an access policy, with errors in OpenAI's
    format. Any request header is allowed, since the official client sends a dozen of its own.
    Cookies are not allowed, since none are read."""

    def __init__(self, app: ASGIApp, access: AccessPolicy) -> None:
        super().__init__(
            app,
            allow_origins=access.origins,
            allow_methods=("DELETE", "GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=SHOWN,
            max_age=KEPT,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        message = (
            f"{bytes(answer.body).decode()}: allow a page by --allowed-origin, as its address"
            " begins"
        )
        refused = HttpError(message, status=403, code="origin_not_allowed")
        headers = {
            name: value for name, value in answer.headers.items() if not name.startswith("content-")
        }
        return Response(body_of(refused), refused.status, headers, media_type=JSON)

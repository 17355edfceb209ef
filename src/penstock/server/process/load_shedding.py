"""Turns requests away by their heads alone, while there is no room for the smallest one.

The connection asks when a head is there, so a refusal costs no task and no body, and nothing is left of it: a crowd of
thousands is answered as fast as it is read. What the application would refuse before it looks for room (a wrong key,
another page's Host, a path that isn't served) is left to it. It knows headers, request limits and the access log; no
connections, no bodies.
"""

from __future__ import annotations

import time
from typing import IO

from penstock.server.online.access_log import line_of, write_line
from penstock.server.online.auth import AccessPolicy, Authenticator, Headers
from penstock.server.online.request_limits import RequestLimits
from penstock.server.openai.http_errors import HttpError, names_of

LIMITED = (b"/v1/completions", b"/v1/chat/completions")  # as clients write them; spelt otherwise the application looks


class LoadShedder:
    """`log`: the access log, where there is one."""

    def __init__(self, limits: RequestLimits, access: AccessPolicy, log: IO[bytes] | None = None) -> None:
        self._limits, self._authenticator, self._log = limits, Authenticator(access), log

    def __call__(self, method: bytes, url: bytes, headers: Headers) -> HttpError | None:
        """Returns why this request is not even begun; None: it may be."""
        if method != b"POST" or url not in LIMITED:
            return None
        began = time.perf_counter()
        try:
            key = self._authenticator.authenticate(headers)
        except HttpError:
            return None  # the application says so
        try:
            self._limits.check(key)
        except HttpError as error:
            if self._log is not None:
                seconds = time.perf_counter() - began
                line = line_of("POST", url.decode(), error.status, key, seconds, refused=names_of(error))
                write_line(self._log, line)
            return error.with_traceback(None)  # which holds the frame that holds the error, until the collector comes
        return None

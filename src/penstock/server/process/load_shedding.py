"""LoadShedder: turns requests away by their head alone, while the queue has no room.

The connection asks it when a head is there, so a refusal costs no task, no body and no turn of the loop, and nothing is
left of it: a crowd of thousands is answered as fast as it is read. Many heads come in one turn of the loop, before the
first of them has taken its place: each that is let past counts as open until the loop has turned. What the application
would refuse before it asks the queue (a wrong key, another page's Host, a path that isn't served) is left to it. It
knows doors, the queue and the access log; no connections, no bodies.
"""

from __future__ import annotations

import asyncio
import time
from typing import IO

from penstock.server.online.access_log import line_of, write_line
from penstock.server.online.api_keys import Key
from penstock.server.online.auth import AccessPolicy, Authenticator, Headers
from penstock.server.online.request_limits import RequestLimits
from penstock.server.openai.http_errors import HttpError, names_of

QUEUED = (
    b"/v1/completions",
    b"/v1/chat/completions",
)  # as clients write them; in another spelling they take the long way


class LoadShedder:
    """`log`: the access log, where there is one."""

    def __init__(self, queue: RequestLimits, doors: AccessPolicy, log: IO[bytes] | None = None) -> None:
        self._queue, self._keeper, self._log = queue, Authenticator(doors), log
        self._let_past: list[Key | None] = []  # in this turn of the loop

    def __call__(self, method: bytes, url: bytes, headers: Headers) -> HttpError | None:
        """Why this request is not even begun; None: it may be."""
        if method != b"POST" or url not in QUEUED:
            return None
        began = time.perf_counter()
        try:
            key = self._keeper.let_in(headers)
        except HttpError:
            return None  # the application says so
        try:
            self._queue.knock(key)
        except HttpError as error:
            if self._log is not None:
                seconds = time.perf_counter() - began
                line = line_of("POST", url.decode(), error.status, key, seconds, refused=names_of(error))
                write_line(self._log, line)
            return error.with_traceback(None)  # which holds the frame that holds the error, until the collector comes
        if not self._let_past:
            asyncio.get_running_loop().call_soon(self._turned)
        self._let_past.append(key)
        self._queue.promise(key, 1)
        return None

    def _turned(self) -> None:
        """Called before those that were let past are begun: they take their own places."""
        for key in self._let_past:
            self._queue.promise(key, -1)
        self._let_past.clear()

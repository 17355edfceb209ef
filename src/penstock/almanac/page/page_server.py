"""Serves a built page on this machine. Some browsers may not open files; the page itself needs no
server.

Only this machine can reach it. Knows a folder, no record.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from penstock.errors import CapacityError, UsageError

HOST = "127.0.0.1"


class _Quiet(SimpleHTTPRequestHandler):
    """Serves files without logging and without caching, so that a rebuilt page is seen; browsers
    must not guess types."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: one line a file does not help a reader of the page."""


def serve(out: Path, port: int, ready: Callable[[str], None] = print) -> None:
    """Serves the page in `out` until interrupted, and calls `ready` with the address. Port 0 takes
    a free port.

    Raises UsageError when `out` holds no page, CapacityError when the port is in use.
    """
    if not (out / "index.html").is_file():
        raise UsageError(
            f"{out} holds no page: build it with `penstock almanac build --out {out}`", param="out"
        )
    try:
        server = ThreadingHTTPServer((HOST, port), partial(_Quiet, directory=str(out)))
    except OSError as error:
        raise CapacityError(
            f"port {port} cannot be had ({error.strerror}): give another one with --port"
        ) from error
    with server:
        ready(f"http://{HOST}:{server.server_address[1]}/")
        server.serve_forever()

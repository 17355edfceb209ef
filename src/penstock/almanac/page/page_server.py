"""Shows a built page on this machine. The page needs no server: this is for a browser that may not
open files.

Only this machine can reach it. It knows a folder, no record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from penstock.errors import CapacityError, UsageError

HOST = "127.0.0.1"


class _Quiet(SimpleHTTPRequestHandler):
    """No line a request; nothing is cached, so that a page built anew is seen; types are never
    guessed."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a line a file is of no use to who looks at a page."""


def serve(out: Path, port: int, ready: Callable[[str], None] = print) -> None:
    """Serves the page in `out` until it is interrupted; `ready` is told the address. Port 0 takes a
    free one.

    Raises UsageError where no page is, CapacityError where the port is in use."""
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

"""Where requests go: a server's address, and what every request carries beside its body.

It knows addresses, and whether anybody listens there; not what is sent, nor when.
"""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.errors import UsageError

TRIES, BETWEEN, PATIENCE = 3, 0.25, 2.0  # to reach a server; seconds between two; seconds of one
_HEADER = re.compile(r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")
_OURS = {"host", "content-type", "content-length", "connection", "transfer-encoding"}


@dataclass(frozen=True)
class Endpoint:
    """A server's address. model: the name that bodies ask for. headers: beside our own. TLS trusts the system's
    certificates, or those of SSL_CERT_FILE."""

    host: str
    port: int
    path: str = "/v1/completions"
    model: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    tls: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise UsageError(f"{self.port} is no port: give one from 1 to 65535", param="port")
        if not re.fullmatch(r"/[!-~]*", self.path):
            raise UsageError(f"{self.path!r} is no path of a URL: it starts with / and has no spaces", param="path")
        for name, value in self.headers.items():
            if not _HEADER.match(name) or name.lower() in _OURS or not re.fullmatch(r"[ -~]*", value):
                raise UsageError(
                    f"the header {name!r} cannot be sent: its name or value isn't allowed", param="headers"
                )

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"

    def listens(self) -> bool:
        """Returns whether a new connection is taken, by one of a few tries: a server that has only just been flooded
        may have no place in its queue yet."""
        for more in reversed(range(TRIES)):
            try:
                socket.create_connection((self.host, self.port), timeout=PATIENCE).close()
            except OSError:
                time.sleep(BETWEEN if more else 0)
            else:
                return True
        return False

    def head(self) -> bytes:
        """Returns all of a request's head but the length of its body."""
        lines = [f"POST {self.path} HTTP/1.1", f"host: {self.authority}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\ncontent-length: ").encode()


def target_of(url: str, *, model: str = "", api_key: str | None = None) -> Endpoint:
    """Reads what a user types: `host:port`, `http://host:port`, `https://host/v1` or the whole URL of a route. A URL
    that names no route gets /v1/completions. Raises UsageError for what is no such address."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is no URL ({error}): give one like http://127.0.0.1:8000", param="url") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no URL of a server: give one like http://127.0.0.1:8000", param="url")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise UsageError(f"{url!r} has a query or a password in it: give the plain address", param="url")
    tls = parts.scheme == "https"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    port = port if port is not None else 443 if tls else 80
    return Endpoint(parts.hostname, port, _route(parts.path), model, headers, tls)


def _route(path: str) -> str:
    base = path.rstrip("/")
    if base.endswith("/completions"):
        return base
    return f"{base}/completions" if base.endswith("/v1") else f"{base}/v1/completions"

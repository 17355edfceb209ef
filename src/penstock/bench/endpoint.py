"""The server's address, and the constant request head.

Knows addresses; not the requests' bodies, nor their times.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.errors import UsageError


@dataclass(frozen=True)
class Endpoint:
    """A server's address. model: the model name in the bodies. TLS trusts the system's
    certificates, or those in SSL_CERT_FILE."""

    host: str
    port: int
    path: str = "/v1/completions"
    model: str = ""
    api_key: str | None = None
    tls: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise UsageError(f"{self.port} is no port: give one from 1 to 65535", param="port")
        if not re.fullmatch(r"/[!-~]*", self.path):
            raise UsageError(
                f"{self.path!r} is no path of a URL: it starts with / and has no spaces",
                param="path",
            )
        if not re.fullmatch(r"[ -~]*", self.api_key or ""):
            raise UsageError(
                "the API key cannot be sent: a header takes no such characters", param="api_key"
            )

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"

    def head(self) -> bytes:
        """Returns a request's HTTP head, up to where the body's length follows."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"host: {self.authority}",
            "content-type: application/json",
        ]
        lines += [f"authorization: Bearer {self.api_key}"] if self.api_key else []
        return ("\r\n".join(lines) + "\r\ncontent-length: ").encode()


def target_of(url: str, *, model: str = "", api_key: str | None = None) -> Endpoint:
    """Parses a user's URL: `host:port`, `http://host:port`, `https://host/v1` or the full URL of a
    route. A URL without a route gets /v1/completions. Raises UsageError for anything else."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise UsageError(
            f"{url!r} is no URL ({error}): give one like http://127.0.0.1:8000", param="url"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{url!r} is no URL of a server: give one like http://127.0.0.1:8000", param="url"
        )
    if parts.query or parts.fragment or parts.username or parts.password:
        raise UsageError(
            f"{url!r} has a query or a password in it: give the plain address", param="url"
        )
    tls = parts.scheme == "https"
    port = port if port is not None else 443 if tls else 80
    return Endpoint(parts.hostname, port, _route(parts.path), model, api_key, tls)


def _route(path: str) -> str:
    base = path.rstrip("/")
    if base.endswith("/completions"):
        return base
    return f"{base}/completions" if base.endswith("/v1") else f"{base}/v1/completions"

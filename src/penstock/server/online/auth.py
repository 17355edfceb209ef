"""Access control by API key, Host and Origin. Checks a request's API key, and protects against web
pages that send requests from their visitor's browser.

Without API keys, the header Host must be an IP address, a name of this machine or an allowed host,
against DNS rebinding. An IP address can't be rebound, but anybody can serve pages from one: so
Origin, if present, must have the same host as Host, be loopback or be allowed. With API keys both
are checked only if hosts were allowed by name, since a page has no key. Pages of allowed origins
always have access (cors.py). Knows headers; no bodies, no limits.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import UsageError
from penstock.server.online.api_keys import Key, find_key
from penstock.server.online.buffered import JSON
from penstock.server.openai.http_errors import HttpError, body_of, error_headers, names_of

ROOT = "/"
OPEN_PATHS = ("/health", "/health/live", ROOT)  # paths that need no API key
# prefixes of paths for health probes, which are answered at any load and left out of the access log
PROBES = (
    "/health",
    "/metrics",
)
ANY_HOST = "*"
_OWN_NAMES = ("localhost",)
# RFC 3986's authority, without userinfo, which no Host or Origin has, and with names as in DNS
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_.-]+))(?::(?P<port>[0-9]{0,5}))?"
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LAST_PORT = 65_535

Headers = Iterable[tuple[bytes, bytes]]  # (name in lower case, value) of each header


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """Rules of access to a server. keys: API keys; empty: no key is required. hosts: hosts allowed
    in addition to this machine's own names and addresses; `*` is any. origins: allowed origins of
    other sites' pages, as browsers write them. admin_without_key: if there are no keys, True lets
    everybody use the admin routes (weights, sleep, restart), False nobody."""

    keys: tuple[Key, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    admin_without_key: bool = False

    @property
    def asks_host(self) -> bool:
        """True if the headers Host and Origin are checked."""
        return ANY_HOST not in self.hosts and (not self.keys or bool(self.hosts))

    def answer_headers(self, headers: Headers) -> dict[str, str]:
        """Returns the CORS headers for an answer that is made outside the application, so that an
        allowed page can read it."""
        origin = next((value.decode("latin-1") for value in _values(headers, b"origin")), None)
        return (
            {"access-control-allow-origin": origin, "vary": "Origin"}
            if origin in self.origins and origin
            else {}
        )


def check_public(host: str, access: AccessPolicy, *, allow_no_key: bool) -> None:
    """Raises UsageError for a server that other machines can reach and that has no keys, unless
    allow_no_key is True."""
    if access.keys or allow_no_key or is_loopback(host):
        return
    raise UsageError(
        f"others can reach --host {host}, and no API key is set: give --api-key or --api-key-file,"
        " serve on 127.0.0.1, or say --allow-no-key where something in front of it checks who"
        " asks",
        param="host",
    )


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach the address to listen on. A host name is
    resolved; a name without addresses gives True, since bind() then fails anyway."""
    try:
        found = {
            info[4][0] for info in socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)
        }
    except (socket.gaierror, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in found)


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Returns host names and addresses normalised for comparison. Raises UsageError for invalid
    ones."""
    found = []
    for host in hosts:
        plain = ANY_HOST if host == ANY_HOST else _plain(host)
        if plain is None:
            raise UsageError(
                "--allowed-host takes a name or an address without scheme, port and zone, or *",
                param="allowed_host",
            )
        found.append(plain)
    return tuple(found)


def check_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Returns origins as browsers write them: in lower case, without the scheme's default port.
    Raises UsageError."""
    found = []
    for given in origins:
        scheme = _SCHEME.match(given)
        authority = given[scheme.end() :] if scheme else given
        if given == ANY_HOST or not scheme:
            what = "--allowed-origin names a page's site, as https://app.example: "
            why = "* would let every page in" if given == ANY_HOST else f"{given!r} has no scheme"
            raise UsageError(what + why, param="allowed_origin")
        name, cut, path = authority.partition("/")
        if cut or _host_of(name) is None:
            why = (
                f"has a path: leave {cut + path!r} out"
                if cut
                else "names no host: write scheme://name, with :port"
            )
            raise UsageError(
                f"--allowed-origin is scheme://name alone, and {given!r} {why}",
                param="allowed_origin",
            )
        usual = {"http://": ":80", "https://": ":443"}.get(scheme[0].lower(), "")
        found.append((scheme[0] + name).lower().removesuffix(usual))
    return tuple(found)


class AuthMiddleware:
    """ASGI middleware that refuses requests without access, and stores the API key of the others in
    the request's state. Liveness probes need no key."""

    def __init__(self, app: ASGIApp, access: AccessPolicy) -> None:
        self._app, self._access = app, access
        self._hosts = frozenset((*_OWN_NAMES, *access.hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                may_lack_host = scope["http_version"] == "1.0"
                scope.setdefault("state", {})["key"] = self.find(
                    scope["headers"], may_lack_host=may_lack_host
                )
            except HttpError as error:
                # the access log reads the error's names there
                scope.setdefault("state", {})["refused"] = names_of(error)
                headers = error_headers(error) | (
                    {"www-authenticate": "Bearer"} if error.status == 401 else {}
                )
                refusal = Response(body_of(error), error.status, headers, media_type=JSON)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def find(self, headers: Headers, *, may_lack_host: bool = False) -> Key | None:
        """Returns the API key in a request's headers; None if the server has no keys.
        may_lack_host: True for HTTP/1.0, in which Host may be missing. Raises HttpError if the
        request has no access."""
        key = self._find_key(headers) if self._access.keys else None
        if self._access.asks_host:
            self._check_page(headers, may_lack_host)
        return key

    def _find_key(self, headers: Headers) -> Key:
        given = _values(headers, b"authorization")
        scheme, _, shown = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        key = find_key(self._access.keys, shown.strip()) if scheme.lower() == b"bearer" else None
        if key is None:
            message = "this server wants its API key: send it as Authorization: Bearer KEY"
            raise HttpError(message, status=401, code="invalid_api_key")
        return key

    def _check_page(self, headers: Headers, may_lack_host: bool) -> None:
        hosts = [_host_of(value.decode("latin-1")) for value in _values(headers, b"host")]
        if not hosts and not may_lack_host:
            raise _not_ours("the Host header is missing: send this server's address in it")
        if len(hosts) > 1 or not all(
            host in self._hosts or _address_of(host) is not None for host in hosts
        ):
            raise _not_ours(
                "the Host header is no name of this server: ask by its address, or allow the name"
                " with --allowed-host"
            )
        for origin in _values(headers, b"origin"):
            if origin.decode("latin-1") in self._access.origins:
                continue
            page = _page_of(origin.decode("latin-1"))
            if page is None or (
                page not in hosts and page not in self._hosts and not _is_own(page)
            ):
                raise _not_ours(
                    "pages of other sites may not ask this server: allow theirs with"
                    " --allowed-origin, or all of their host's with --allowed-host"
                )


def _not_ours(message: str) -> HttpError:
    return HttpError(message, status=403, code="host_not_allowed")


def key_of(scope: Scope) -> Key | None:
    """Returns the API key that AuthMiddleware stored for a request;
    None if the server has no keys."""
    key: Key | None = scope.get("state", {}).get("key")
    return key


def _host_of(authority: str) -> str | None:
    """Returns the host in `name`, `name:port`, `address:port` or `[address]:port`, normalised for
    comparison. Returns None for any other text, since a lenient parser could read it differently
    from other programs."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None or int(found["port"] or 0) > _LAST_PORT:
        return None
    plain = _plain(found["v6"] or found["host"])
    return None if plain is None or (found["v6"] and ":" not in plain) else plain


def _page_of(origin: str) -> str | None:
    """Returns the host in an Origin header, as _host_of does."""
    scheme = _SCHEME.match(origin)
    return None if scheme is None else _host_of(origin[scheme.end() :])


def _plain(host: str) -> str | None:
    """Returns an address or a name normalised for comparison (a name without its final dot); None
    for other text."""
    address = _address_of(host)
    if address is not None:
        return str(address)
    name = host.lower().removesuffix(".")
    return name if _NAME.fullmatch(name) and _address_of(name) is None else None


def _address_of(host: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the IP address in a text. Returns None for an address with a zone (`%eth0`), which is
    valid on one machine only, and for other text."""
    try:
        return None if host is None or "%" in host else ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_own(host: str) -> bool:
    """Returns True if the host is a loopback address,
    whose pages come from the user's own machine."""
    address = _address_of(host)
    return address is not None and address.is_loopback


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for known, value in headers if known == name]

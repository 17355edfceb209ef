"""Binds the server's port before the engine loads. Knows addresses; nothing of the service."""

from __future__ import annotations

import errno
import socket

from penstock.errors import CapacityError, UsageError


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket, which refuses connections until it listens. Raises UsageError for an
    invalid host or port, CapacityError if the port is in use."""
    if not 0 <= port <= 65_535:
        raise UsageError(f"port must be between 0 and 65535, not {port}", param="port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(
            f"host {host!r} is no address of this machine ({error}): try 127.0.0.1", param="host"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise port_error(host, port, error) from error
    return listener


def port_error(host: str, port: int, error: OSError) -> CapacityError:
    way_out = "give another --port"
    if error.errno == errno.EADDRNOTAVAIL:
        way_out = "give an address of this machine as --host, or 0.0.0.0 for all of them"
    return CapacityError(
        f"cannot serve on {host} port {port} ({error.strerror}): {way_out}", param="port"
    )


def url_of(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

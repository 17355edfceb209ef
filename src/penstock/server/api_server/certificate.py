"""The server's TLS certificate and key. Reads the files of `--ssl-certfile` and `--ssl-keyfile` at
the start and again when they change, so that new connections get a renewed certificate without a
restart. Knows files and TLS; no HTTP."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UsageError

LOOK_AGAIN = 1.0  # seconds between two checks whether the certificate's files changed


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of the PEM files. keyfile: None if certfile holds the key too."""

    certfile: str
    keyfile: str | None = None

    @classmethod
    def of(cls, certfile: Path | str | None, keyfile: Path | str | None) -> CertificateFiles | None:
        """Returns the paths after checking that the files can be used together; None if both are
        None. Raises UsageError."""
        if certfile is None:
            if keyfile is not None:
                raise UsageError(
                    "a key alone makes no TLS: give --ssl-certfile too", param="ssl_certfile"
                )
            return None
        files = cls(str(certfile), None if keyfile is None else str(keyfile))
        files.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        return files

    def load(self, context: ssl.SSLContext) -> None:
        """Loads this certificate into `context`. If the files cannot be read, are not PEM, don't
        fit each other, or the key is encrypted, raises UsageError and leaves the context as it was.
        """
        for name, file in (("ssl_certfile", self.certfile), ("ssl_keyfile", self.keyfile)):
            try:
                if file is not None:
                    Path(file).read_bytes()
            except OSError as error:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} {file} cannot be read ({error.strerror}): check it", param=name
                ) from error
        asked: list[bool] = []

        def password() -> str:
            asked.append(True)
            return ""

        try:
            # The first context is a trial that cannot spoil the one in use.
            for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                each.load_cert_chain(self.certfile, self.keyfile, password)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                self._fault(error, encrypted=bool(asked)), param="ssl_certfile"
            ) from error

    def _fault(self, error: Exception, *, encrypted: bool) -> str:
        key = self.keyfile or self.certfile
        if encrypted:
            return (
                f"the key in {key} is encrypted: give one without a passphrase, readable by its"
                " owner alone"
            )
        reason = str(getattr(error, "reason", None) or error)
        if reason == "KEY_VALUES_MISMATCH":
            return (
                f"the certificate in {self.certfile} doesn't fit the key in {key}: give a pair that"
                " does"
            )
        return (
            f"{self.certfile} and {key} are no certificate with its key in PEM ({reason}): check"
            " both files"
        )

    async def follow(self, context: ssl.SSLContext) -> None:
        """Reads the files again whenever they change, until cancelled. A new certificate that
        cannot be used is reported on standard error, and the old one stays."""
        seen = self._stamps()
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            now = self._stamps()
            if now == seen:
                continue
            seen = now
            try:
                self.load(context)
            except UsageError as error:
                print(
                    f"penstock: the certificate that serves stays: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                print(
                    f"penstock: serves the certificate that {self.certfile} has now",
                    file=sys.stderr,
                    flush=True,
                )

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for file in (self.certfile, self.keyfile or self.certfile):
            try:
                about = os.stat(file)
                found.append((about.st_ino, about.st_mtime_ns, about.st_size))
            except OSError:
                found.append(None)
        return found

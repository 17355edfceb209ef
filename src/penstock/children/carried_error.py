"""CarriedError: an error of ours, sent from one process to another and raised again there.

Knows the error classes; no process.
"""

from __future__ import annotations

import msgspec

from penstock import errors
from penstock.errors import EngineError, PenstockError, UsageError


class CarriedError(msgspec.Struct, tag="failed", frozen=True):
    """An error in the form that crosses. kind: its class name. param, rule: its attributes."""

    kind: str
    message: str
    param: str | None = None
    rule: str | None = None

    @classmethod
    def of(cls, error: BaseException, what: str = "") -> CarriedError:
        """Returns the carried form of `error`. An error that isn't ours becomes an EngineError
        whose message begins with `what`."""
        if isinstance(error, PenstockError):
            rule = (
                error.rule if isinstance(error, UsageError) and error.rule != str(error) else None
            )
            return cls(type(error).__name__, str(error), error.param, rule)
        return cls(EngineError.__name__, f"{what}{type(error).__name__}: {error}")

    def error(self, prefix: str = "") -> PenstockError:
        """Returns the error to raise. prefix: text before its message."""
        kind: type[PenstockError] = getattr(errors, self.kind, EngineError)
        assert issubclass(kind, PenstockError)
        message = f"{prefix}{self.message}"
        if issubclass(kind, UsageError):
            return kind(message, param=self.param, rule=self.rule and f"{prefix}{self.rule}")
        return kind(message, param=self.param)

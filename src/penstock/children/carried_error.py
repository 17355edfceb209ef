"""CarriedError: a PenstockError as a message between processes. The receiving process raises it
again. Knows the error classes; no process.
"""

from __future__ import annotations

import msgspec

from penstock import errors
from penstock.errors import EngineError, PenstockError, UsageError


class CarriedError(msgspec.Struct, tag="failed", frozen=True):
    """An error as a message. kind: name of its class. param, rule: attributes of a UsageError."""

    kind: str
    message: str
    param: str | None = None
    rule: str | None = None

    @classmethod
    def of(cls, error: BaseException, what: str = "") -> CarriedError:
        """Returns the message for `error`. An error that is no PenstockError becomes an EngineError
        whose text begins with `what`."""
        if isinstance(error, PenstockError):
            rule = (
                error.rule if isinstance(error, UsageError) and error.rule != str(error) else None
            )
            return cls(type(error).__name__, str(error), error.param, rule)
        return cls(EngineError.__name__, f"{what}{type(error).__name__}: {error}")

    def error(self, prefix: str = "") -> PenstockError:
        """Returns the error for the receiving process to raise. prefix: text before its message."""
        kind: type[PenstockError] = getattr(errors, self.kind, EngineError)
        assert issubclass(kind, PenstockError)
        message = f"{prefix}{self.message}"
        if issubclass(kind, UsageError):
            return kind(message, param=self.param, rule=self.rule and f"{prefix}{self.rule}")
        return kind(message, param=self.param)

"""The error tree: every fault that a user can cause or must be told of, each one clear line with
the way out.

It knows no room: stdlib only. Nobody has to read a traceback to know what to do next.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all. `str(error)` is one line with the way out; `exit_code` is what the command line
    ends with."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None) -> None:
        line = " ".join(message.split())
        # half a surrogate could not be printed
        super().__init__(line.encode("utf-8", "backslashreplace").decode())
        self.param = param


class UsageError(PenstockError, ValueError):
    """An option, field or value that cannot be served; `param` names it. `rule` is the message
    without what was given: what a server says, whose answers go to logs that the value must not get
    into."""

    def __init__(self, message: str, *, param: str | None = None, rule: str | None = None) -> None:
        super().__init__(message, param=param)
        self.rule = str(self) if rule is None else rule


class ContextLengthError(UsageError):
    """A prompt (plus at least one token) that is longer than the model's context."""


class CheckpointError(PenstockError):
    """A model folder that cannot be read as it is."""


class TokenizerError(CheckpointError):
    """A tokenizer that is missing, unreadable, or disagrees with the model."""


class CapacityError(PenstockError):
    """The machine lacks memory, disk or a port for what was asked."""


class JournalError(PenstockError):
    """A journal or output that cannot be written, or that another run wrote."""


class RecordError(PenstockError):
    """A record or samples of a measured run that cannot be believed;
    names the file and the field."""


class FaultError(PenstockError):
    """Our own code failed at one request; the others go on. A server's log has the traceback."""

    exit_code = 1


class EngineError(PenstockError):
    """The engine stopped; every waiter gets this."""

    exit_code = 1


class ReplicaError(EngineError):
    """One of several replicas stopped, and a request with it that cannot be run again; the others
    go on."""


class NoReplicaError(EngineError):
    """No replica is ready; they start again by themselves."""


def escaped(text: str) -> str:
    """Returns a text; signs in it that cannot be shown become escapes of Python."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def too_long(context: int) -> str:
    """Returns how a prompt past the context is refused: in the words by which clients (litellm,
    langchain) know that another model may take it."""
    return f"this model's maximum context length is {context} tokens and the prompt is too long"

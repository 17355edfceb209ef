"""The errors that a user may see. Each is one clear line that also says what to do.

Imports the standard library alone.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base class of the errors that a user may see. `str(error)` is one line that also says what to
    do; `exit_code` is the exit status of the command line."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None) -> None:
        line = " ".join(message.split())
        # escape unpaired surrogates, which cannot be printed
        super().__init__(line.encode("utf-8", "backslashreplace").decode())
        self.param = param


class UsageError(PenstockError, ValueError):
    """An option, field or value that cannot be served; `param` names it. `rule` is the message
    without the given value: a server puts `rule` into its answers, which may be logged and must not
    hold user data.
    """

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
    """The machine lacks the memory, disk space or port that is needed."""


class JournalError(PenstockError):
    """A journal or output that cannot be written, or that another run wrote."""


class RecordError(PenstockError):
    """A record or samples of a measured run that cannot be believed. The message names the file and
    the field."""


class FaultError(PenstockError):
    """A bug in Penstock's code that fails one request; the others go on. A server's log has the
    traceback."""

    exit_code = 1


class EngineError(PenstockError):
    """The engine stopped; every waiting request gets this error."""

    exit_code = 1


class ReplicaError(EngineError):
    """One of several replicas stopped, together with a request that cannot be run again; the other
    replicas go on."""


class NoReplicaError(EngineError):
    """No replica is ready; replicas restart by themselves."""


def escaped(text: str) -> str:
    """Returns the text with unprintable characters replaced by Python's escapes."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def too_long(context: int) -> str:
    """Returns the error message for a prompt longer than the context. Clients (litellm, langchain)
    recognise these words and try another model."""
    return f"this model's maximum context length is {context} tokens and the prompt is too long"

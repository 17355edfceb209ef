"""Starts child processes, and describes how they ended. Knows processes; not what they do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from penstock.errors import CapacityError

QUIET = subprocess.DEVNULL


def command_of(module: str, *words: object) -> tuple[str, ...]:
    """Returns the command line `python -m MODULE WORDS...` with this interpreter."""
    return (sys.executable, "-m", module, *map(str, words))


def spawn(
    command: Sequence[str],
    what: str,
    *,
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    session: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts a child process. what: its name in errors. fds: file descriptors that it inherits.
    environment: variables added to this process's. session: start a new session, so that Ctrl-C at
    the terminal reaches the parent only. Raises CapacityError if it cannot be started."""
    everything = None if environment is None else {**os.environ, **environment}
    try:
        return subprocess.Popen(
            command,
            stdin=QUIET,
            stdout=stdout,
            stderr=stderr,
            pass_fds=fds,
            env=everything,
            start_new_session=session,
        )
    except OSError as error:
        raise could_not_start(what, error) from error


def could_not_start(what: str, error: OSError) -> CapacityError:
    """Returns the error to raise for a child that could not be started."""
    return CapacityError(
        f"{what} could not be started: {error.strerror}: free memory or raise the process limit"
    )


def how_ended(code: int | None) -> str:
    """Returns how a child ended, from its exit code: `ended with code 1`,
    `was killed by signal 9`."""
    return (
        f"was killed by signal {-code}"
        if code is not None and code < 0
        else f"ended with code {code}"
    )

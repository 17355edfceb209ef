"""Runs a build stage in its own process. A stage's memory use and crashes stay in that process.

`run_apart` starts `python -m penstock.build.stage_process`, sends it the function's name and
arguments, and reads its answer: a result, or a PenstockError. Knows processes; not the stages.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec

from penstock.children.carried_error import CarriedError
from penstock.children.frames import receive, send
from penstock.children.lifetime import begin_child
from penstock.children.spawn import command_of, how_ended, spawn
from penstock.errors import EngineError, PenstockError

# Functions that a stage process may run: name -> module in build/. Each takes JSON values as
# keyword arguments.
CALLS = {
    "try_weights": "choose_weights",
    "round_weights": "round_weights",
    "tune": "tune",
    "compile_kernels": "compile_kernels",
    "score_source": "check_quality",
    "score_built": "check_quality",
    "find_costly": "check_quality",
}


class _Call(msgspec.Struct):
    name: str
    job: dict[str, Any]


class _Answer(msgspec.Struct):
    result: dict[str, Any] = {}
    error: CarriedError | None = None


def run_apart(name: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the function's result. Raises the PenstockError that it raised, or EngineError when
    its process died."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:  # libraries' standard output goes to standard error
            command = command_of("penstock.build.stage_process", theirs.fileno())
            process = spawn(
                command, f"the process of stage {name}", fds=(theirs.fileno(),), stdout=2
            )
        try:
            # a process that has ended is reported below
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                send(ours, msgspec.json.encode(_Call(name, dict(job))))
            said = receive(ours)
            process.wait()
        finally:
            process.kill()  # no effect if it has ended
            process.wait()
    if process.returncode or said is None:
        raise EngineError(
            f"the process of stage {name} {how_ended(process.returncode)}: what it said stands"
            " above; the same command begins this stage again"
        )
    answer = msgspec.json.decode(said, type=_Answer)
    if answer.error is not None:
        raise answer.error.error()
    return answer.result


def main() -> int:
    begin_child()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        data = receive(channel)
        if data is None:
            return 1  # the parent was gone before it sent a call
        send(channel, msgspec.json.encode(_answer(msgspec.json.decode(data, type=_Call))))
    return 0


def _answer(call: _Call) -> _Answer:
    try:
        function = getattr(import_module(f"penstock.build.{CALLS[call.name]}"), call.name)
        return _Answer(result=function(**call.job))
    except PenstockError as error:
        return _Answer(error=CarriedError.of(error))


if __name__ == "__main__":
    sys.exit(main())

"""A stage in a process of its own: what it takes of memory, and how it may end, stays there.

`run_apart` starts `python -m penstock.build.stage_process`, tells it by a line of JSON which function to call with
what, and reads its answer, a line of JSON too: a result, or an error of ours. It knows processes; not what stages do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec

from penstock.children.carried_error import CarriedError
from penstock.children.lifetime import begin_child
from penstock.children.spawn import command_of, how_ended, spawn
from penstock.errors import EngineError, PenstockError

STAGE = command_of("penstock.build.stage_process")
# What may be called: a name -> its module in this room. Each takes its own job, as keywords that JSON can say.
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
    """Returns what the function gave. Raises the PenstockError that it raised; EngineError where its process died."""
    process = spawn(STAGE, f"the process of stage {name}", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        said, _ = process.communicate(msgspec.json.encode(_Call(name, dict(job))) + b"\n")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode or not said:
        raise EngineError(
            f"the process of stage {name} {how_ended(process.returncode)}: what it said stands above; the same "
            "command begins this stage again"
        )
    answer = msgspec.json.decode(said, type=_Answer)
    if answer.error is not None:
        raise answer.error.error()
    return answer.result


def main() -> int:
    begin_child()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    line = sys.stdin.buffer.readline()
    if not line:
        return 1  # the parent was gone before it said anything
    call = msgspec.json.decode(line, type=_Call)
    try:
        function = getattr(import_module(f"penstock.build.{CALLS[call.name]}"), call.name)
        answer = _Answer(result=function(**call.job))
    except PenstockError as error:
        answer = _Answer(error=CarriedError.of(error))
    answers.write(msgspec.json.encode(answer))
    answers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

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

from penstock import errors
from penstock.errors import EngineError, PenstockError
from penstock.parent_death import begin_child

STAGE = (sys.executable, "-m", "penstock.build.stage_process")
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
    result: dict[str, Any] | None = None
    kind: str | None = None
    message: str = ""
    param: str | None = None


def run_apart(name: str, job: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns what the function gave. Raises the PenstockError that it raised; EngineError where its process died."""
    process = subprocess.Popen(STAGE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment))
    try:
        said, _ = process.communicate(msgspec.json.encode(_Call(name, dict(job))) + b"\n")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode or not said:
        raise EngineError(
            f"the process of stage {name} ended with code {process.returncode}: what it said stands above; the same "
            "command begins this stage again"
        )
    answer = msgspec.json.decode(said, type=_Answer)
    if answer.kind is not None:
        kind = getattr(errors, answer.kind, EngineError)
        assert issubclass(kind, PenstockError)
        raise kind(answer.message, param=answer.param)
    return answer.result or {}


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
        answer = _Answer(kind=type(error).__name__, message=str(error), param=error.param)
    answers.write(msgspec.json.encode(answer))
    answers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

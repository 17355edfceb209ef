"""How a command ends that goes wrong or is stopped: one line on stderr and an exit code, never a
traceback.

A PenstockError is `penstock: <its line>` and its own code, a command line that cannot be read 2;
Ctrl-C ends with 130 and SIGTERM, for jobs that go on where they were, with 143, and how to go on.
It knows no command.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand

from penstock.errors import PenstockError

INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM, as shells have it


class OneLineCommand(TyperCommand):
    """A command whose errors by a user's hand come out as one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        empty = any(word == "" or word.endswith("=") for word in args) and not {".", "./"} & {*args}
        left: list[str] = super().parse_args(ctx, args)  # which takes the words
        for param in self.params if empty else ():
            given = ctx.params.get(str(param.name))
            if Path() in (given if isinstance(given, (list, tuple)) else [given]):
                # A shell's variable that isn't set, mostly; as a path it would be the folder that
                # one stands in.
                name = (
                    param.opts[0] if param.param_type_name == "option" else str(param.name).upper()
                )
                ctx.fail(f"an empty path stands for {name}: name a file or a folder")
        return left

    def invoke(self, ctx: Any) -> Any:
        options = [str(param.name) for param in self.params if param.param_type_name == "option"]
        return with_one_line(lambda: super(OneLineCommand, self).invoke(ctx), options)


def with_one_line(call: Callable[[], Any], options: Collection[str] = ()) -> Any:
    """Runs a command; what goes wrong by a user's hand comes out as one line, never as a traceback.

    options: the command's own, by their names in Python: where the line names one, it is written as
    the user types it.
    """
    try:
        return call()
    except PenstockError as error:
        print(f"penstock: {_as_typed(str(error), options)}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as stop:
        raise _stopped(stop, INTERRUPTED) from stop


def stopped_by_sigterm(job: Callable[[], object]) -> None:
    """Runs a job that goes on where it was. SIGTERM, which is how a service manager or a cluster
    stops one, does what Ctrl-C does: at the end of the step, all that is done is written, and how
    to go on is said."""
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        as_interrupt = signal.getsignal(signal.SIGINT)
        if callable(as_interrupt):
            as_interrupt(signal.SIGINT, frame)  # it may be held: engine/interrupts.py
        else:  # a shell's background process has Ctrl-C ignored
            raise KeyboardInterrupt

    usual = signal.signal(signal.SIGTERM, stop)
    try:
        job()
    except KeyboardInterrupt as error:
        if not came:
            raise
        raise _stopped(error, TERMINATED) from error
    finally:
        signal.signal(signal.SIGTERM, usual)


def _stopped(stop: KeyboardInterrupt, code: int) -> typer.Exit:
    print(f"penstock: {str(stop) or 'stopped'}", file=sys.stderr)
    return typer.Exit(code)


def _as_typed(line: str, options: Collection[str]) -> str:
    """`max_num_seqs` becomes `--max-num-seqs`. One word alone (n, seed) may be a word of the
    sentence: it stays."""
    names = [name for name in options if "_" in name]
    if not names:
        return line
    return re.sub(
        rf"(?<![\w.-])({'|'.join(names)})(?![\w=])", lambda m: "--" + m[1].replace("_", "-"), line
    )


def misread(error: Any, *, engine: bool) -> int:
    """Says in one line what the parser makes of a command line that it cannot read, and returns the
    exit code.

    engine: whether the engine's commands are installed; where they aren't, the line says what
    brings them."""
    near = get_close_matches(
        getattr(error, "option_name", ""), getattr(error, "possibilities", None) or (), cutoff=0.9
    )
    if hasattr(
        error, "possibilities"
    ):  # the parser's begin at 0.6: --enable-lora would be --enable-prefix-caching
        error.possibilities = near
    said: str = error.format_message()
    if "\n" in said:  # no words at all were given: the parser's answer is the help
        error.show()
        return int(error.exit_code)
    said = said.replace("Value error, ", "").rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "penstock"
    way = f"see {command} -h"
    if not engine and said.startswith("No such command"):
        way += ", or `pip install penstock` for the engine's commands (this is penstock-client)"
    print(f"penstock: {said[:1].lower()}{said[1:]}: {way}", file=sys.stderr)
    return int(error.exit_code)

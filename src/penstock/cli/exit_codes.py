"""Exit codes and one-line errors of commands. A command that fails or is stopped never prints a
traceback.

A PenstockError prints `penstock: MESSAGE` and ends with its own code, an unreadable command line
with 2. Ctrl-C ends with 130. SIGTERM ends jobs that can be resumed with 143. After both signals the
line says how to resume the job. Knows no command.
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

INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM, as in a shell


class OneLineCommand(TyperCommand):
    """A command that reports a user's errors in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        empty = any(word == "" or word.endswith("=") for word in args) and not {".", "./"} & {*args}
        left: list[str] = super().parse_args(ctx, args)  # the parser consumes `args`
        for param in self.params if empty else ():
            given = ctx.params.get(str(param.name))
            if Path() in (given if isinstance(given, (list, tuple)) else [given]):
                # An empty word is mostly an unset shell variable. As a path it would be the current
                # folder.
                name = (
                    param.opts[0] if param.param_type_name == "option" else str(param.name).upper()
                )
                ctx.fail(f"an empty path stands for {name}: name a file or a folder")
        return left

    def invoke(self, ctx: Any) -> Any:
        options = [str(param.name) for param in self.params if param.param_type_name == "option"]
        return with_one_line(lambda: super(OneLineCommand, self).invoke(ctx), options)


def with_one_line(call: Callable[[], Any], options: Collection[str] = ()) -> Any:
    """Runs a command, and reports a user's errors in one line without a traceback.

    options: Python names of the command's options; the message shows them as the user types them.
    """
    try:
        return call()
    except PenstockError as error:
        print(f"penstock: {_as_typed(str(error), options)}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as stop:
        raise _stopped(stop, INTERRUPTED) from stop


def stopped_by_sigterm(job: Callable[[], object]) -> None:
    """Runs a job that can be resumed. SIGTERM, which service managers and clusters send, does what
    Ctrl-C does: at the end of the step all results are written, and a message says how to resume.
    """
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        as_interrupt = signal.getsignal(signal.SIGINT)
        if callable(as_interrupt):
            # engine/interrupts.py may defer it to the end of the step
            as_interrupt(signal.SIGINT, frame)
        else:  # SIGINT is ignored, as in a shell's background process
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
    """Writes option names as flags: `max_num_seqs` becomes `--max-num-seqs`. Keeps names without an
    underscore (n, seed), which may be ordinary words."""
    names = [name for name in options if "_" in name]
    if not names:
        return line
    return re.sub(
        rf"(?<![\w.-])({'|'.join(names)})(?![\w=])", lambda m: "--" + m[1].replace("_", "-"), line
    )


def misread(error: Any, *, engine: bool) -> int:
    """Prints one line about a command line that the parser cannot read, and returns the exit code.

    engine: True if the engine's commands are installed; if not, the line says how to install them.
    """
    near = get_close_matches(
        getattr(error, "option_name", ""), getattr(error, "possibilities", None) or (), cutoff=0.9
    )
    # The parser's own cutoff of 0.6 would suggest --enable-prefix-caching for --enable-lora.
    if hasattr(error, "possibilities"):
        error.possibilities = near
    said: str = error.format_message()
    if "\n" in said:  # a command without any words: the parser answers with the help
        error.show()
        return int(error.exit_code)
    said = said.replace("Value error, ", "").rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "penstock"
    way = f"see {command} -h"
    if not engine and said.startswith("No such command"):
        way += ", or `pip install penstock` for the engine's commands (this is penstock-client)"
    print(f"penstock: {said[:1].lower()}{said[1:]}: {way}", file=sys.stderr)
    return int(error.exit_code)

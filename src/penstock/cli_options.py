"""What all commands share: an option for every knob of an engine, and how a command ends that goes wrong or is stopped.

Engine options are not written down anywhere: they are made from `penstock.config`'s fields, names, types and help
alike. A PenstockError ends a command with `penstock: <its line>` on stderr and its exit code; Ctrl-C with 130 and
SIGTERM, for jobs that go on where they were, with 143, and how to go on. It knows no command.
"""

from __future__ import annotations

import inspect
import re
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from types import FrameType
from typing import Annotated, Any, get_type_hints

import typer

from penstock.config import Config
from penstock.errors import PenstockError

INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM, as shells have it


def engine_options(*leave_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for every knob of Config but those left out; they arrive as its `knobs`.

    It also turns the errors of the command into one line and an exit code.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "knobs"]
        options = knob_parameters(leave_out)
        names = {option.name for option in options}

        @wraps(command)
        def run(**values: Any) -> None:
            knobs = {name: values.pop(name) for name in list(values) if name in names}
            with_one_line(lambda: command(**values, knobs=knobs), run.__annotations__)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, *options]]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def knob_parameters(leave_out: tuple[str, ...]) -> list[inspect.Parameter]:
    """A typer option a knob of Config: `max_num_seqs` is `--max-num-seqs`, with its type, default and help."""
    parameters = []
    for group in Config().groups():
        hints = get_type_hints(type(group))
        for knob in fields(group):
            if knob.name in leave_out:
                continue
            option = typer.Option(help=knob.metadata["help"])
            parameters.append(
                inspect.Parameter(
                    knob.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=knob.default,
                    annotation=Annotated[hints[knob.name], option],
                )
            )
    return parameters


def with_one_line(call: Callable[[], None], options: Collection[str] = ()) -> None:
    """Runs a command; what goes wrong by a user's hand comes out as one line, never as a traceback.

    options: the command's own, by their names in Python: where the line names one, it is written as the user types it.
    """
    try:
        call()
    except PenstockError as error:
        print(f"penstock: {_as_typed(str(error), options)}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as stop:
        raise _stopped(stop, INTERRUPTED) from stop


def stopped_by_sigterm(job: Callable[[], object]) -> None:
    """Runs a job that goes on where it was. SIGTERM, which is how a service manager or a cluster stops one, does what
    Ctrl-C does: at the end of the step, all that is done is written, and how to go on is said."""
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
    """`max_num_seqs` becomes `--max-num-seqs`. One word alone (n, seed) may be a word of the sentence: it stays."""
    names = [name for name in options if "_" in name]
    if not names:
        return line
    return re.sub(rf"(?<![\w.-])({'|'.join(names)})(?![\w=])", lambda m: "--" + m[1].replace("_", "-"), line)

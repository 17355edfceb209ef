"""Command line options for the engine's Config. Name, type, default and help come from the fields
of penstock.config ("knobs").

Also accepts vLLM's arguments, by the table in penstock.vllm_arguments. Knows no command.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from penstock.cli.exit_codes import OneLineCommand, with_one_line
from penstock.config import Config
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.vllm_arguments.argument import Argument


MODEL = typer.Argument(
    metavar="MODEL", help="A model folder, a hub id, or `demo` for the model in the package."
)
DEMO = "`demo` is the one in the package"


def engine_options(*leave_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for every field of Config except `leave_out`. The command gets the
    options that the user typed as its argument `knobs`, a dict."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.name != "knobs"
        ]
        options = knob_parameters(leave_out)
        names = {option.name for option in options}

        @wraps(command)
        def run(**values: Any) -> None:
            knobs = {name: values.pop(name) for name in list(values) if name in names}
            command(
                **values, knobs={name: value for name, value in knobs.items() if value is not None}
            )

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, *options]]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.knobs = names  # type: ignore[attr-defined]
        return run

    return decorate


def given_options(context: typer.Context, *but: str) -> dict[str, str]:
    """Returns the options that the user typed, as Python name -> flag,
    without the names in `but`."""
    flags = {
        param.name: param.opts[0]
        for param in context.command.params
        if param.name and param.name not in but
    }
    sources = {
        name: getattr(context.get_parameter_source(name), "name", "DEFAULT") for name in flags
    }
    return {name: flag for name, flag in flags.items() if sources[name] != "DEFAULT"}


def refuse_options(given: dict[str, str], why: str) -> None:
    """Raises UsageError for the first of the `given` options (name -> flag). why: the message after
    the flag."""
    for name, flag in given.items():
        raise UsageError(f"{flag} {why}", param=name)


def knob_parameters(leave_out: tuple[str, ...]) -> list[inspect.Parameter]:
    """Returns a typer option for each field of Config: `max_num_seqs` becomes `--max-num-seqs`,
    with the field's type, default and help."""
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


class EngineCommand(OneLineCommand):
    """A command with engine options. Takes vLLM's arguments out of the command line before the
    parser sees it, so that they are neither in the help nor suggested for a mistyped option."""

    serves = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from penstock.vllm_arguments.engine_table import ENGINE
        from penstock.vllm_arguments.server_table import SERVE
        from penstock.vllm_arguments.sift import meant, sift

        table = ENGINE | SERVE if self.serves else ENGINE
        words, given = list[str](), dict[str, Any]()
        names = [param.name for param in self.params]
        with_one_line(lambda: _part(iter(args), self.params, table, words, given), names)
        left: list[str] = super().parse_args(ctx, words)
        _, told = with_one_line(lambda: sift(given, table, ctx.params, _typed), names)
        for line in told:
            print(f"penstock: {line}", file=sys.stderr)
        for name in self.callback.knobs:  # type: ignore[union-attr]  # set by engine_options
            if ctx.get_parameter_source(name).name == "DEFAULT":
                ctx.params[name] = None
        ctx.params.update(with_one_line(lambda: meant(given), names))
        return left


class ServeCommand(EngineCommand):
    """A command that takes the arguments of vLLM's server too."""

    serves = True


def _part(
    args: Iterator[str],
    params: list[Any],
    table: dict[str, Argument],
    words: list[str],
    given: dict[str, Any],
) -> None:
    """Splits a command line: appends the command's own options to `words`, and puts vLLM's
    arguments into `given`. Raises UsageError."""
    from penstock.vllm_arguments.sift import ours, sift

    own = {
        flag: param
        for param in params
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("--")
    }
    for word in args:
        if word == "--":
            words += [word, *args]
            return
        flag, text = _split(word)
        # inner: the part after the dot, as `mode` in --compilation-config.mode 3
        name, _, inner = flag[2:].replace("-", "_").partition(".")
        positive = name if name in table else name.removeprefix("no_")
        argument = table.get(positive) if flag.startswith("--") else None
        if flag in own:
            text = next(args, None) if text is None and not own[flag].is_flag else text
            words += [flag] if text is None else [flag, ours(name, text)]
        elif flag == "--model" and "model" in (param.name for param in params):
            words.append(_needed(word, text, args))
        elif argument is None or (positive != name and not argument.is_flag):
            words.append(word)
        elif argument.is_flag:
            given[positive] = positive == name
        else:
            text = _needed(word, text, args)
            given[name] = {inner: _value(text)} if inner else _value(text)
            # refuse at once, since only vLLM knows how many of the next words are the argument's
            # values
            if not argument.taken:
                sift({name: given[name]}, table, shown=_typed)


def _typed(name: str, value: Any) -> str:
    """Returns an argument with its value as a user types it."""
    flag = name.replace("_", "-")
    return (
        f"--{flag} {value}"
        if not isinstance(value, bool)
        else f"--{flag}"
        if value
        else f"--no-{flag}"
    )


def _split(word: str) -> tuple[str, str | None]:
    """Splits a word into the option's name, with dashes (vLLM takes underscores too) and in its
    long form, and the value joined to it by "="."""
    from penstock.vllm_arguments.engine_table import SHORT

    flag, joined, text = word.partition("=")
    if flag.startswith("-O") and flag != "-O":  # -O3 means -O=3
        flag, joined, text = "-O", "=", word[2:]
    flag = "--" + SHORT[flag] if flag in SHORT else flag
    return flag.replace("_", "-") if flag.startswith("--") else flag, text if joined else None


def _needed(word: str, text: str | None, args: Iterator[str]) -> str:
    value = next(args, None) if text is None else text
    if value is None:
        raise UsageError(f"option {word} requires an argument: give it one, or leave it out")
    return value


def _value(text: str) -> Any:
    """Parses the value of a vLLM argument: JSON, None, or the text itself."""
    if text in ("None", "none"):
        return None
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text

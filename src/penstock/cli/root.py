"""The `penstock` command itself. Has the commands that need no engine: bench, almanac and batch.

The distribution penstock-client has only these. Where the engine is installed, commands.py adds the
others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

from penstock import __version__
from penstock.cli.almanac_commands import almanac_app
from penstock.cli.answers_command import BENCH
from penstock.cli.batch_commands import batch_app
from penstock.cli.exit_codes import misread

HERE = Path(__file__).parent
ENGINE = (HERE / "commands.py").is_file()  # True if the engine's commands are installed
# True if penstock-client is installed: only its wheel has this file
CLIENT = (HERE / "client.txt").is_file()
# the parser's UsageError; its module's name differs between versions of typer
MISREAD: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="penstock",
    help="Runs open-weight language models at full pressure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help starts in half the time and cuts no option name short
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(BENCH, name="bench")
app.add_typer(almanac_app, name="almanac")
app.add_typer(batch_app, name="batch")


def main() -> None:
    """Runs the command line: entry point of `penstock` and `python -m penstock`."""
    if ENGINE and CLIENT:
        print(
            "penstock: penstock and penstock-client are both installed here, and write the same"
            " files: `pip uninstall penstock-client penstock`, then `pip install penstock`, which"
            " has all commands",
            file=sys.stderr,
        )
        sys.exit(2)
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    try:
        code = _for_words(app, words)(standalone_mode=False)
    except MISREAD as error:
        sys.exit(misread(error, engine=ENGINE))
    sys.exit(code)


def _for_words(of: typer.Typer, words: list[str]) -> typer.Typer:
    """Returns a copy in which only the command that `words` name has its options: Typer makes a
    parser of every command, which takes a third of the time of `--help`. Names and first lines
    stay."""
    (word, *others), made = words or [""], copy(of)
    made.registered_commands = [copy(command) for command in of.registered_commands]
    for command in made.registered_commands:
        if command.callback is not None and word != _name(command):
            command.callback = _without_options(command.callback)
    made.registered_groups = [copy(group) for group in of.registered_groups]
    for group in made.registered_groups:
        if group.typer_instance is not None:
            inner = others if word == group.name else []
            group.typer_instance = _for_words(group.typer_instance, inner)
    return made


def _name(command: CommandInfo) -> str:
    assert command.callback is not None
    return command.name or get_command_name(command.callback.__name__)


def _without_options(command: Callable[..., Any]) -> Callable[[], None]:
    def named() -> None:
        raise AssertionError("a command that the words name keeps its options")

    named.__name__, named.__doc__ = command.__name__, command.__doc__
    return named


def _version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback(
    epilog=(
        ""
        if ENGINE
        else "This is penstock-client: `pip install penstock` brings the engine's commands."
    )
)
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and stop.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Runs open-weight language models at full pressure."""

"""The almanac's commands: parse, import, call. It knows what they are called; the work is the almanac's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

almanac_app = typer.Typer(help="The almanac: how fast is any engine.", no_args_is_help=True, rich_markup_mode=None)

Records = Annotated[Path, typer.Option(help="Folder of records: every .json under it is one.")]
RECORDS = Path("almanac/records")


@almanac_app.command("build")
def build_command(
    *,
    out: Annotated[Path, typer.Option(help="Folder for the page: a new one, an empty one or an older page.")],
    records: Records = RECORDS,
) -> None:
    """Make the page: one folder of static files that opens from the file system.

    Files that are no records are named and left out; the exit code is 1 then."""
    from penstock.cli import with_one_line

    with_one_line(lambda: _build(records, out))


@almanac_app.command("serve")
def serve_command(
    *,
    records: Records = RECORDS,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any free one.", min=0, max=65535)] = 8080,
) -> None:
    """Make the page in a temporary folder and show it on this machine."""
    from penstock.cli import with_one_line

    with_one_line(lambda: _serve(records, port))


def _build(records: Path, out: Path) -> None:
    from penstock.almanac.page.build import build

    built = build(records, out)
    _tell(built.records, built.refused)
    typer.echo(f"{out / 'index.html'}: open it in a browser")
    if built.refused:
        raise typer.Exit(1)


def _serve(records: Path, port: int) -> None:
    import tempfile

    from penstock.almanac.page.build import build
    from penstock.almanac.page.serve import serve

    with tempfile.TemporaryDirectory(prefix="almanac-") as folder:
        built = build(records, Path(folder))
        _tell(built.records, built.refused)
        serve(Path(folder), port, lambda address: typer.echo(f"{address} (Ctrl-C ends it)"))


def _tell(records: int, refused: list[tuple[str, str]]) -> None:
    for name, reason in refused:
        typer.echo(f"penstock: refused {name}: {reason}", err=True)
    typer.echo(f"{records} records" + (f", {len(refused)} files refused" if refused else ""))

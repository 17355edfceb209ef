"""Commands of `penstock almanac`. The almanac is the collection of benchmark records. Knows the
commands' options; penstock.almanac does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.exit_codes import OneLineCommand

almanac_app = typer.Typer(
    help="The almanac: how fast is any engine.", no_args_is_help=True, rich_markup_mode=None
)

Records = Annotated[Path, typer.Option(help="Folder of records: every .json under it is one.")]
RECORDS = Path("almanac/records")
NO_RECORD = "run.json"  # .json file in a benchmark run's folder that is no benchmark record
BEGIN = (
    "go where one is, name one, or measure (`penstock bench run`) and begin one with `penstock"
    " almanac add RUN`"
)


@almanac_app.command("build", cls=OneLineCommand)
def build_command(
    *,
    out: Annotated[
        Path, typer.Option(help="Folder for the page: a new one, an empty one or an older page.")
    ],
    records: Records = RECORDS,
) -> None:
    """Make the almanac's page: one folder of static files that opens from the file system.

    Files that are no records are named and left out; the exit code is then 1."""
    from penstock.almanac.page.build import build

    built = build(records, out)
    _tell(built.records, built.refused)
    typer.echo(f"{out / 'index.html'}: open it in a browser")
    if built.refused:
        raise typer.Exit(1)


@almanac_app.command("serve", cls=OneLineCommand)
def serve_command(
    *,
    records: Records = RECORDS,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 is any free one.", min=0, max=65535)
    ] = 8080,
) -> None:
    """Make the almanac's page in a temporary folder and show it on this machine."""
    import tempfile

    from penstock.almanac.page.build import build
    from penstock.almanac.page.page_server import serve

    with tempfile.TemporaryDirectory(prefix="almanac-") as folder:
        built = build(records, Path(folder))
        _tell(built.records, built.refused)
        serve(Path(folder), port, lambda address: typer.echo(f"{address} (Ctrl-C ends it)"))


@almanac_app.command("add", cls=OneLineCommand)
def add_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of measured runs; one a shape.")
    ],
    *,
    records: Records = RECORDS,
) -> None:
    """Take measured runs into the almanac: one file per record, after every number was derived
    again.

    A run that another version measured goes in as this version derives it, and a line says what
    changed.
    """
    from penstock.almanac.collect import add
    from penstock.bench.write_record import commit
    from penstock.errors import RecordError

    refused, here = 0, commit()
    for run in _folders(runs):
        try:
            typer.echo(f"{add(run, records, commit=here, tell=typer.echo)}: added")
        except RecordError as error:
            refused += 1
            typer.echo(f"penstock: refused {run}: {error}", err=True)
    if refused:
        raise typer.Exit(1)


@almanac_app.command("validate", cls=OneLineCommand)
def validate_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH...]",
            help="Records, runs, or folders of them. Left out: almanac/records.",
        ),
    ] = None,
    *,
    raw: Annotated[
        Path | None, typer.Option(help="The raw data of one record. A run's folder has its own.")
    ] = None,
) -> None:
    """Check records: their form, and that they don't contradict themselves. Wrong ones are named,
    and the exit code is 1.

    With its raw data beside it every number of a record is derived again: only this proves that it
    was measured. Other records are reported as not re-derived; points that name no raw data are
    refused. In the almanac's own folder the places are checked too: one file per run, each where it
    belongs, and nothing else.
    """
    if paths or raw:
        _validate(paths, raw)
    else:
        _validate_almanac(RECORDS)


def _folders(runs: list[Path]) -> list[Path]:
    """Returns the folders with one workload shape each. A run of several shapes has one folder per
    shape."""
    from penstock.almanac.collect import RECORD

    found = []
    for run in runs:
        inner = [path.parent for path in sorted(run.glob(f"*/{RECORD}"))]
        found += [run] if (run / RECORD).exists() or not inner else inner
    return found


def _validate_almanac(root: Path) -> None:
    from penstock.almanac.collect import read_all
    from penstock.errors import UsageError

    if not root.is_dir():
        raise UsageError(f"there is no folder {root} here: {BEGIN}", param="path")
    records, problems = read_all(root)
    for name, problem in problems.items():
        typer.echo(f"penstock: refused {name}: {problem}", err=True)
    typer.echo(_checked(len(records), len(records) + len(problems), 0))
    if problems:
        raise typer.Exit(1)


def _validate(paths: list[Path] | None, raw: Path | None) -> None:
    from penstock.almanac.collect import RAW, names_raw
    from penstock.almanac.validate import validate
    from penstock.errors import RecordError, UsageError

    files = [file for path in paths or [] for file in _records_in(path)]
    if not files or (raw is not None and len(files) > 1):
        told = (
            "--raw belongs to one record"
            if raw
            else f"there is no record in {', '.join(map(str, paths or []))}"
        )
        raise UsageError(
            f"{told}: name a record, a run's folder or a folder of records", param="path"
        )
    held, derived = 0, 0
    for file in files:
        beside = raw or file.with_name(RAW)
        known = beside if raw or beside.is_file() else None
        try:
            names_raw(validate(file, known), file)
        except RecordError as error:
            typer.echo(f"penstock: refused {file}: {error}", err=True)
            continue
        held, derived = held + 1, derived + (known is not None)
    typer.echo(_checked(held, len(files), derived))
    if held < len(files):
        raise typer.Exit(1)


def _checked(held: int, count: int, derived: int) -> str:
    rest = (
        f"{held - derived} not re-derived, for their raw data isn't here" if derived < held else ""
    )
    whole = f"{derived} re-derived from their raw data" if derived else ""
    return ", ".join(
        part for part in (f"{held} of {count} records hold together", whole, rest) if part
    )


def _records_in(path: Path) -> list[Path]:
    """Returns the paths of benchmark records: the file itself, or a folder's .json files except a
    run's other files."""
    if not path.is_dir():
        return [path]
    inside = [file.relative_to(path) for file in sorted(path.rglob("*.json"))]
    return [path / file for file in inside if file.name != NO_RECORD and "report" not in file.parts]


def _tell(records: int, refused: list[tuple[str, str]]) -> None:
    for name, reason in refused:
        typer.echo(f"penstock: refused {name}: {reason}", err=True)
    typer.echo(f"{records} records" + (f", {len(refused)} files refused" if refused else ""))
    if not records:
        typer.echo(f"the page has nothing to show yet: {BEGIN}")

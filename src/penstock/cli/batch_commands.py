"""Commands of `penstock batch`, for batches on a server. jobs/remote_batch.py does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.exit_codes import OneLineCommand

batch_app = typer.Typer(
    help="Batches on a server: files of requests in, of answers out.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Url = Annotated[
    str,
    typer.Option(
        envvar=["PENSTOCK_URL", "OPENAI_BASE_URL"],
        help="The server; it was started with --state-dir.",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        envvar=["PENSTOCK_API_KEY", "OPENAI_API_KEY"], help="Of a server that asks for one."
    ),
]
Id = Annotated[str, typer.Argument(metavar="ID", help="What `penstock batch submit` printed.")]
URL = "http://127.0.0.1:8000"


@batch_app.command("submit", cls=OneLineCommand)
def submit_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Requests, a JSON line each, as OpenAI's batches have; not packed."
        ),
    ],
    *,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="/v1/completions or /v1/chat/completions. Left out: the first line's url."
        ),
    ] = None,
    url: Url = URL,
    api_key: Key = None,
) -> None:
    """Upload a file and start a batch from it; print the batch's id."""
    from penstock.jobs.remote import Remote
    from penstock.jobs.remote_batch import submit

    print(submit(Remote(url, api_key), file, endpoint))


@batch_app.command("watch", cls=OneLineCommand)
def watch_command(batch_id: Id, *, url: Url = URL, api_key: Key = None) -> None:
    """Show a batch's progress until it is over.

    The exit code is 0 if the batch has completed. The server may stop and start again meanwhile.
    """
    from penstock.jobs.remote import Remote
    from penstock.jobs.remote_batch import watch

    if watch(Remote(url, api_key), batch_id).get("status") != "completed":
        raise typer.Exit(1)


@batch_app.command("cancel", cls=OneLineCommand)
def cancel_command(batch_id: Id, *, url: Url = URL, api_key: Key = None) -> None:
    """Stop a batch; finished answers can still be fetched."""
    from penstock.jobs.remote import Remote
    from penstock.jobs.remote_batch import line_of

    print(line_of(Remote(url, api_key).cancel(batch_id)))


@batch_app.command("fetch", cls=OneLineCommand)
def fetch_command(
    batch_id: Id,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="File for the answers; beside out.jsonl, out.errors.jsonl for the failed.",
        ),
    ],
    *,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace both files, whatever they hold.")
    ] = False,
    url: Url = URL,
    api_key: Key = None,
) -> None:
    """Write the rows of a finished batch to files."""
    from penstock.jobs.remote import Remote
    from penstock.jobs.remote_batch import fetch

    for path, lines in fetch(Remote(url, api_key), batch_id, out, overwrite=overwrite):
        print(f"{path}: {lines:,} rows")

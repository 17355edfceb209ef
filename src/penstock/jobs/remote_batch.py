"""`penstock batch`: runs batches on a remote server. It submits a file, watches a batch until it is
over, cancels it, or fetches its results. The server may restart meanwhile. Knows OpenAI's objects
and the screen; remote.py sends the requests.
"""

from __future__ import annotations

import time
from codecs import BOM_UTF8
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from penstock.disk import check_writable, write_whole
from penstock.errors import JournalError, UsageError
from penstock.jobs.remote import Json, NoAnswerError, Remote, RemoteError, open_lines, parse_object
from penstock.journal import journal_of
from penstock.status_line import StatusLine, duration

OVER = ("completed", "failed", "cancelled", "expired")
LOOK_EVERY = 2.0  # seconds between two queries of a batch's state
LONGEST_LINE = 32 << 20  # most bytes of the file's first line, which names the endpoint
WAITS = {  # reasons why a batch waits, as our server reports them -> text on the screen
    "disk": "held up by the server's disk: its log says why",
    "model": "waits for a server of its model",
    "turn": "waits for its turn",
}
MOST_TOLD = 20  # most bad lines listed on the screen


def submit(remote: Remote, path: Path, endpoint: str | None) -> str:
    """Uploads a file, makes a batch of it, and returns the batch's id. endpoint None: the endpoint
    in the file's first line."""
    endpoint = endpoint or _endpoint_of(path)
    file_id = remote.upload(path)["id"]
    try:
        return str(remote.create(file_id, endpoint)["id"])
    except RemoteError as error:
        # delete the file only if the server refused the batch; after other errors the batch may
        # exist
        if 400 <= error.status < 500 and error.status != 408:
            # if deleting fails too, the refusal is still the error to report
            with suppress(RemoteError):
                remote.delete(file_id)
        raise


def _endpoint_of(path: Path) -> str:
    """Returns the endpoint that the batch file's first line names."""
    with open_lines(path) as file:
        first = next(
            (
                line
                for line in iter(partial(file.readline, LONGEST_LINE), b"")
                if not line.isspace()
            ),
            b"",
        )
    url = parse_object(first.removeprefix(BOM_UTF8)).get("url")
    if not isinstance(url, str):
        message = (
            f"{path} doesn't begin with a line that has a url: see docs/batches.md, or give"
            " --endpoint"
        )
        raise UsageError(message, param="file")
    return url


def watch(
    remote: Remote, batch_id: str, out: TextIO | None = None, every: float = LOOK_EVERY
) -> Json:
    """Shows a batch's progress until it is over, and returns it; shows bad lines as soon as they
    are known. Raises RemoteError for an error that waiting does not fix."""
    screen = StatusLine(out)
    troubles: list[str] = []
    said = ""  # the status line shown last

    def show(text: str) -> None:
        nonlocal said
        before, said = said, text.split(",")[0]
        screen.show(text, anew=said != before)

    while True:
        try:
            batch = remote.batch(batch_id)
        except NoAnswerError:
            if not said:  # no answer so far: the address is wrong
                raise
            show("the server does not answer; its batches go on when it is started again")
        except RemoteError as error:
            if error.status not in (429, 502, 503, 504):
                raise
            show(str(error))
        else:
            found, over = troubles_of(batch), batch.get("status") in OVER
            (screen.keep if over else show)(line_of(batch))
            for line in found if found != troubles else ():
                screen.keep(f"penstock: {line}")
            troubles = found
            if over:
                return batch
        time.sleep(every)


def line_of(batch: Json) -> str:
    """Returns a batch's progress in one line."""
    counts = batch.get("request_counts") or {}
    total, completed, failed = (
        int(counts.get(name) or 0) for name in ("total", "completed", "failed")
    )
    parts = [str(batch.get("status"))]
    if total:
        parts.append(f"{completed + failed:,} of {total:,}")
    if failed:
        parts.append(f"{failed:,} failed")
    expected = batch.get("expected_at")
    if isinstance(expected, int):
        parts.append(f"done in about {duration(max(0.0, expected - time.time()))}")
    waits = batch.get("waits_for")
    if isinstance(waits, str) and waits in WAITS:
        parts.append(WAITS[waits])
    return ", ".join(parts)


def troubles_of(batch: Json) -> list[str]:
    """Returns the bad lines of a batch, one text each; the last text gives the number of further
    ones."""
    found = (batch.get("errors") or {}).get("data") or []
    told = [_trouble(error) for error in found[:MOST_TOLD] if isinstance(error, dict)]
    if told and batch.get("status") != "failed":
        told.insert(0, "bad lines are not run and go to the error file:")
    if len(found) > MOST_TOLD:
        told.append(
            f"and {len(found) - MOST_TOLD} more: GET /v1/batches/{batch.get('id')} has them all"
        )
    return told


def _trouble(error: Json) -> str:
    where = f"line {error['line']}: " if isinstance(error.get("line"), int) else ""
    named = f" ({error['param']})" if error.get("param") else ""
    return f"{where}{error.get('message')}{named}"


def fetch(
    remote: Remote, batch_id: str, out: Path, *, overwrite: bool = False
) -> list[tuple[Path, int]]:
    """Writes the results of a finished batch: OUT, and beside it a file of the failed lines, named
    by `error_file_of`, each whole or not at all. Returns (file, lines) of each.

    overwrite: replaces both files; a file for which the batch has nothing is deleted. Raises
    RemoteError if the batch is not over or has nothing, JournalError if one of the two names is
    taken or cannot be a file.
    """
    if str(out) == "-":
        raise UsageError(
            "- is no OUT: answers and failed lines are two files, so name one", param="out"
        )
    # check first: a path such as `/` has no name from which the error file's name can be made
    _check_free(out, overwrite)
    places = {"completed": out, "failed": error_file_of(out)}
    _check_free(places["failed"], overwrite)
    batch = remote.batch(batch_id)
    if batch.get("status") not in OVER:
        raise RemoteError(
            f"{batch_id} is not over ({line_of(batch)}): penstock batch watch {batch_id}"
        )
    files = {"completed": batch.get("output_file_id"), "failed": batch.get("error_file_id")}
    if not any(files.values()):
        raise RemoteError(
            f"{batch_id} is {batch.get('status')} and left no rows: penstock batch watch {batch_id}"
        )
    counts, written = batch.get("request_counts") or {}, []
    for kind, place in places.items():
        if file_id := files[kind]:
            write_whole(place, partial(remote.download, str(file_id)), link=True)
            written.append((place, int(counts.get(kind) or 0)))
        elif overwrite:
            place.unlink(missing_ok=True)
    return written


def error_file_of(out: Path) -> Path:
    """Returns the path of the errors: out.errors.jsonl for out.jsonl, out.errors for out."""
    return out.with_name(f"{out.stem}.errors{out.suffix}")


def _check_free(place: Path, overwrite: bool) -> None:
    """Raises JournalError if the output's name is taken."""
    check_writable(place, link=True)
    for journal in (journal_of(place), journal_of(place.resolve())):
        if journal.exists():  # a `penstock run` that is writing this file would lose its rows
            raise JournalError(f"{place} belongs to the run of {journal.name}: name another OUT")
    if not overwrite and place.exists() and place.stat().st_size:
        raise JournalError(
            f"{place} is there already: name another OUT, or replace it with --overwrite"
        )

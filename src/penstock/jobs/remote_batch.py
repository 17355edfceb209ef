"""`penstock batch`: submit FILE -> ID, watch ID until it is over, cancel ID, fetch ID OUT. The work
is the server's, which may go and come back meanwhile. It knows OpenAI's objects and the screen; how
they travel is remote's.
"""

from __future__ import annotations

import json
import time
from codecs import BOM_UTF8
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from penstock.disk import check_writable, write_whole
from penstock.errors import JournalError, UsageError
from penstock.jobs.remote import Json, NoAnswerError, Remote, RemoteError, open_lines
from penstock.journal import journal_of
from penstock.status_line import StatusLine, duration

OVER = ("completed", "failed", "cancelled", "expired")
LOOK_EVERY = 2.0  # seconds
LONGEST_LINE = 32 << 20  # bytes of the line that says the endpoint
WAITS = {  # for what, in the words of our server
    "disk": "held up by the server's disk: its log says why",
    "model": "waits for a server of its model",
    "turn": "waits for its turn",
}
MOST_TOLD = 20  # bad lines that are named on the screen


def submit(remote: Remote, path: Path, endpoint: str | None) -> str:
    """Uploads a file and makes a batch of it; gives the batch's id. Without an endpoint it is the
    first line's."""
    endpoint = endpoint or _endpoint_of(path)
    file_id = remote.upload(path)["id"]
    try:
        return str(remote.create(file_id, endpoint)["id"])
    except RemoteError as error:
        if (
            400 <= error.status < 500 and error.status != 408
        ):  # after others the batch may be there, of that file
            with suppress(RemoteError):  # what was refused is told
                remote.delete(file_id)
        raise


def _endpoint_of(path: Path) -> str:
    """The first line's."""
    with open_lines(path) as file:
        first = next(
            (
                line
                for line in iter(partial(file.readline, LONGEST_LINE), b"")
                if not line.isspace()
            ),
            b"",
        )
    url: Any = None
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        url = json.loads(first.removeprefix(BOM_UTF8))["url"]
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
    """Says how far a batch is until it is over, and gives it then; bad lines as soon as they are
    known. Raises RemoteError for what no waiting mends."""
    screen = StatusLine(out)
    troubles: list[str] = []
    said = ""  # the status that was shown last

    def show(text: str) -> None:
        nonlocal said
        before, said = said, text.split(",")[0]
        screen.show(text, anew=said != before)

    while True:
        try:
            batch = remote.batch(batch_id)
        except NoAnswerError:
            if not said:  # it never answered: the address is wrong
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
    """How far it is, in one line."""
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
    """What a batch's check found, a text each bad line; the last says how many more there are."""
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
    """Writes what a batch that is over has: OUT, and beside it a file of the lines that failed,
    named as `error_file_of` says, each whole or not at all. Gives (file, lines).

    overwrite: both names are this batch's, whatever stands there; the one for which it has nothing
    is taken away. Raises RemoteError where it isn't over or has nothing, JournalError where one of
    the two names is taken or can be no file.
    """
    if str(out) == "-":
        raise UsageError(
            "- is no OUT: answers and failed lines are two files, so name one", param="out"
        )
    _check_free(out, overwrite)  # a folder may have no name to make the other of
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
    """out.jsonl: out.errors.jsonl; out: out.errors."""
    return out.with_name(f"{out.stem}.errors{out.suffix}")


def _check_free(place: Path, overwrite: bool) -> None:
    """Raises JournalError for a name that is somebody else's."""
    check_writable(place, link=True)
    for journal in (journal_of(place), journal_of(place.resolve())):
        if journal.exists():  # a run that is under way would write on into a file without a name
            raise JournalError(f"{place} belongs to the run of {journal.name}: name another OUT")
    if not overwrite and place.exists() and place.stat().st_size:
        raise JournalError(
            f"{place} is there already: name another OUT, or replace it with --overwrite"
        )

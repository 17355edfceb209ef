"""`penstock batch`: submit FILE -> ID, watch ID until it is over, cancel ID, fetch ID OUT. The work is the server's,
which may go and come back meanwhile. It knows OpenAI's objects and the screen; how they travel is remote's.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import TextIO

from penstock.errors import UsageError
from penstock.jobs.outputs import Landing
from penstock.jobs.remote import Json, NoAnswerError, Remote, RemoteError, open_lines
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
    """Uploads a file and makes a batch of it; gives the batch's id. Without an endpoint it is the first line's."""
    endpoint = _endpoint_of(path, endpoint)
    file_id = remote.upload(path)["id"]
    try:
        return str(remote.create(file_id, endpoint)["id"])
    except RemoteError as error:
        if 400 <= error.status < 500 and error.status != 408:  # after others the batch may be there, of that file
            _take_back(remote, file_id, error)
        raise


def _take_back(remote: Remote, file_id: str, refused: RemoteError) -> None:
    try:
        remote.delete(file_id)
    except RemoteError as error:
        raise RemoteError(f"{refused}; the uploaded {file_id} stays there ({error})", status=refused.status) from error


def _endpoint_of(path: Path, endpoint: str | None) -> str:
    """The one that is given, or the first line's."""
    try:
        with open_lines(path) as file:
            if file.read(2) == b"\x1f\x8b":
                raise UsageError(f"{path} is gzip, and servers take plain lines: gunzip -k it first", param="file")
            if endpoint:
                return endpoint
            file.seek(0)
            while (first := file.readline(LONGEST_LINE + 1)).isspace() and len(first) <= LONGEST_LINE:
                pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{path} cannot be read ({reason}): name a file of JSON lines", param="file") from error
    if len(first) > LONGEST_LINE:
        raise UsageError(f"{path}'s first line has more than 32 MiB: end each request with a newline", param="file")
    try:
        url = json.loads(first.removeprefix(b"\xef\xbb\xbf"))["url"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        message = f"{path} doesn't begin with a line that has a url: see docs/batches.md, or give --endpoint"
        raise UsageError(message, param="file") from error
    if not isinstance(url, str):
        raise UsageError(f"the url of {path}'s first line is no text: see docs/batches.md", param="file")
    return url


def watch(remote: Remote, batch_id: str, out: TextIO | None = None, every: float = LOOK_EVERY) -> Json:
    """Says how far a batch is until it is over, and gives it then; bad lines as soon as they are known. Raises
    RemoteError for what no waiting mends."""
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
    total, completed, failed = (int(counts.get(name) or 0) for name in ("total", "completed", "failed"))
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
        told.append(f"and {len(found) - MOST_TOLD} more: GET /v1/batches/{batch.get('id')} has them all")
    return told


def _trouble(error: Json) -> str:
    where = f"line {error['line']}: " if isinstance(error.get("line"), int) else ""
    named = f" ({error['param']})" if error.get("param") else ""
    return f"{where}{error.get('message')}{named}"


def fetch(remote: Remote, batch_id: str, out: Path, *, overwrite: bool = False) -> list[tuple[Path, int]]:
    """Writes what a batch that is over has: OUT, and beside it a file of the lines that failed, named as
    `error_file_of` says. Gives (file, lines). All of it is here before any name is taken.

    overwrite: both names are this batch's, whatever stands there; the one for which it has nothing is taken away.
    Raises RemoteError where it isn't over or has nothing, JournalError where one of the two names holds anything else
    than what would be written there, or can be no file.
    """
    if str(out) == "-":
        raise UsageError("- is no OUT: answers and failed lines are two files, so name one", param="out")
    places = Landing(out), Landing(error_file_of(out))
    batch = remote.batch(batch_id)
    if batch.get("status") not in OVER:
        raise RemoteError(f"{batch_id} is not over ({line_of(batch)}): penstock batch watch {batch_id}")
    named = batch.get("output_file_id"), batch.get("error_file_id")
    ids = [each if isinstance(each, str) else None for each in named]
    if not any(ids):
        raise RemoteError(f"{batch_id} is {batch.get('status')} and left no rows: penstock batch watch {batch_id}")
    with places[0], places[1]:
        for file_id, place in zip(ids, places, strict=True):
            if not overwrite:
                _refuse_another_size(remote, file_id, place)
        for file_id, place in zip(ids, places, strict=True):
            if file_id is not None:
                place.write(partial(remote.download, file_id))
            if not overwrite:
                place.spare()
        for file_id, place in zip(ids, places, strict=True):
            if file_id is not None or overwrite:
                place.take()
    counts = batch.get("request_counts") or {}
    lines = counts.get("completed"), counts.get("failed")
    return [(place.path, int(n or 0)) for file_id, place, n in zip(ids, places, lines, strict=True) if file_id]


def error_file_of(out: Path) -> Path:
    """out.jsonl: out.errors.jsonl; out: out.errors."""
    return out.with_name(f"{out.stem}.errors{out.suffix}")


def _refuse_another_size(remote: Remote, file_id: str | None, place: Landing) -> None:
    """So that what can't be the same isn't fetched first."""
    size = place.size()
    if size and (file_id is None or remote.file(file_id).get("bytes") not in (size, None)):
        raise place.refuse()

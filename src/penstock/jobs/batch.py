"""`penstock batch`: a file of requests to a server, and what came of it back. The work is the server's.

    submit FILE -> ID      watch ID until it is over      cancel ID      fetch ID OUT

A watched server may go and come back: the batch goes on there, and so does the watching. It knows OpenAI's objects and
the screen; how they travel is remote's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from penstock.errors import UsageError
from penstock.jobs.progress import duration
from penstock.jobs.remote import Json, NoAnswerError, Remote, RemoteError

OVER = ("completed", "failed", "cancelled", "expired")
LOOK_EVERY = 2.0  # seconds
SAY_EVERY = 10.0  # seconds between lines where nobody looks at a terminal
MOST_TOLD = 20  # bad lines that are named on the screen


def submit(remote: Remote, path: Path, endpoint: str | None) -> str:
    """Uploads a file and makes a batch of it; gives the batch's id. Without an endpoint it is the first line's."""
    endpoint = endpoint or _endpoint_of(path)
    made = remote.upload(path)
    return str(remote.create(made["id"], endpoint)["id"])


def _endpoint_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{path} cannot be read ({reason}): name a file of JSON lines", param="file") from error
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
    screen = _Screen(out or sys.stderr)
    troubles: list[str] = []
    while True:
        try:
            batch = remote.batch(batch_id)
        except NoAnswerError:
            if not screen.said:  # it never answered: the address is wrong
                raise
            screen.say("the server does not answer; its batches go on when it is started again")
        except RemoteError as error:
            if error.status not in (429, 502, 503, 504):
                raise
            screen.say(str(error))
        else:
            over = batch.get("status") in OVER
            screen.say(line_of(batch), last=over)
            found = troubles_of(batch)
            if found != troubles:
                screen.tell(found)
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


def fetch(remote: Remote, batch_id: str, out: Path) -> list[tuple[Path, int]]:
    """Writes what a batch that is over has: OUT, and NAME.errors.jsonl for lines that failed. Gives (file, lines).

    Raises RemoteError where it isn't over or has nothing.
    """
    batch = remote.batch(batch_id)
    if batch.get("status") not in OVER:
        raise RemoteError(f"{batch_id} is not over ({line_of(batch)}): penstock batch watch {batch_id}")
    if not out.parent.is_dir() or out.is_dir():
        raise UsageError(f"{out} cannot be a file there: name one in a folder that exists", param="out")
    counts = batch.get("request_counts") or {}
    wanted = (
        (batch.get("output_file_id"), out, counts.get("completed")),
        (batch.get("error_file_id"), out.with_name(f"{out.stem}.errors{out.suffix}"), counts.get("failed")),
    )
    made = []
    for file_id, path, lines in wanted:
        if isinstance(file_id, str):
            remote.download(file_id, path)
            made.append((path, int(lines or 0)))
    if not made:
        raise RemoteError(f"{batch_id} is {batch.get('status')} and left no rows: penstock batch watch {batch_id}")
    return made


class _Screen:
    """A line that changes in its place on a terminal; elsewhere a line now and then."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._live = out, out.isatty()
        self._last = ""
        self._at = float("-inf")
        self.said = False

    def tell(self, texts: Iterable[str]) -> None:
        """Lines that stay."""
        for text in texts:
            self._out.write(("\r\x1b[2K" if self._live else "") + f"penstock: {text}\n")
        self._out.flush()

    def say(self, text: str, *, last: bool = False) -> None:
        self.said = True
        now = time.monotonic()
        if self._live:
            self._out.write("\r\x1b[2K" + text + ("\n" if last else ""))
        elif last or text.split(",")[0] != self._last.split(",")[0] or now - self._at >= SAY_EVERY:
            self._out.write(text + "\n")
            self._at, self._last = now, text
        self._out.flush()

"""One batch as its client sees it: a file of lines, some of them bad, is uploaded and run to its
end or cancelled half way; both results are read as streams and compared with what each line should
give, and all files are deleted.

It knows the routes of files and batches and the fake's arithmetic; what else a service does
meanwhile is its callers'.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fake_runner import expected

ROUTE = "/v1/completions"
OVER = ("completed", "failed", "cancelled", "expired")
EVERY = 0.1  # seconds between two looks at a batch
PATIENCE = 600.0  # seconds that a batch may take


class BatchError(Exception):
    """The service did what it shouldn't; the batch goes no further."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a batch is asked for. bad: how many of its lines cannot be run, one in each of so many
    equal parts; every second of them is no JSON. ids: of a prompt. tokens: of an answer. compared:
    of so many answers one's tokens are."""

    lines: int
    bad: int
    ids: int
    tokens: int = 4
    compared: int = 1
    cancelled: bool = False

    def is_bad(self, number: int) -> bool:
        return self._place(number)[1] == self.lines // self.bad // 2

    def is_nonsense(self, number: int) -> bool:
        return self.is_bad(number) and self._place(number)[0] % 2 == 1

    def _place(self, number: int) -> tuple[int, int]:
        return divmod(number, self.lines // self.bad)

    def prompt(self, number: int) -> list[int]:
        return [number % 250, number // 250 % 250] + [100 + number % 100] * (self.ids - 2)

    def answer(self, number: int, words: Sequence[int]) -> list[int]:
        return expected(self.prompt(number), self.tokens, words, number)

    def line(self, number: int) -> bytes:
        if self.is_nonsense(number):
            return b'{"custom_id": "row %d", \n' % number
        samples = "many" if self.is_bad(number) else 1
        body = {
            "model": "fake",
            "prompt": self.prompt(number),
            "max_tokens": self.tokens,
            "seed": number,
            "n": samples,
        }
        row = {
            "custom_id": f"row {number}",
            "method": "POST",
            "url": ROUTE,
            "body": {**body, "return_token_ids": True},
        }
        return json.dumps(row).encode() + b"\n"

    def write(self, path: Path) -> int:
        """The batch's file -> its bytes."""
        assert self.lines % self.bad == 0
        with path.open("wb") as file:
            return sum(file.write(self.line(number)) for number in range(self.lines))


@dataclass
class Done:
    """What became of a batch. Times are seconds: of the upload,
    and from there until it was over."""

    status: str = ""
    upload: float = 0.0
    run: float = 0.0
    faults: list[str] = field(default_factory=list)


class Results:
    """Compares rows of the two results with what their lines asked for, as they come."""

    def __init__(self, asked: Asked, words: Sequence[int]) -> None:
        self._asked, self._words = asked, words
        self._seen: Counter[int] = Counter()
        self._good = self._wrong = 0

    def output(self, rows: Iterable[Any]) -> None:
        for row in rows:
            self._good += 1
            self._take(_number(row), self._is_right(row))

    def errors(self, rows: Iterable[Any], cancelled: bool) -> None:
        for row in rows:
            number = _number(row)
            self._take(
                number, self._is_refused(row, number) or (cancelled and self._is_unrun(row, number))
            )

    def _take(self, number: int, right: bool) -> None:
        self._seen[number] += 1
        self._wrong += not right

    def _is_right(self, row: Any) -> bool:
        number, response = _number(row), row["response"]
        if self._asked.is_bad(number) or response["status_code"] != 200 or row["error"] is not None:
            return False
        ids = [choice["token_ids"] for choice in response["body"]["choices"]]
        if number % self._asked.compared:
            return len(ids) == 1 and len(ids[0]) == self._asked.tokens
        return ids == [self._asked.answer(number, self._words)]

    def _is_refused(self, row: Any, number: int) -> bool:
        """What a bad line gets: the route's own answer, or where it is no JSON its number."""
        if self._asked.is_nonsense(number):
            return row["custom_id"] is None and row["response"] is None
        return self._asked.is_bad(number) and row["response"]["status_code"] == 400

    def _is_unrun(self, row: Any, number: int) -> bool:
        return (
            not self._asked.is_bad(number)
            and row["error"]["code"] == "batch_cancelled"
            and row["response"] is None
        )

    def faults(self, batch: Any) -> list[str]:
        """batch: the object of it, over."""
        lines, bad = self._asked.lines, self._asked.bad
        seen = sum(self._seen.values())
        found = {
            "lost": len(set(range(lines)) - set(self._seen)),
            "doubled or nobody's": seen - len(set(range(lines)) & set(self._seen)),
            "not as asked": self._wrong,
        }
        counts = {"total": lines, "completed": self._good, "failed": seen - self._good}
        told = [f"batch: {count} lines {what}" for what, count in found.items() if count]
        if batch["request_counts"] != counts:
            told.append(f"batch: it counts {batch['request_counts']}, its files {counts}")
        if batch["status"] == "completed" and seen - self._good != bad:
            told.append(f"batch: {seen - self._good} rows of errors instead of {bad}")
        named = [error["line"] for error in batch["errors"]["data"]]
        if named != [1 + number for number in range(lines) if self._asked.is_bad(number)]:
            told.append(f"batch: it says that lines {named} are bad")
        return told


def _number(row: Any) -> int:
    """Of the line, from 0; of one that is no JSON the message says it, from 1."""
    if row["custom_id"] is not None:
        return int(row["custom_id"].removeprefix("row "))
    return int(row["error"]["message"].removeprefix("line ").split(":")[0]) - 1


def run(url: str, path: Path, asked: Asked, words: Sequence[int]) -> Done:
    """The batch whose file lies at `path` (Asked.write), from its upload until nothing of it is
    left but its row."""
    done = Done()
    try:
        with httpx.Client(base_url=url, timeout=600) as http:
            _run(http, path, asked, words, done)
    except (
        BatchError,
        httpx.HTTPError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        done.faults.append(f"batch: {type(error).__name__}: {error}")
    return done


def _run(http: httpx.Client, path: Path, asked: Asked, words: Sequence[int], done: Done) -> None:
    began = time.monotonic()
    with path.open("rb") as file:
        given = _said(
            http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", file)})
        )
    done.upload = time.monotonic() - began
    wish = {"input_file_id": given["id"], "endpoint": ROUTE, "completion_window": "24h"}
    batch = _over(http, _said(http.post("/v1/batches", json=wish))["id"], asked)
    done.status, done.run = batch["status"], time.monotonic() - began - done.upload
    results = Results(asked, words)
    results.output(_rows(http, batch["output_file_id"]))
    results.errors(_rows(http, batch["error_file_id"]), batch["status"] == "cancelled")
    done.faults += results.faults(batch)
    for file_id in (given["id"], batch["output_file_id"], batch["error_file_id"]):
        if not _said(http.delete(f"/v1/files/{file_id}"))["deleted"]:
            done.faults.append("batch: a file was not deleted")


def _over(http: httpx.Client, batch_id: str, asked: Asked) -> Any:
    """The batch when it is over. One that is to be cancelled is, once half of it is done; where it
    was over before the cancel came, it is completed."""
    began, want, told = time.monotonic(), "completed", False
    while time.monotonic() - began < PATIENCE:
        batch = _said(http.get(f"/v1/batches/{batch_id}"))
        if batch["status"] in OVER:
            if batch["status"] != want:
                raise BatchError(f"it is {batch['status']} instead of {want}")
            return batch
        if asked.cancelled and not told and 2 * batch["request_counts"]["completed"] >= asked.lines:
            answer, told = http.post(f"/v1/batches/{batch_id}/cancel"), True
            if answer.status_code != 409:
                _said(answer)
                want = "cancelled"
        time.sleep(EVERY)
    raise BatchError(f"it was not over after {PATIENCE:g} s: {batch}")


def _rows(http: httpx.Client, file_id: str) -> Iterator[Any]:
    """A result's rows, as they come; lines end at a newline alone, the last one too."""
    rest = b""
    with http.stream("GET", f"/v1/files/{file_id}/content") as answer:
        if answer.status_code != 200:
            raise BatchError(f"a result was answered {answer.status_code}")
        for piece in answer.iter_bytes():
            *whole, rest = (rest + piece).split(b"\n")
            yield from map(json.loads, whole)
    if rest:
        raise BatchError("the last row of a result is torn")


def _said(answer: httpx.Response) -> Any:
    if answer.status_code != 200:
        raise BatchError(
            f"{answer.request.method} {answer.request.url.path}: {answer.status_code}"
            f" {answer.text[:200]}"
        )
    return answer.json()


def left_behind(state: Path) -> list[str]:
    """What files and batches of a state folder hold: nothing, when all batches are over and all
    files deleted."""
    parts = (state / "files", state / "batches")
    return sorted(f"{part.name}/{path.name}" for part in parts for path in part.iterdir())

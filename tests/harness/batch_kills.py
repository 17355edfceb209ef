"""kill -9 at random points of a batch, resumed each time: what came of its lines, good and bad.

Each sitting is a process of its own that is forked with all modules loaded, runs the real manager,
state folder and journals over an engine that computes nothing, and is killed at a moment that
nobody chose. It knows the server's batch files; no HTTP. `python tests/harness/batch_kills.py
[KILLS] [LINES]` prints one line of figures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.request import Delta, SamplingParams
from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.batch.database import BatchRow, FileRow
from penstock.server.batch.file_store import new_batch_id, new_file_id
from penstock.server.batch.manager import BatchManager
from penstock.server.batch.output_files import BatchOutput, answered
from penstock.server.batch.state_folder import StateFolder, opened
from penstock.server.online.app_state import AppState
from penstock.server.online.metrics import Metrics
from penstock.server.openai.batch_line import COMPLETIONS

ROWS = 64  # of the engine
# One line in so many fails as it is run, by its fields, is no JSON, or has a custom_id that was
# there before.
KINDS = {7: "long", 9: "bad", 11: "torn", 13: "again"}
DONE = range(1, 5)  # lines of a cancelled batch that were done before
VOCABULARY, CONTEXT = 60_000, 40
LAST = 0.0  # seconds: a sitting that is not killed


def kind(number: int) -> str:
    return next((name for every, name in KINDS.items() if number % every == 0), "good")


def text_of(number: int) -> str:
    return f"line {number} \u2028 " + "é" * (number % 50)


class _Stream:
    """One line at the engine: all of its samples at once, a moment later."""

    num_cached_tokens, guesses = 0, (0, 0)
    prompt_logprobs = None
    begun = None

    def __init__(self, prompt: list[int], sampling: SamplingParams, due: float) -> None:
        self.asked = self  # what is known of its request
        self._prompt, self._sampling, self._due = prompt, sampling, due

    async def __aiter__(self) -> Any:
        await asyncio.sleep(self._due - time.monotonic())
        text = text_of(self._prompt[0])
        yield [Delta(0, index, text, [1, 2], "length") for index in range(self._sampling.n)]

    def cancel(self) -> None:
        """Nothing is held."""


class _Engine:
    """AsyncClient's interface, `rate` lines a second. What is submitted is written down at once: it
    outlives a kill."""

    tokenizer = None
    alive = True

    def __init__(self, log: int, rate: float) -> None:
        self._log, self._period, self._due = log, 1 / rate, 0.0
        self.facts = SimpleNamespace(
            max_model_len=CONTEXT,
            max_num_seqs=ROWS,
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            sampling_defaults={},
        )

    def submit(self, prompt: list[int], sampling: SamplingParams, **_: Any) -> _Stream:
        os.write(self._log, b"%d\n" % prompt[0])
        self._due = max(self._due, time.monotonic()) + self._period
        return _Stream(prompt, sampling, self._due)

    def stats(self) -> dict[str, float]:
        return {}


def make_batch(folder: Path, lines: int, *, cancelled: bool = False) -> str:
    """A batch of all kinds of lines that waits in a fresh state folder; `cancelled`, with those of
    DONE done."""
    with opened(folder) as state:
        assert state is not None
        content = b"\n".join(map(_line, range(lines)))
        draft = state.file_store.draft(file_id := new_file_id())
        draft.write(content)
        draft.keep()
        now = int(time.time())
        made = FileRow(
            id=file_id,
            owner="",
            created_at=now,
            filename="in",
            purpose="batch",
            bytes=len(content),
            sha256=draft.sha256,
        )
        state.database.add_file(made)
        row = BatchRow(
            id=new_batch_id(), owner="", created_at=now, endpoint=COMPLETIONS, input_file_id=file_id
        )
        state.database.add_batch(row)
        if cancelled:
            assert state.database.move(
                row.id, ("validating",), "in_progress", total=lines, model="fake"
            )
            results = BatchOutput(state.file_store.batch_folder(row.id), row.id)
            results.put([answered(f"row {number}", 200, "req", _answer(number)) for number in DONE])
            results.close()
            assert state.database.move(row.id, ("in_progress",), "cancelling")
        return row.id


def _answer(number: int) -> bytes:
    return json.dumps({"choices": [{"text": text_of(number)}] * (1 + number % 3)}).encode()


def _line(number: int) -> bytes:
    if kind(number) == "torn":
        return b"{"
    prompt = [number] * (CONTEXT if kind(number) == "long" else 3)
    body = {
        "model": "fake",
        "prompt": prompt,
        "max_tokens": 0 if kind(number) == "bad" else 2,
        "n": 1 + number % 3,
    }
    name = "row 1" if kind(number) == "again" else f"row {number}"
    return json.dumps(
        {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": body}
    ).encode()


async def _sit(
    folder: Path,
    batch_id: str,
    log: int,
    rate: float,
    once_open: Callable[[], None],
    limits: BatchJobLimits | None,
) -> None:
    """A server's life without HTTP: goes on with what is there until the batch is over."""
    with opened(folder) as state:
        assert state is not None
        once_open()
        client: Any = _Engine(log, rate)
        service = AppState(client=client, model="fake", metrics=Metrics(client, "fake"))
        manager = BatchManager(service, state, limits)
        await manager.go_on()
        while manager.job_of(batch_id) is not None:
            await asyncio.sleep(0.001)
        await manager.end()


def _die_behind(lines: int, seconds: float) -> None:
    """Has this process killed so many seconds after that many lines have been submitted."""
    submit, left = _Engine.submit, itertools.count(lines - 1, -1)

    def submits(engine: _Engine, *asked: Any, **how: Any) -> _Stream:
        if next(left) == 0:
            loop = asyncio.get_running_loop()
            loop.call_later(seconds, os.kill, os.getpid(), signal.SIGKILL)
        return submit(engine, *asked, **how)

    _Engine.submit = submits  # type: ignore[method-assign]


def _nothing() -> None:
    """What most sittings do at those moments."""


def sitting(
    folder: Path,
    batch_id: str,
    log: Path,
    rate: float,
    seconds: float = LAST,
    first: Callable[[], None] = _nothing,
    once_open: Callable[[], None] = _nothing,
    limits: BatchJobLimits | None = None,
) -> int:
    """One process, killed after so many seconds; LAST: it ends by itself. `first` and `once_open`
    are called in it, before and after it opens the state folder. Gives what waitpid says of it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            first()
            asyncio.run(_sit(folder, batch_id, handle, rate, once_open, limits))
            code = 0
        except BaseException:  # noqa: BLE001 - the process ends here, whatever it is
            traceback.print_exc()
        finally:
            os._exit(code)
    if seconds != LAST:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@dataclass
class Report:
    """What came of it."""

    kills: int = 0
    lines: int = 0
    statuses: Counter[str] = field(default_factory=Counter)  # that a kill found the batch in
    twice: int = 0  # lines that were computed more than once
    again: int = 0  # of them, those that were on the disk already: none may be
    lost: int = 0
    doubled: int = 0
    torn: int = 0

    def line(self) -> str:
        states = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"batch of {self.lines} lines, kill -9 {self.kills} times ({states}): {self.lost} lost,"
            f" {self.doubled} doubled, {self.torn} torn, {self.again} run again though on the disk;"
            f" {self.twice} computed twice"
        )

    def faults(self) -> list[str]:
        counts = {
            "lost": self.lost,
            "doubled": self.doubled,
            "torn": self.torn,
            "run again": self.again,
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


def kill_and_resume(
    folder: Path, *, kills: int, lines: int, seed: int = 0, longest: float = 0.5
) -> Report:
    """Kills a batch again and again, then lets it end, and reads what it left. The first half of
    the kills come while its lines run, however slow the machine is; the others at any time."""
    draw, log = random.Random(seed), folder / "submitted"
    rate = 2.4 * lines / (kills * longest)  # so that it comes to its end at about the last kill
    batch_id = make_batch(folder / "state", lines)
    report = Report(lines=lines)
    log.touch()
    done: set[int] = set()
    for at in range(kills):
        before = len(log.read_bytes().split())
        if at < kills // 2:
            count = draw.randrange(1, 2 + lines // (2 * kills))
            dies = partial(_die_behind, count, draw.uniform(0.0, 0.02))
            sitting(folder / "state", batch_id, log, rate, first=dies)
        else:
            sitting(folder / "state", batch_id, log, rate, draw.uniform(0.005, longest))
        report.kills += 1
        report.again += sum(int(one) in done for one in log.read_bytes().split()[before:])
        done = _on_disk(folder / "state", batch_id, report)
    before = len(log.read_bytes().split())
    assert sitting(folder / "state", batch_id, log, 1e6) == 0, (
        "the last sitting did not end by itself"
    )
    ran = [int(one) for one in log.read_bytes().split()]
    report.again += sum(one in done for one in ran[before:])
    report.twice = len(ran) - len(set(ran))
    read_end(folder / "state", batch_id, report)
    return report


def _on_disk(folder: Path, batch_id: str, report: Report) -> set[int]:
    """Lines whose rows a kill left whole: what their journals vouch for."""
    with opened(folder) as state:
        assert state is not None
        row = state.database.batch(batch_id)
        assert row is not None
        report.statuses[row.status] += 1
        if row.over:
            return set(range(report.lines))
    found = set()
    for name in ("output.jsonl", "errors.jsonl"):
        journal = folder / "batches" / batch_id / f"{name}.journal"
        for line in journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else ():
            if b'"row ' in line:
                found.add(int(line.rsplit(b"row ", 1)[1].rstrip(b'"')))
    return found


def read_end(folder: Path, batch_id: str, report: Report, cancelled: bool = False) -> None:
    """Counts what a batch that is over left: every line is in one of its files, once, with what its
    kind gets."""
    state = StateFolder(folder)
    try:
        row = state.database.batch(batch_id)
        assert row is not None and row.status == ("cancelled" if cancelled else "completed"), row
        seen: list[list[int]] = []
        for file_id, good in ((row.output_file_id, True), (row.error_file_id, False)):
            assert file_id is not None
            known = state.database.file(file_id, "")
            content = state.file_store.path(file_id).read_bytes()
            assert known is not None and known.bytes == len(content)
            texts = content.removesuffix(b"\n").split(b"\n")
            seen.append([_check(text, good, report, cancelled) for text in texts])
        assert (row.total, row.completed, row.failed) == (report.lines, *map(len, seen))
    finally:
        state.close()
    counts = Counter(seen[0] + seen[1])
    report.lost = len(set(range(report.lines)) - set(counts))
    report.doubled = sum(counts.values()) - len(counts)


def _check(text: bytes, good: bool, report: Report, cancelled: bool) -> int:
    """The line's number; a row must be whole, and what its line is due."""
    try:
        row = json.loads(text)
        number = _number(row)
        right = good == (kind(number) == "good" and not (cancelled and number not in DONE))
        report.torn += not (right and _is_due(row, number, good, cancelled))
    except (ValueError, KeyError, TypeError, AttributeError):
        report.torn += 1
        return -1
    return number


def _number(row: dict[str, Any]) -> int:
    if row["custom_id"] is not None:
        return int(row["custom_id"].removeprefix("row "))
    return int(row["error"]["message"].split(":")[0].removeprefix("line ")) - 1


def _is_due(row: dict[str, Any], number: int, good: bool, cancelled: bool) -> bool:
    what, response = kind(number), row["response"]
    if good:
        texts = [choice["text"] for choice in response["body"]["choices"]]
        return row["error"] is None and texts == [text_of(number)] * (1 + number % 3)
    if what == "bad" or (what == "long" and not cancelled):
        return bool(response["status_code"] == 400 and "error" in response["body"])
    code = {"torn": "invalid_json_line", "again": "duplicate_custom_id"}.get(
        what, "batch_cancelled"
    )
    return (
        response is None
        and row["error"]["code"] == code
        and (row["custom_id"] is None) == (what in ("torn", "again"))
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asked = [int(word) for word in sys.argv[1:]] + [200, 5000][len(sys.argv) - 1 :]
        began = time.monotonic()
        result = kill_and_resume(Path(place), kills=asked[0], lines=asked[1])
        print(result.line() + f"; {time.monotonic() - began:.0f} s")
        sys.exit(bool(result.faults()))

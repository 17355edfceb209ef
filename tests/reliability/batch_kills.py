"""kill -9 at random points of a batch, resumed each time: what came of its lines.

Each sitting is a process of its own that is forked with all modules loaded, runs the real manager, state folder and
journals over an engine that computes nothing, and is killed at a moment that nobody chose. It knows the server's batch
files; no HTTP. `python tests/reliability/batch_kills.py [KILLS] [LINES]` prints one line of figures.
"""

from __future__ import annotations

import asyncio
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.request import Delta, SamplingParams
from penstock.server.batch.batch_limits import BatchLimits
from penstock.server.batch.database import BatchRow, FileRow
from penstock.server.batch.file_store import new_batch_id, new_file_id
from penstock.server.batch.manager import BatchManager
from penstock.server.batch.state_folder import StateFolder, opened
from penstock.server.online.app_state import AppState
from penstock.server.online.metrics import Metrics
from penstock.server.openai.batch_line import COMPLETIONS

ROWS = 64  # of the engine
BAD = 7  # one line in so many fails when it is run
VOCABULARY, CONTEXT = 60_000, 40
LAST = 0.0  # seconds: a sitting that is not killed


class _Stream:
    """One line at the engine: all of its samples at once, a moment later."""

    num_cached_tokens = 0
    prompt_logprobs = None
    begun = None

    def __init__(self, prompt: list[int], sampling: SamplingParams, due: float) -> None:
        self._prompt, self._sampling, self._due = prompt, sampling, due

    async def __aiter__(self) -> Any:
        await asyncio.sleep(self._due - time.monotonic())
        text = "line " + str(self._prompt[0]) + " \u2028 " + "é" * (self._prompt[0] % 50)
        yield [Delta(0, index, text, [1, 2], "length") for index in range(self._sampling.n)]

    def cancel(self) -> None:
        """Nothing is held."""


class _Engine:
    """AsyncClient's interface, `rate` lines a second. What is submitted is written down at once: it outlives a kill."""

    tokenizer = None
    alive = True

    def __init__(self, log: int, rate: float) -> None:
        self._log, self._period, self._due = log, 1 / rate, 0.0
        self.facts = SimpleNamespace(
            max_model_len=CONTEXT, max_num_seqs=ROWS, vocab_size=VOCABULARY, eos_token_ids=(), sampling_defaults={}
        )

    def submit(self, prompt: list[int], sampling: SamplingParams, **_: Any) -> _Stream:
        os.write(self._log, b"%d\n" % prompt[0])
        self._due = max(self._due, time.monotonic()) + self._period
        return _Stream(prompt, sampling, self._due)

    def stats(self) -> dict[str, float]:
        return {}


def make_batch(folder: Path, lines: int) -> str:
    """A batch that waits in a fresh state folder; every BAD'th of its lines cannot be run."""
    with opened(folder) as state:
        assert state is not None
        content = b"".join(_line(number) for number in range(lines))
        draft = state.file_store.draft(file_id := new_file_id())
        draft.write(content)
        draft.keep()
        now = int(time.time())
        made = FileRow(
            id=file_id, owner="", created_at=now, filename="in", purpose="batch", bytes=len(content),
            sha256=draft.sha256,
        )  # fmt: skip
        state.database.add_file(made)
        row = BatchRow(id=new_batch_id(), owner="", created_at=now, endpoint=COMPLETIONS, input_file_id=file_id)
        state.database.add_batch(row)
        return row.id


def _line(number: int) -> bytes:
    prompt = [number] * (CONTEXT if number % BAD == 0 else 3)
    body = {"model": "fake", "prompt": prompt, "max_tokens": 2, "n": 1 + number % 3}
    row = {"custom_id": f"row {number}", "method": "POST", "url": COMPLETIONS, "body": body}
    return json.dumps(row).encode() + b"\n"


async def _sit(
    folder: Path, batch_id: str, log: int, rate: float, once_open: Callable[[], None], limits: BatchLimits | None
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
    limits: BatchLimits | None = None,
) -> int:
    """One process, killed after so many seconds; LAST: it ends by itself. `first` and `once_open` are called in it,
    before and after it opens the state folder. Gives what waitpid says of it."""
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
            f"batch of {self.lines} lines, kill -9 {self.kills} times ({states}): {self.lost} lost, {self.doubled} "
            f"doubled, {self.torn} torn, {self.again} run again though on the disk; {self.twice} computed twice"
        )


def kill_and_resume(folder: Path, *, kills: int, lines: int, seed: int = 0, longest: float = 0.5) -> Report:
    """Kills a batch again and again, then lets it end, and reads what it left."""
    draw, log = random.Random(seed), folder / "submitted"
    rate = 2.4 * lines / (kills * longest)  # so that it comes to its end at about the last kill
    batch_id = make_batch(folder / "state", lines)
    report = Report(lines=lines)
    log.touch()
    done: set[int] = set()
    for _ in range(kills):
        before = len(log.read_bytes().split())
        sitting(folder / "state", batch_id, log, rate, draw.uniform(0.005, longest))
        report.kills += 1
        report.again += sum(int(one) in done for one in log.read_bytes().split()[before:])
        done = _on_disk(folder / "state", batch_id, report)
    before = len(log.read_bytes().split())
    assert sitting(folder / "state", batch_id, log, 1e6) == 0, "the last sitting did not end by itself"
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
            found.add(int(line.rsplit(b"row ", 1)[1].rstrip(b'"')))
    return found


def read_end(folder: Path, batch_id: str, report: Report) -> None:
    """Counts what a batch that is over left."""
    state = StateFolder(folder)
    try:
        row = state.database.batch(batch_id)
        assert row is not None and row.status == "completed", "the batch did not come to its end"
        seen: Counter[int] = Counter()
        for file_id, good in ((row.output_file_id, True), (row.error_file_id, False)):
            assert file_id is not None
            known = state.database.file(file_id, "")
            content = state.file_store.path(file_id).read_bytes()
            assert known is not None and known.bytes == len(content)
            seen.update(_check(text, good, report) for text in content.removesuffix(b"\n").split(b"\n"))
        assert (row.completed, row.failed) == (sum(n % BAD != 0 for n in seen), sum(n % BAD == 0 for n in seen))
    finally:
        state.close()
    report.lost = len(set(range(report.lines)) - set(seen))
    report.doubled = sum(count - 1 for count in seen.values())


def _check(text: bytes, good: bool, report: Report) -> int:
    """A row must be whole, and what its line asked for."""
    try:
        row = json.loads(text)
        number = int(row["custom_id"].removeprefix("row "))
        body = row["response"]["body"]
        if good:
            right = len(body["choices"]) == 1 + number % 3 and f"line {number} " in body["choices"][-1]["text"]
        else:
            right = row["response"]["status_code"] == 400 and "error" in body
        report.torn += not right or good == (number % BAD == 0)
    except (ValueError, KeyError, TypeError, AttributeError):
        report.torn += 1
        return -1
    return number


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asked = [int(word) for word in sys.argv[1:]] + [200, 5000][len(sys.argv) - 1 :]
        began = time.monotonic()
        result = kill_and_resume(Path(place), kills=asked[0], lines=asked[1])
        print(result.line() + f"; {time.monotonic() - began:.0f} s")
        sys.exit(bool(result.lost or result.doubled or result.torn or result.again))

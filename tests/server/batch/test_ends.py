"""How a server with batches ends: its engine dies, or its disk doesn't answer; and what the next
start finds."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_fake import QUICK, Batching, StuckDisk, StuckRead, batching, jsonl, line, points

from penstock.errors import CapacityError, JournalError
from penstock.server.batch import input_file
from penstock.server.batch.batch_job import BatchJob
from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.batch.disk_errors import is_damage, is_disk_fault
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


LINES = [line(str(number)) for number in range(30)]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckDisk]:
    disk = StuckDisk(monkeypatch)
    yield disk
    disk.going.set()


def check_whole(server: Batching, batch_id: str, count: int = len(LINES)) -> None:
    """Each line is there once."""
    batch = server.until_over(batch_id)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert sorted(int(row["custom_id"]) for row in server.rows(batch.output_file_id)) == list(
        range(count)
    )


def test_a_death_is_noted_though_the_disk_is_slow(
    tokenizer: Tokenizer, tmp_path: Path, stuck: StuckDisk
) -> None:
    """The batch is told to end while it still writes what was done before: of those lines nothing
    is said."""
    limits = replace(QUICK, death_notice=0.1)
    with batching(tokenizer, tmp_path, limits) as server:
        server.engine.step_seconds = 0.05
        batch_id = server.submit(jsonl([line(str(number)) for number in range(1000)]))
        assert stuck.writing.wait(600)
        server.running.hold(True)

        async def die() -> int:
            # in the loop: elsewhere one more may come after it was counted
            there = len(server.engine.open)
            server.engine.alive = False
            server.engine.going.set()
            asyncio.get_running_loop().call_later(0.3, stuck.going.set)
            await server.manager.end(died=True)
            return there

        there = server.running.on_loop(die())
    assert list(points(tmp_path, batch_id).values()) == [1] * there
    with batching(tokenizer, tmp_path) as server:
        check_whole(server, batch_id, 1000)


def test_a_batch_that_finds_the_engine_dead_is_not_blamed(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with batching(tokenizer, tmp_path) as server:
        server.engine.alive = False
        batch_id = server.submit(jsonl(LINES))
        server.running.wait_for(lambda: server.manager.job_of(batch_id) is None)
    assert points(tmp_path, batch_id) == {}


def test_a_write_under_way_ends_before_its_journal_is_closed(
    tokenizer: Tokenizer, tmp_path: Path, stuck: StuckDisk
) -> None:
    """Else two threads would write the same rows."""
    with batching(tokenizer, tmp_path) as server:
        batch_id = server.submit(jsonl(LINES))
        assert stuck.writing.wait(600)
        ending = asyncio.run_coroutine_threadsafe(server.manager.end(), server.running.loop)
        server.running.on_loop(asyncio.sleep(0.3))
        assert not ending.done() and len(stuck.writers) == 1
        stuck.going.set()
        ending.result(600)
        assert server.manager.job_of(batch_id) is None
    with batching(tokenizer, tmp_path) as server:
        check_whole(server, batch_id)


@pytest.mark.parametrize("bound", ["flush_seconds", "flush_seconds_hurried", "flush_seconds_dead"])
def test_a_disk_that_does_not_answer_is_not_waited_for(
    tokenizer: Tokenizer,
    tmp_path: Path,
    stuck: StuckDisk,
    capfd: pytest.CaptureFixture[str],
    bound: str,
) -> None:
    """A signal, a second one, a death of the engine: each has its bound."""
    limits = replace(QUICK, **{"death_notice": 0.1, bound: 0.1})  # type: ignore[arg-type]
    with batching(tokenizer, tmp_path, limits) as server:
        batch_id = server.submit(jsonl(LINES))
        assert stuck.writing.wait(600)

        async def end() -> None:
            hurry = asyncio.Event()
            if bound == "flush_seconds_hurried":
                asyncio.get_running_loop().call_later(0.1, hurry.set)
            await server.manager.end(hurry, died=bound == "flush_seconds_dead")

        server.running.on_loop(end())
        assert "the state folder's disk takes too long" in capfd.readouterr().err
        assert server.manager.job_of(batch_id) is not None
        stuck.going.set()
        server.running.wait_for(lambda: server.manager.job_of(batch_id) is None)
    with batching(tokenizer, tmp_path) as server:
        check_whole(server, batch_id)


@pytest.mark.parametrize("by", ["the end", "a cancel"])
def test_a_read_that_the_disk_does_not_answer_holds_nothing_up(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Closing the file waits for the read, and the loop must not wait for that:
    it serves others."""
    stuck, plain = StuckRead(jsonl(LINES)), input_file._opened
    # the run, or the check, which reads the file first
    at = iter((False, True) if by == "a cancel" else (True,))
    monkeypatch.setattr(
        input_file, "_opened", lambda path: stuck.buffered() if next(at, False) else plain(path)
    )
    with batching(tokenizer, tmp_path) as server:
        try:
            batch_id = server.submit(jsonl(LINES))
            assert stuck.reading.wait(600)
            if by == "a cancel":
                server.openai.batches.cancel(batch_id)
                batch = server.until_over(batch_id)
                assert batch.status == "cancelled" and batch.request_counts.total == len(LINES)
            else:
                server.running.on_loop(server.manager.end())
                assert server.manager.job_of(batch_id) is None
            assert not stuck.closed
        finally:
            stuck.going.set()
    if by == "the end":
        with batching(tokenizer, tmp_path) as server:
            check_whole(server, batch_id)


@pytest.mark.parametrize(
    ("error", "fault", "damage"),
    [
        (OSError(errno.EIO, "Input/output error"), True, False),
        (sqlite3.OperationalError("database or disk is full"), True, False),
        (sqlite3.DatabaseError("database disk image is malformed"), False, False),
        (FileNotFoundError(errno.ENOENT, "No such file"), False, True),
        (JournalError("it was changed"), False, True),
        (
            caused(JournalError("it cannot be written"), OSError(errno.EIO, "Input/output error")),
            True,
            False,
        ),
        (caused(JournalError("it was moved"), FileNotFoundError("it is not there")), False, True),
        (
            caused(CapacityError("the disk is full"), OSError(errno.ENOSPC, "No space left")),
            True,
            False,
        ),
        (ValueError("a fault of ours"), False, False),
    ],
)
def test_which_errors_pass_and_which_are_damage(
    error: Exception, fault: bool, damage: bool
) -> None:
    assert (is_disk_fault(error), is_damage(error)) == (fault, damage)


GROWING = (1.25, 2.5, 5.0, 6.5)


def test_pauses_grow_until_a_batch_gets_on(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a server's end waits for none."""
    pauses: list[float] = []
    plain, sleep = BatchJob.run, asyncio.sleep

    async def pause(seconds: float) -> None:
        if seconds not in GROWING:  # somebody else's
            return await sleep(seconds)
        pauses.append(seconds)
        await sleep(1000 if len(pauses) == 8 else 0)

    async def run(job: BatchJob) -> None:
        if len(pauses) == 4:
            await job._move("validating", "in_progress", total=len(LINES), model="fake")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(asyncio, "sleep", pause)
    monkeypatch.setattr(BatchJob, "run", run)
    with batching(
        tokenizer, tmp_path, BatchJobLimits(first_pause=GROWING[0], longest_pause=GROWING[-1])
    ) as server:
        batch_id = server.submit(jsonl(LINES))
        server.running.wait_for(lambda: len(pauses) == 8)
        assert pauses == [*GROWING, *GROWING]
        batch: Any = server.openai.batches.retrieve(batch_id)
        assert (batch.status, batch.waits_for, batch.expected_at) == ("in_progress", "disk", None)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(BatchJob, "run", plain)
    with batching(tokenizer, tmp_path) as server:
        check_whole(server, batch_id)

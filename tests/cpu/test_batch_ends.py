"""How a server with batches ends: its engine dies, or its disk doesn't answer; and what the next start finds."""

from __future__ import annotations

import asyncio
import errno
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from batch_fake import COMPLETIONS, Batching, StuckDisk, StuckRead, batching, jsonl, line, points
from server_fake import make_tokenizer

from penstock.errors import JournalError
from penstock.server.batch import disk_retry, input_file, manager
from penstock.server.batch.batch_job import BatchJob
from penstock.server.batch.database import BatchRow
from penstock.server.batch.disk_retry import DamagedError, Patience, close_behind
from penstock.server.batch.file_store import new_batch_id, new_file_id
from penstock.server.batch.state_folder import StateFolder
from penstock.text.tokenizer import Tokenizer

LINES = [line(str(number)) for number in range(30)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckDisk]:
    disk = StuckDisk(monkeypatch)
    yield disk
    disk.going.set()


def check_whole(server: Batching, batch_id: str, count: int = len(LINES)) -> None:
    """Each line is there once."""
    batch = server.until_over(batch_id)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert sorted(int(row["custom_id"]) for row in server.rows(batch.output_file_id)) == list(range(count))


def test_a_death_of_which_lines_hear_late_is_remembered(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """That the process has ended is seen at once, and the server's end begins; its lines are told 0.2 s later."""
    with batching(tokenizer, tmp_path) as server:
        server.running.hold(True)
        ids = [server.submit(jsonl([line("a"), line("b")])) for _ in range(10)]
        server.running.wait_for(lambda: len(server.engine.open) == 16)  # of eight; two wait for their turn

        async def die() -> None:
            server.engine.alive = False
            asyncio.get_running_loop().call_later(0.2, server.engine.going.set)
            await server.desk.end(died=True)

        server.running.on_loop(die())
    assert [points(tmp_path, each) for each in ids] == [{1: 1, 2: 1}] * 8 + [{}] * 2
    with batching(tokenizer, tmp_path) as server:
        assert {server.until_over(each).request_counts.completed for each in ids} == {2}


def test_a_death_is_noted_though_the_disk_is_slow(
    tokenizer: Tokenizer, tmp_path: Path, stuck: StuckDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is told to end while it still writes what was done before: of those lines nothing is said."""
    monkeypatch.setattr(manager, "HEARD_WITHIN", 0.1)
    monkeypatch.setattr(manager, "DISK_SECONDS_DEAD", 30.0)
    with batching(tokenizer, tmp_path) as server:
        server.engine.step_seconds = 0.05
        batch_id = server.submit(jsonl([line(str(number)) for number in range(1000)]))
        assert stuck.writing.wait(30)
        server.running.hold(True)

        async def die() -> int:
            there = len(server.engine.open)  # in the loop: elsewhere one more may come after it was counted
            server.engine.alive = False
            server.engine.going.set()
            asyncio.get_running_loop().call_later(0.3, stuck.going.set)
            await server.desk.end(died=True)
            return there

        there = server.running.on_loop(die())
    assert list(points(tmp_path, batch_id).values()) == [1] * there
    with batching(tokenizer, tmp_path) as server:
        check_whole(server, batch_id, 1000)


def test_a_batch_that_finds_the_engine_dead_is_not_blamed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with batching(tokenizer, tmp_path) as server:
        server.engine.alive = False
        batch_id = server.submit(jsonl(LINES))
        server.running.wait_for(lambda: server.desk.run_of(batch_id) is None)
    assert points(tmp_path, batch_id) == {}


def test_a_write_under_way_ends_before_its_journal_is_closed(
    tokenizer: Tokenizer, tmp_path: Path, stuck: StuckDisk
) -> None:
    """Else two threads would write the same rows."""
    with batching(tokenizer, tmp_path) as server:
        batch_id = server.submit(jsonl(LINES))
        assert stuck.writing.wait(30)
        ending = asyncio.run_coroutine_threadsafe(server.desk.end(), server.running.loop)
        server.running.on_loop(asyncio.sleep(0.3))
        assert not ending.done() and len(stuck.writers) == 1
        stuck.going.set()
        ending.result(30)
        assert server.desk.run_of(batch_id) is None
    with batching(tokenizer, tmp_path) as server:
        check_whole(server, batch_id)


@pytest.mark.parametrize("bound", ["DISK_SECONDS", "HURRIED", "DISK_SECONDS_DEAD"])
def test_a_disk_that_does_not_answer_is_not_waited_for(
    tokenizer: Tokenizer,
    tmp_path: Path,
    stuck: StuckDisk,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    bound: str,
) -> None:
    """A signal, a second one, a death of the engine: each has its bound."""
    for name in ("DISK_SECONDS", "HURRIED", "DISK_SECONDS_DEAD"):
        monkeypatch.setattr(manager, name, 0.1 if name == bound else 1000.0)
    monkeypatch.setattr(manager, "HEARD_WITHIN", 0.1)
    with batching(tokenizer, tmp_path) as server:
        batch_id = server.submit(jsonl(LINES))
        assert stuck.writing.wait(30)

        async def end() -> None:
            hurry = asyncio.Event()
            if bound == "HURRIED":
                asyncio.get_running_loop().call_later(0.1, hurry.set)
            await server.desk.end(hurry, died=bound == "DISK_SECONDS_DEAD")

        server.running.on_loop(end())
        assert "the state folder's disk takes too long" in capfd.readouterr().err
        assert server.desk.run_of(batch_id) is not None
        stuck.going.set()
        server.running.wait_for(lambda: server.desk.run_of(batch_id) is None)
    with batching(tokenizer, tmp_path) as server:
        check_whole(server, batch_id)


@pytest.mark.parametrize("by", ["the end", "a cancel"])
def test_a_read_that_the_disk_does_not_answer_holds_nothing_up(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Closing the file waits for the read, and the loop must not wait for that: it serves others."""
    stuck, plain = StuckRead(jsonl(LINES)), input_file._opened
    at = iter((False, True) if by == "a cancel" else (True,))  # the run, or the check, which reads the file first
    monkeypatch.setattr(input_file, "_opened", lambda path: stuck.buffered() if next(at, False) else plain(path))
    with batching(tokenizer, tmp_path) as server:
        try:
            batch_id = server.submit(jsonl(LINES))
            assert stuck.reading.wait(30)
            if by == "a cancel":
                server.openai.batches.cancel(batch_id)
                batch = server.until_over(batch_id)
                assert batch.status == "cancelled" and batch.request_counts.total == len(LINES)
            else:
                server.running.on_loop(server.desk.end())
                assert server.desk.run_of(batch_id) is None
            assert not stuck.closed
        finally:
            stuck.going.set()
    if by == "the end":
        with batching(tokenizer, tmp_path) as server:
            check_whole(server, batch_id)


def test_a_file_that_is_not_closed_well_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    class Broken(io.BytesIO):
        def close(self) -> None:
            raise OSError(errno.EIO, "Input/output error")

    async def main() -> None:
        close_behind(Broken())
        await asyncio.get_running_loop().shutdown_default_executor()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert capfd.readouterr().err == (
        "penstock: the state folder's disk failed as a file was closed (input/output error)\n"
    )


def test_a_journal_without_its_folder_is_damaged() -> None:
    """Nobody but us takes it away: it would be waited for until the next start, and a place with it."""
    tries = 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise JournalError("it cannot be written") from FileNotFoundError(errno.ENOENT, "No such file")

    with pytest.raises(DamagedError):
        asyncio.run(Patience("a batch").insist(work))


def test_what_waits_for_a_disk_hears_of_the_end_though_there_is_room_now() -> None:
    """Both are said in one turn of the loop, and the second must not be lost with the first."""

    async def main() -> int:
        patience, tries = Patience("a batch"), 0

        async def work() -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise OSError(errno.ENOSPC, "no room")

        insisting = asyncio.create_task(patience.insist(work))
        await asyncio.sleep(0.05)
        patience.end()
        insisting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await insisting
        return tries

    assert asyncio.run(main()) == 1


def test_what_waits_for_a_disk_says_where_and_expects_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disk_retry, "FIRST_PAUSE", 0.01)
    row = BatchRow(
        id=new_batch_id(), owner="", created_at=1, endpoint=COMPLETIONS, input_file_id=new_file_id(), total=9
    )

    async def main() -> list[int | None]:
        run = BatchJob(SimpleNamespace(), state, row)  # type: ignore[arg-type]  # its tools are not used
        run._progress.note(0)
        await asyncio.sleep(0.01)
        run._progress.note(3)
        seen = [run.expected_end]

        async def work() -> None:
            seen.append(run.expected_end)
            if len(seen) == 3:
                return
            raise OSError(errno.ENOSPC, "No space left on device")

        await run._disk.insist(work)
        return [*seen, run.expected_end]

    state = StateFolder(tmp_path / "state")
    before, first, second, after = asyncio.run(main())
    state.close()
    assert None not in (before, first, after) and second is None
    said = capfd.readouterr().err
    assert f"(no space left on device): see to it, and make room in {tmp_path / 'state'} where it is full" in said

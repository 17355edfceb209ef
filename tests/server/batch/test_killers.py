"""Lines that kill the engine: in how few deaths they are found, what that costs other lines, and who is not blamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_fake import QUICK, Batching, batching, jsonl, line, note_points
from server_fake import Facts, FakeStream

from penstock.engine.async_client import AsyncClient, SharedEngine
from penstock.engine.channel import Failed, StepOutputs
from penstock.errors import EngineError
from penstock.request import Delta, SamplingParams
from penstock.server.batch.poison_lines import FEW, FEW_FROM
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

AT_ONCE = replace(QUICK, settled_seconds=0.0)
SLOW = 0.08  # seconds that a slow killer, or line, is at the engine; a few steps of others


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that dies of a prompt of "kill...", soon or late, and takes long for one of "slow"."""
    plain = FakeStream.__aiter__

    async def run(stream: FakeStream) -> AsyncIterator[list[Delta]]:
        prompt = stream.engine.tokenizer.decode(stream.ids) if stream.engine.tokenizer else ""
        if prompt in ("slow", "kill late"):
            await asyncio.sleep(SLOW)
        if prompt.startswith("kill") and not stream.cancelled:
            stream.engine.alive = False
            raise EngineError("the engine died: of this")
        async for deltas in plain(stream):
            yield deltas

    monkeypatch.setattr(FakeStream, "__aiter__", run)
    yield


class Lives:
    """Servers one after another on one folder, each until its engine dies or the batches are over. beside: what online
    clients do in each."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self._tokenizer, self._folder, self.limits = tokenizer, folder, AT_ONCE
        self.deaths = 0

    def submit(self, *prompts: list[str]) -> list[str]:
        with batching(self._tokenizer, self._folder) as server:
            server.running.hold(True)
            return [server.submit(jsonl([line(str(i), prompt=each) for i, each in enumerate(one)])) for one in prompts]

    def live(
        self, ids: list[str], beside: Callable[[Batching], None] = lambda server: None, held: bool = False
    ) -> bool:
        """Whether the engine died."""
        with batching(self._tokenizer, self._folder, self.limits, held=held) as server:
            server.engine.step_seconds = 0.002
            beside(server)
            server.running.wait_for(lambda: all(server.manager.job_of(each) is None for each in ids))
            died = not server.engine.alive
        self.deaths += died
        return died

    def until_over(self, ids: list[str]) -> None:
        while self.live(ids):
            assert self.deaths < 30, "it would be started for ever"

    def killers(self, batch_id: str) -> dict[str, str]:
        """Lines without an answer, and why."""
        with batching(self._tokenizer, self._folder) as server:
            batch = server.openai.batches.retrieve(batch_id)
            rows = server.rows(batch.error_file_id)
            assert batch.status == "completed"
            assert batch.request_counts.completed + len(rows) == batch.request_counts.total
            return {row["custom_id"]: row["response"]["body"]["error"]["code"] for row in rows}


@pytest.fixture
def lives(tokenizer: Tokenizer, tmp_path: Path) -> Lives:
    return Lives(tokenizer, tmp_path)


@pytest.mark.parametrize(("kill", "count"), [("kill", 40), ("kill late", 300)])
def test_a_killer_is_found_in_four_deaths(lives: Lives, kill: str, count: int) -> None:
    """At most, however many steps it needs, and however many others are done meanwhile."""
    ids = lives.submit(["a"] * 5 + [kill] + ["a"] * (count - 6))
    lives.until_over(ids)
    assert 2 <= lives.deaths <= 4 and lives.killers(ids[0]) == {"5": "engine_died"}


def test_all_else_runs_before_suspects_do(lives: Lives, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of its batch; and others beside them."""
    suspects = 30
    first, second = lives.submit(["slow"] * suspects + ["a"] * 50, ["a"] * 400)
    note_points(tmp_path, first, dict.fromkeys(range(1, suspects + 1), FEW_FROM))
    widths: list[tuple[int, int]] = []
    with batching(tokenizer, tmp_path, AT_ONCE) as server:
        server.engine.step_seconds = 0.01

        def watch() -> bool:
            there = [len(stream.ids) for stream in server.engine.open]
            widths.append((there.count(len("slow")), there.count(len("a"))))
            return server.manager.job_of(first) is None and server.manager.job_of(second) is None

        server.running.wait_for(watch)
        begun = [len(stream.ids) for stream in server.engine.submitted]
        assert begun.index(len("slow")) >= 50, "they are behind the others of their batch"
        assert server.openai.batches.retrieve(first).request_counts.completed == suspects + 50
        assert len(server.engine.submitted) == suspects + 50 + 400, "each ran once"
    assert 1 < max(slow for slow, _ in widths) <= FEW
    assert any(slow and others > 4 for slow, others in widths), "other batches' lines are beside them"


class Channel:
    """The real client's end of one: a test says what the engine does."""

    def __init__(self) -> None:
        self.words: asyncio.Queue[StepOutputs | Failed] = asyncio.Queue()

    def send_down(self, word: Any) -> None:
        """Nobody reads it."""

    async def receive(self) -> StepOutputs | Failed:
        return await self.words.get()


@pytest.mark.parametrize(
    ("before", "heard", "lately"), [("nothing", 0, False), ("a cut", 2, True), ("a cut", 3, False)]
)
def test_the_client_tells_who_was_there_when_the_engine_died(before: str, heard: int, lately: bool) -> None:
    """A request that was cut is at the engine until that has heard of it."""

    async def main() -> None:
        channel, params = Channel(), SamplingParams(max_tokens=9)
        client = AsyncClient(Facts(), None, channel, SharedEngine())  # type: ignore[arg-type]
        done = client.submit([1], params, stream=False)
        streams = [client.submit([1], params, stream=False) for _ in range(2)]
        if before == "a cut":
            done.cancel()
        for number in range(heard):
            channel.words.put_nowait(StepOutputs(None, [], {"completed_steps": number}))
        assert client.open_at_death == frozenset()
        channel.words.put_nowait(Failed("EngineError", "the engine died", None))
        for stream in streams:
            with pytest.raises(EngineError):
                async for _ in stream:
                    pass
        there = {*streams} if before == "a cut" else {done, *streams}
        assert (client.open_at_death, client.cut_before_death) == (there, lately)

    asyncio.run(main())

"""Lines that kill the engine: in how few deaths they are found, what that costs other lines, and
who is not blamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_fake import QUICK, Batching, batching, jsonl, line, note_points
from server_fake import Facts, FakeStream

from penstock.children.carried_error import CarriedError
from penstock.engine.async_client import AsyncClient, SharedEngine
from penstock.engine.channel import StepOutputs
from penstock.errors import EngineError
from penstock.request import Delta, SamplingParams
from penstock.server.batch.poison_lines import ALONE, ALONE_FROM, FEW, FEW_FROM, KILLER, PoisonLines
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
    """Servers one after another on one folder, each until its engine dies or the batches are over.
    beside: what online clients do in each."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self._tokenizer, self._folder, self.limits = tokenizer, folder, AT_ONCE
        self.deaths = 0

    def submit(self, *prompts: list[str]) -> list[str]:
        with batching(self._tokenizer, self._folder) as server:
            server.running.hold(True)
            return [
                server.submit(jsonl([line(str(i), prompt=each) for i, each in enumerate(one)]))
                for one in prompts
            ]

    def live(
        self,
        ids: list[str],
        beside: Callable[[Batching], None] = lambda server: None,
        held: bool = False,
    ) -> bool:
        """Whether the engine died."""
        with batching(self._tokenizer, self._folder, self.limits, held=held) as server:
            server.engine.step_seconds = 0.002
            beside(server)
            server.running.wait_for(
                lambda: all(server.manager.job_of(each) is None for each in ids)
            )
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


def test_all_else_runs_before_suspects_do(
    lives: Lives, tokenizer: Tokenizer, tmp_path: Path
) -> None:
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
    assert any(slow and others > 4 for slow, others in widths), (
        "other batches' lines are beside them"
    )


class Channel:
    """The real client's end of one: a test says what the engine does."""

    def __init__(self) -> None:
        self.words: asyncio.Queue[StepOutputs | CarriedError] = asyncio.Queue()

    def send_down(self, word: Any) -> None:
        """Nobody reads it."""

    async def receive(self) -> StepOutputs | CarriedError:
        return await self.words.get()


@pytest.mark.parametrize(
    ("before", "heard", "lately"), [("nothing", 0, False), ("a cut", 2, True), ("a cut", 3, False)]
)
def test_the_client_tells_who_was_there_when_the_engine_died(
    before: str, heard: int, lately: bool
) -> None:
    """A request that was cut is at the engine until that has heard of it."""

    async def main() -> None:
        channel, params = Channel(), SamplingParams(max_tokens=9)
        client = AsyncClient(Facts(), None, channel, SharedEngine(lambda: None))  # type: ignore[arg-type]
        done = client.submit([1], params, stream=False)
        streams = [client.submit([1], params, stream=False) for _ in range(2)]
        if before == "a cut":
            done.cancel()
        for number in range(heard):
            channel.words.put_nowait(StepOutputs(None, [], {"completed_steps": number}))
        assert client.open_at_death == frozenset()
        channel.words.put_nowait(CarriedError("EngineError", "the engine died", None))
        for stream in streams:
            with pytest.raises(EngineError):
                async for _ in stream:
                    pass
        there = {*streams} if before == "a cut" else {done, *streams}
        assert (client.open_at_death, client.cut_before_death) == (there, lately)

    asyncio.run(main())


# --- points


def after(*deaths: dict[int, int]) -> PoisonLines:
    """Each death is another server's."""
    kept = None
    for evidence in deaths:
        kept = PoisonLines(kept).with_death(evidence)
    return PoisonLines(kept)


def stages(suspects: PoisonLines) -> list[int]:
    stage, found = suspects.stage_after(0), []
    while stage is not None:
        found.append(stage)
        stage = suspects.stage_after(stage)
    return found


def test_one_death_says_nothing_and_two_put_a_line_behind() -> None:
    assert stages(PoisonLines()) == stages(after({1: 1, 2: 1})) == []
    twice = after({1: 1, 2: 1}, {2: 1, 3: 1})
    assert [twice.stage(number) for number in (1, 2, 3, 4)] == [0, FEW_FROM, 0, 0] and stages(
        twice
    ) == [FEW_FROM]


def test_a_killer_is_named_after_four_deaths_the_last_of_them_alone() -> None:
    deaths = [{1: 1, 2: 1}, {1: 1, 2: 1}, {2: 1}, {2: ALONE}]
    assert after(*deaths[:3]).stage(2) >= ALONE_FROM
    assert [after(*deaths[:count]).is_killer(2) for count in range(5)] == [False] * 4 + [True]
    named = after(*deaths)
    assert named.stage(2) == 0 and not named.is_killer(1) and stages(named) == [FEW_FROM]


def test_one_that_is_always_alone_is_named_after_two() -> None:
    assert not after({1: ALONE}).is_killer(1) and after({1: ALONE}).stage(1) >= ALONE_FROM
    assert after({1: ALONE}, {1: ALONE}).is_killer(1)


def test_one_beside_others_is_named_late_and_takes_turns_with_them() -> None:
    """Lines of a batch beside an online request that kills: the engine dies with whichever comes
    first."""
    kept: str | None = PoisonLines().with_death(dict.fromkeys(range(10), ALONE_FROM))
    for lives in range(10 * (KILLER - ALONE_FROM)):
        suspects = PoisonLines(kept)
        assert not any(suspects.is_killer(number) for number in range(10)) or lives > 10 * (
            KILLER - ALONE_FROM - 1
        )
        first = min((number for number in range(10) if suspects.stage(number)), key=suspects.stage)
        kept = suspects.with_death({first: 1})
    assert all(PoisonLines(kept).is_killer(number) for number in range(10))


def test_a_line_that_is_done_is_forgotten() -> None:
    suspects = after({1: 2, 2: 2})
    suspects.forget(1)
    suspects.forget(9)
    assert suspects.with_death({3: 1}) == '{"2":2,"3":1}'
    suspects.forget(2)
    assert stages(suspects) == []

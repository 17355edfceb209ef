"""Three replicas over a runner that computes nothing: the same tokens as one, groups shared out,
and replicas that are killed, stopped or restarted while others serve. Processes, channels,
scheduler and router are the real ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_process import COMMAND
from fake_runner import Orders, expected, write_orders
from service import make_folder

from penstock.config import Config
from penstock.engine.async_client import AsyncClient
from penstock.errors import NoReplicaError, PenstockError, ReplicaError, TokenizerError
from penstock.replicas import supervisor
from penstock.replicas.launch_replicas import OwnReplicas, launch_replicas
from penstock.request import SamplingParams
from penstock.schedule.replica_router import Router

pytestmark = pytest.mark.torch

COUNT = 3
PATIENCE = 600  # seconds after which a test that hangs gives up


class Trio:
    """Three replicas, their loop, and what their tokens should be."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        self.folder, self.runner = folder, runner
        self.words = make_folder(
            folder, Orders(step_seconds=0.002), rows=64, num_blocks=2048, longest=512
        )
        made = self.run(
            launch_replicas(Config.of(model=str(folder), data_parallel_size=COUNT), COMMAND)
        )
        assert isinstance(made, OwnReplicas)
        self.replicas = made

    def run(self, work: Any) -> Any:
        return self.runner.run(asyncio.wait_for(work, PATIENCE))

    def pid(self, replica: int) -> int:
        life = self.replicas.supervisor._now[replica]
        assert life is not None
        return life.process.pid

    def client(self, replica: int) -> AsyncClient:
        found = self.replicas._replicas[replica].client
        assert isinstance(found, AsyncClient)
        return found

    def pace(self, seconds: float) -> None:
        write_orders(self.folder, Orders(step_seconds=seconds))

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    async def all_ready(self) -> None:
        await self.until(
            lambda: (
                self.replicas.ready == COUNT and not any(r.samples for r in self.replicas._replicas)
            )
        )

    async def tokens(
        self, prompt: list[int], params: SamplingParams, **how: Any
    ) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        async for deltas in self.replicas.submit(prompt, params, **{"stream": False} | how):
            for delta in deltas:
                found.setdefault(delta.index, []).extend(delta.token_ids)
        return found

    def right(self, prompt: list[int], params: SamplingParams) -> dict[int, list[int]]:
        """What one engine gives, of a request with a seed."""
        assert params.max_tokens is not None and params.seed is not None
        return {
            i: expected(prompt, params.max_tokens, self.words, params.seed, i, params.temperature)
            for i in range(params.n)
        }


@pytest.fixture(scope="module", autouse=True)
def short_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "FIRST_PAUSE", 0.1)
        yield


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with asyncio.Runner() as runner:
        made = Trio(tmp_path_factory.mktemp("replicas"), runner)
        yield made
        processes = made.replicas.supervisor.processes
        made.run(made.replicas.close())
        assert len(processes) == COUNT and all(process.returncode == 0 for process in processes)


def ask(
    number: int, n: int = 1, tokens: int = 30, temperature: float = 1.0
) -> tuple[list[int], SamplingParams]:
    params = SamplingParams(
        n=n, max_tokens=tokens, seed=number, temperature=temperature, ignore_eos=True
    )
    return [(number + i) % 250 for i in range(40)], params


def test_the_same_tokens_as_one_engine(trio: Trio) -> None:
    asked = [
        ask(i, n, temperature=t)
        for i, (n, t) in enumerate([(1, 0.0), (1, 1.0), (5, 0.0), (7, 1.0), (100, 1.0)])
    ]

    async def all_of_them() -> list[dict[int, list[int]]]:
        return await asyncio.gather(
            *(trio.tokens(*each, stream=s) for s in (False, True) for each in asked)
        )

    assert trio.run(all_of_them()) == [trio.right(*each) for each in asked] * 2
    trio.run(trio.all_ready())


def test_requests_without_a_seed_are_each_drawn_anew(trio: Trio) -> None:
    prompt, _ = ask(1)

    async def several() -> list[dict[int, list[int]]]:
        return await asyncio.gather(
            *(trio.tokens(prompt, SamplingParams(max_tokens=20)) for _ in range(9))
        )

    assert len({tuple(found[0]) for found in trio.run(several())}) == 9


def test_bursts_spread_and_a_large_group_is_shared_out(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By paces that no busy machine has measured."""
    monkeypatch.setattr(Router, "_mean", lambda router, name: 0.0)

    async def burst() -> tuple[list[int], list[tuple[int, set[int]]]]:
        streams = [trio.replicas.submit(*ask(i), stream=False) for i in range(30)]
        at = [part.replica.number for stream in streams for part in stream.parts]
        large = trio.replicas.submit(*ask(99, 300), stream=False)
        parts = [(part.replica.number, set(part.samples)) for part in large.parts]
        for stream in [*streams, large]:
            stream.cancel()
        return at, parts

    at, parts = trio.run(burst())
    assert len(at) == 30 and min(at.count(replica) for replica in range(COUNT)) >= 7
    assert sorted(replica for replica, _ in parts) == [0, 1, 2]
    assert sorted(sample for _, samples in parts for sample in samples) == list(range(300))
    assert max(len(samples) for _, samples in parts) <= 110
    trio.run(trio.all_ready())


def test_what_had_this_prompt_gets_it_again(trio: Trio) -> None:
    async def again() -> list[int]:
        at = []
        for _ in range(6):
            stream = trio.replicas.submit(*ask(7, tokens=3), stream=False)
            at += [part.replica.number for part in stream.parts]
            async for _ in stream:
                pass
            await trio.all_ready()
        return at

    assert len(set(trio.run(again()))) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_dies_or_hangs_costs_only_what_it_had_begun_to_tell(
    trio: Trio, number: int
) -> None:
    """What was asked whole is answered in full, elsewhere; streams are told; then it is back."""
    trio.pace(0.5)  # so that none has ended by then
    victims: list[int] = []
    whole, streamed = (
        [ask(i, 1 + 3 * (i % 3), 60) for i in range(12)],
        [ask(50 + i, 1, 60) for i in range(9)],
    )

    async def lose_one() -> tuple[list[Any], list[Any]]:
        restarts = [each.restarts for each in trio.replicas.each()]
        tasks = [asyncio.ensure_future(trio.tokens(*each)) for each in whole]
        tasks += [asyncio.ensure_future(trio.tokens(*each, stream=True)) for each in streamed]
        await trio.until(lambda: bool(_telling(trio)))
        victims.append(_telling(trio)[0])
        os.kill(trio.pid(victims[0]), number)
        trio.pace(0.002)
        if number == signal.SIGSTOP:  # the others may be slow
            trio.client(victims[0]).step_timeout = 0.0
        await trio.until(lambda: trio.replicas.each()[victims[0]].restarts > restarts[victims[0]])
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await trio.all_ready()
        return ends[: len(whole)], ends[len(whole) :]

    answered, told = trio.run(lose_one())
    assert answered == [trio.right(*each) for each in whole]
    right = [trio.right(*each) for each in streamed]
    lost = [end for end in told if isinstance(end, ReplicaError)]
    assert 1 <= len(lost) < len(told) and "\n" not in str(lost[0])
    assert all(
        isinstance(end, ReplicaError) or end == good for end, good in zip(told, right, strict=True)
    )
    assert trio.replicas.each()[victims[0]].restarts >= 1


def _telling(trio: Trio) -> list[int]:
    """Replicas that have begun to tell a stream."""
    clients = [
        (replica.number, replica.client)
        for replica in trio.replicas._replicas
        if replica.client is not None
    ]
    return [
        n
        for n, client in clients
        if any(getattr(part, "begun", None) for part in client._streams.values())
    ]


def test_what_two_replicas_died_with_is_not_given_to_a_third(trio: Trio) -> None:
    trio.pace(0.5)  # 200 tokens take 100 s

    async def kill_twice() -> None:
        left = set(range(COUNT))
        stream = trio.replicas.submit(*ask(3, tokens=200), stream=False)
        reading = asyncio.ensure_future(anext(aiter(stream)))
        for _ in range(2):
            await trio.until(
                lambda: bool(stream.parts) and all(p.replica.takes for p in stream.parts)
            )
            (part,) = stream.parts
            left.remove(part.replica.number)
            os.kill(trio.pid(part.replica.number), signal.SIGKILL)
            await trio.until(lambda gone=part: gone not in stream.parts)  # type: ignore[misc]
        assert not stream.parts and len(left) == 1
        with pytest.raises(ReplicaError, match="third"):
            await reading
        await trio.all_ready()

    trio.run(kill_twice())
    trio.pace(0.002)


def test_none_is_ready_and_then_all_are_again(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 3.0)
    trio.pace(0.5)  # 400 tokens take 200 s

    async def kill_all() -> None:
        waiting = asyncio.ensure_future(trio.tokens(*ask(1, tokens=400)))
        await trio.until(lambda: any(each.samples for each in trio.replicas._replicas))
        for replica in range(COUNT):
            os.kill(trio.pid(replica), signal.SIGKILL)
        with pytest.raises(PenstockError):
            await waiting
        await trio.until(lambda: not trio.replicas.alive)
        with pytest.raises(NoReplicaError):
            trio.replicas.submit(*ask(1), stream=False)
        assert not trio.replicas.gone
        trio.pace(0.002)
        await trio.all_ready()
        assert await trio.tokens(*ask(1)) == trio.right(*ask(1))

    trio.run(kill_all())


def test_a_rolling_restart_loses_nothing(trio: Trio) -> None:
    before, asked = (
        [trio.pid(replica) for replica in range(COUNT)],
        list[tuple[list[int], SamplingParams]](),
    )

    async def load(ended: asyncio.Event) -> list[Any]:
        tasks = []
        while not ended.is_set() or len(asked) <= 10:
            asked.append(ask(len(asked), 1 + len(asked) % 4))
            tasks.append(asyncio.ensure_future(trio.tokens(*asked[-1], stream=len(asked) % 2 == 0)))
            await asyncio.sleep(0.02)
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def restart() -> list[Any]:
        ended = asyncio.Event()
        loading = asyncio.ensure_future(load(ended))
        trio.replicas.restart()
        least = COUNT
        rolling = trio.replicas.supervisor._rolling
        assert rolling is not None
        while not rolling.done():
            least = min(least, trio.replicas.ready)
            await asyncio.sleep(0.005)
        ended.set()
        assert least == COUNT - 1
        return await loading

    ends = trio.run(restart())
    assert ends == [trio.right(*each) for each in asked]
    assert not set(before) & {trio.pid(replica) for replica in range(COUNT)}
    trio.run(trio.all_ready())


def test_counters_of_engines_that_ended_count_on(trio: Trio) -> None:
    stats = trio.replicas.stats()
    assert (
        stats["requests"] > 100 and stats["running"] == stats["waiting"] == stats["kv_usage"] == 0
    )
    assert stats["generation_tokens"] > sum(
        one.stats.get("generation_tokens", 0) for one in trio.replicas.each()
    )


def test_where_none_can_start_the_first_error_is_raised(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()

    async def start() -> None:
        with pytest.raises(TokenizerError):
            await launch_replicas(Config.of(model=str(tmp_path), data_parallel_size=2), COMMAND)

    asyncio.run(asyncio.wait_for(start(), PATIENCE))

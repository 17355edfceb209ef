"""What is done between steps of an engine's process, under load: every answer is of one version of
the weights and says which, nothing is lost, and what is refused leaves all as it was. The runner
computes nothing; the rest is real."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_process import COMMAND
from fake_runner import SHAPE, Orders, Shape, expected
from growing_patience import patiently
from service import make_folder

from penstock.config import Config
from penstock.engine.async_client import AsyncClient
from penstock.engine.control import PREFIX_CACHE, SLEEP, UPDATE, WAKE_UP, Control
from penstock.engine.launch import launch
from penstock.errors import CheckpointError, EngineError, UsageError
from penstock.replicas.launch_replicas import launch_replicas
from penstock.request import SamplingParams

pytestmark = pytest.mark.torch

PATIENCE = 600  # seconds after which a test that hangs gives up
PARAMS = SamplingParams(n=2, max_tokens=30, seed=5, ignore_eos=True)
Answer = tuple[dict[int, list[int]], set[str | None]]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[Path]]:
    """A fake model, its words, and folders of other weights, whose words stand otherwise."""
    first = tmp_path_factory.mktemp("model")
    words = make_folder(first, Orders(step_seconds=0.002), rows=32, num_blocks=1024, longest=256)
    others = []
    for number in (1, 2):
        others.append(tmp_path_factory.mktemp("weights") / f"step-{number}")
        others[-1].mkdir()
        turned = Shape(words=words[number:] + words[:number])
        (others[-1] / SHAPE).write_bytes(msgspec.json.encode(turned))
    return first, list(words), others


def prompt(number: int) -> list[int]:
    return [(number + i) % 250 for i in range(40)]


async def ask(client: Any, number: int, stream: bool = False) -> Answer:
    found: dict[int, list[int]] = {}
    versions = set()
    async for deltas in client.submit(prompt(number), PARAMS, stream=stream):
        for delta in deltas:
            found.setdefault(delta.index, []).extend(delta.token_ids)
            versions.add(delta.weights_version)
    return found, versions


def right(number: int, words: list[int], turned: int) -> dict[int, list[int]]:
    words = words[turned:] + words[:turned]
    return {i: expected(prompt(number), 30, words, 5, i) for i in range(2)}


async def under_load(client: Any, steps: Any) -> list[Answer]:
    """Answers to requests that come all the while; each is submitted before the one behind it."""
    ended, tasks = asyncio.Event(), []

    async def load() -> None:
        while not ended.is_set():
            tasks.append(asyncio.ensure_future(ask(client, len(tasks), stream=len(tasks) % 2 == 0)))
            await asyncio.sleep(0.004)

    loading = asyncio.ensure_future(load())
    await steps()
    ended.set()
    await loading
    return await asyncio.gather(*tasks)


def test_every_answer_is_of_one_version_and_says_which(loop: asyncio.Runner, folders: Any) -> None:
    def trial(seconds: float) -> None:
        limit = seconds / 2
        first, words, (one, two) = folders
        turned_by_two = Shape(words=words[2:] + words[:2], load_seconds=2 * limit)
        (two / SHAPE).write_bytes(msgspec.json.encode(turned_by_two))

        async def run() -> list[Answer]:
            client: AsyncClient = await launch(
                Config.of(model=str(first)), COMMAND, step_timeout=limit
            )

            async def steps() -> None:
                await asyncio.sleep(0.1)
                await client.control(Control(UPDATE, folder=str(one)))
                await asyncio.sleep(0.05)
                with pytest.raises(CheckpointError, match="holds no fake"):
                    await client.control(Control(UPDATE, folder=str(one.parent)))
                await asyncio.gather(  # it takes longer than a step may: nobody takes it for stuck
                    client.control(Control(UPDATE, folder=str(two), version="two")),
                    client.control(Control(PREFIX_CACHE, mode="keep")),
                )
                assert client.weights_version == "two"
                await asyncio.sleep(0.05)

            try:
                return await asyncio.wait_for(under_load(client, steps), PATIENCE)
            finally:
                await client.close()

        answers = loop.run(run())
        turned = {None: 0, "step-1": 1, "two": 2}
        seen = [versions for _, versions in answers]
        assert all(len(versions) == 1 for versions in seen) and set.union(*seen) == set(turned)
        for number, (found, (version,)) in enumerate(answers):
            assert found == right(number, words, turned[version])

    patiently(trial)


def test_what_runs_may_go_on_with_the_new_weights(loop: asyncio.Runner, folders: Any) -> None:
    first, words, (one, _) = folders

    async def run() -> tuple[Answer, Answer]:
        client = await launch(Config.of(model=str(first)), COMMAND)
        long = SamplingParams(max_tokens=150, seed=5, ignore_eos=True)
        stream = client.submit(prompt(1), long, stream=True)
        found: dict[int, list[int]] = {0: []}
        versions = set()
        changing = None
        async for deltas in stream:
            for delta in deltas:
                found[0] += delta.token_ids
                versions.add(delta.weights_version)
            if changing is None:
                changing = asyncio.ensure_future(
                    client.control(Control(UPDATE, folder=str(one), mode="keep"))
                )
        assert changing is not None
        await changing
        behind = await ask(client, 2)
        await client.close()
        return (found, versions), behind

    (found, versions), behind = loop.run(asyncio.wait_for(run(), PATIENCE))
    old, new = (expected(prompt(1), 150, words[at:] + words[:at], 5) for at in (0, 1))
    same = next(at for at in range(150) if found[0][at] != old[at])
    assert (
        versions == {None, "step-1"}
        and len(found[0]) == 150
        and found[0][:same] == old[:same] != new[:same]
    )
    assert behind == (right(2, words, 1), {"step-1"})


def test_what_runs_is_ended_where_that_is_asked(loop: asyncio.Runner, folders: Any) -> None:
    """Told with what it had made, by the old weights; what waits for a row too."""
    first, words, (one, _) = folders
    long = SamplingParams(n=20, max_tokens=200, seed=5, ignore_eos=True)

    async def run() -> tuple[list[list[Any]], Answer]:
        client = await launch(Config.of(model=str(first)), COMMAND)
        running = [
            aiter(client.submit(prompt(number), long, stream=number == 0)) for number in range(3)
        ]
        found: list[list[Any]] = [[], [], []]
        while sum(len(delta.token_ids) for delta in found[0]) < 100:
            found[0] += await anext(running[0])
        changing = asyncio.ensure_future(
            client.control(Control(UPDATE, folder=str(one), mode="abort"))
        )
        behind = asyncio.ensure_future(ask(client, 4))
        for into, stream in zip(found, running, strict=True):
            async for deltas in stream:
                into += deltas
        await changing
        try:
            return found, await behind
        finally:
            await client.close()

    found, behind = loop.run(asyncio.wait_for(run(), PATIENCE))
    assert behind == (right(4, words, 1), {"step-1"})
    for number, deltas in enumerate(found):
        ends = [delta for delta in deltas if delta.finish_reason is not None]
        assert sorted(delta.index for delta in ends) == list(range(20))
        for delta in ends:
            assert (delta.finish_reason, delta.stop_reason, delta.weights_version) == (
                "abort",
                None,
                None,
            )
            told = [
                token for each in deltas if each.index == delta.index for token in each.token_ids
            ]
            assert (
                len(told) < 200
                and told == expected(prompt(number), 200, words, 5, delta.index)[: len(told)]
            )
    assert sum(len(delta.token_ids) for delta in found[0]) >= 100


def test_what_runs_and_what_comes_goes_on_behind_a_sleep(
    loop: asyncio.Runner, folders: Any
) -> None:
    def trial(seconds: float) -> None:
        limit = seconds / 2
        first, words, (one, _) = folders

        async def run() -> list[Answer]:
            client = await launch(Config.of(model=str(first)), COMMAND, step_timeout=limit)

            async def steps() -> None:
                await asyncio.sleep(0.1)
                await client.control(Control(SLEEP, mode="keep"))
                assert client.asleep == ("weights", "kv_cache") and not client.idle
                await asyncio.sleep(0.1)
                heard = client.stats()["generation_tokens"]
                await asyncio.sleep(
                    2 * limit
                )  # longer than a step may take: nobody takes it for stuck
                assert (
                    client.alive
                    and client.step_age == 0
                    and client.stats()["generation_tokens"] == heard
                )
                await client.control(Control(WAKE_UP, mode="keep", tags=["weights"]))
                assert client.asleep == ("kv_cache",)
                with pytest.raises(
                    UsageError, match="tags must be of weights, kv_cache, and 'heads' is not"
                ):
                    await client.control(Control(WAKE_UP, tags=["heads"]))
                await client.control(Control(WAKE_UP))
                assert client.asleep == ()
                await asyncio.sleep(0.1)
                await client.control(Control(SLEEP, level=2))  # waits for what runs
                await client.control(Control(WAKE_UP))
                assert client.asleep == ("weights",)
                await client.control(Control(UPDATE, folder=str(one)))
                assert client.asleep == ()

            try:
                return await asyncio.wait_for(under_load(client, steps), PATIENCE)
            finally:
                await client.close()

        answers = loop.run(run())
        turned = {None: 0, "step-1": 1}
        assert {version for _, versions in answers for version in versions} == set(turned)
        for number, (found, (version,)) in enumerate(answers):
            assert found == right(number, words, turned[version])

    patiently(trial)


def test_of_several_replicas_each_is_changed(loop: asyncio.Runner, folders: Any) -> None:
    first, words, (one, _) = folders

    async def run() -> list[Answer]:
        replicas = await launch_replicas(Config.of(model=str(first), data_parallel_size=2), COMMAND)

        async def steps() -> None:
            await asyncio.sleep(0.1)
            await replicas.control(Control(UPDATE, folder=str(one)))
            assert replicas.weights_version == "step-1"
            await asyncio.sleep(0.05)

        try:
            return await asyncio.wait_for(under_load(replicas, steps), PATIENCE)
        finally:
            await replicas.close()

    answers = loop.run(run())
    assert {version for _, versions in answers for version in versions} == {None, "step-1"}
    turned = {None: 0, "step-1": 1}
    for number, (found, versions) in enumerate(answers):
        if len(versions) == 1:  # else its samples ran on both replicas, of which one was changed
            assert found == right(number, words, turned[versions.pop()])


def test_whoever_waits_is_told_of_the_engines_end(loop: asyncio.Runner, folders: Any) -> None:
    first, _, (one, _) = folders

    async def run() -> None:
        client = await launch(Config.of(model=str(first)), COMMAND)
        stream = client.submit(
            prompt(1), SamplingParams(max_tokens=200, ignore_eos=True), stream=False
        )
        waiting = asyncio.ensure_future(client.control(Control(UPDATE, folder=str(one))))
        await asyncio.sleep(0)
        client._process.kill()
        with pytest.raises(EngineError, match="was killed by signal 9"):
            await waiting
        stream.cancel()
        with pytest.raises(EngineError):
            await client.control(Control(PREFIX_CACHE))
        await client.close()

    loop.run(asyncio.wait_for(run(), PATIENCE))

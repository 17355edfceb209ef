"""The engine in a process of its own: bursts, cancels in every state, readers that leave, deaths on
either side."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_model import CONTEXT, VOCABULARY, make_folder

from penstock import LLM, SamplingParams
from penstock.config import Config
from penstock.engine.async_client import AsyncClient
from penstock.engine.launch import launch
from penstock.engine.request_stream import Stream
from penstock.errors import (
    CapacityError,
    CheckpointError,
    ContextLengthError,
    EngineError,
    PenstockError,
    TokenizerError,
)
from penstock.request import Delta

pytestmark = pytest.mark.torch

KNOBS: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 32,
    "kv_cache_tokens": 2048,
    "dtype": "float32",
    "steps_ahead": 2,
}
LONG = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)
HANG = 600  # seconds after which a test that hangs gives up; nothing here comes near


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(folder: Path, loop: asyncio.Runner) -> Iterator[AsyncClient]:
    made = loop.run(launch(Config.of(model=str(folder), **KNOBS)))
    process = made._process
    assert made.alive
    yield made
    loop.run(made.close())
    loop.run(made.close())
    assert process.returncode == 0 and not made.alive
    with pytest.raises(EngineError, match="closed"):
        made.submit([5], LONG, stream=False)


async def whole(stream: Stream) -> dict[int, Delta]:
    """Each sample's deltas as one."""
    out: dict[int, Delta] = {}
    async for deltas in stream:
        for delta in deltas:
            mine = out.setdefault(delta.index, Delta(delta.request_id, delta.index))
            assert mine.finish_reason is None, "news after the end"
            mine.text += delta.text
            mine.token_ids += delta.token_ids
            mine.finish_reason, mine.stop_reason = delta.finish_reason, delta.stop_reason
    return out


async def until_at_rest(client: AsyncClient) -> None:
    """The engine's own numbers say that nothing runs, waits or holds a block, and the client keeps
    nothing."""
    asked = client._client._ids.__reduce__()[1][0]  # how many went down
    while True:
        stats = client.stats()
        if stats.get("requests") == asked and not (
            stats["running"] or stats["waiting"] or stats["kv_usage"]
        ):
            break
        await asyncio.sleep(0.02)
    assert not client._client.asked and not client._streams


def guarded(loop: asyncio.Runner, work: Any) -> Any:
    return loop.run(asyncio.wait_for(work, HANG))


def test_a_burst_is_what_the_same_engine_gives_in_process(
    client: AsyncClient, loop: asyncio.Runner, folder: Path
) -> None:
    rng = random.Random(2)
    prompts = [
        [rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(1, 60))] for _ in range(60)
    ]
    params = [
        SamplingParams(n=1 + i % 4, seed=i, max_tokens=1 + i % 20, stop=["e", "qq"][: i % 3])
        for i in range(60)
    ]

    async def burst() -> list[dict[int, Delta]]:
        streams = [
            client.submit(p, s, stream=i % 2 == 0)
            for i, (p, s) in enumerate(zip(prompts, params, strict=True))
        ]
        return await asyncio.gather(*map(whole, streams))

    got = guarded(loop, burst())
    with LLM(str(folder), **KNOBS) as llm:
        outs = llm.generate(prompts, params, use_tqdm=False)
    for mine, out in zip(got, outs, strict=True):
        assert sorted(mine) == list(range(len(out.outputs)))
        for index, output in enumerate(out.outputs):
            delta = mine[index]
            assert (delta.text, delta.token_ids) == (output.text, output.token_ids)
            assert (delta.finish_reason, delta.stop_reason) == (
                output.finish_reason,
                output.stop_reason,
            )
    guarded(loop, until_at_rest(client))


def test_a_request_is_cancelled_in_any_state(client: AsyncClient, loop: asyncio.Runner) -> None:
    """On its way, waiting, in the middle of its prompt, running, with half of its samples over, and
    when it is over."""

    async def cancels() -> None:
        prompt = [7 + i % 200 for i in range(CONTEXT - 40)]
        streams = [client.submit([5 + i, *prompt], LONG, stream=True) for i in range(40)]
        streams[20].cancel()
        first = aiter(streams[0])
        await anext(first)
        for _ in range(3):
            await anext(first)
        for stream in streams:
            stream.cancel()
            stream.cancel()
        assert [delta async for delta in streams[30]] == []
        await until_at_rest(client)
        half = client.submit(
            prompt, SamplingParams(n=40, seed=3, max_tokens=30, logit_bias={0: 3.0}), stream=False
        )
        async for deltas in half:
            if any(delta.finish_reason for delta in deltas):
                break
        half.cancel()
        await until_at_rest(client)
        over = client.submit([5], SamplingParams(max_tokens=2, ignore_eos=True), stream=True)
        assert (await whole(over))[0].finish_reason == "length"
        over.cancel()
        await until_at_rest(client)

    guarded(loop, cancels())


def test_a_reader_that_goes_away_frees_its_blocks(
    client: AsyncClient, loop: asyncio.Runner
) -> None:
    async def leave() -> None:
        async for _ in client.submit([5], LONG, stream=True):
            break
        reading = asyncio.create_task(whole(client.submit([6], LONG, stream=False)))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        await until_at_rest(client)

    guarded(loop, leave())


def test_refusals_reach_the_one_who_asked(client: AsyncClient, loop: asyncio.Runner) -> None:
    with pytest.raises(ContextLengthError):
        client.submit([5] * CONTEXT, LONG, stream=False)

    async def ask() -> None:
        # the engine alone knows this rule
        stream = client.submit([5], SamplingParams(n=4), stream=False, samples=[4])
        with pytest.raises(PenstockError, match="samples"):
            await whole(stream)
        scored = client.submit(
            [5, 6, 7], SamplingParams(prompt_logprobs=1, max_tokens=1), stream=False
        )
        await whole(scored)
        assert scored.asked.prompt_logprobs is not None
        assert [None if p is None else next(iter(p)) for p in scored.asked.prompt_logprobs] == [
            None,
            6,
            7,
        ]

    # the last with this client: `until_at_rest` counts requests, and no refused one is a request
    guarded(loop, ask())
    assert not client._client.asked and not client._streams


@pytest.mark.parametrize("how", ["killed", "broken"])
def test_an_engine_that_dies_wakes_every_waiter(
    how: str, folder: Path, loop: asyncio.Runner
) -> None:
    async def die() -> tuple[AsyncClient, list[Any]]:
        client = await launch(Config.of(model=str(folder), **KNOBS))
        many = SamplingParams(n=64, max_tokens=None, ignore_eos=True)
        streams = [client.submit([5 + i], many, stream=i % 2 == 0) for i in range(40)]
        readers = [asyncio.create_task(whole(stream)) for stream in streams]
        while not client.stats().get("generation_tokens"):
            await asyncio.sleep(0.01)
        if how == "killed":
            client._process.kill()
        else:
            client._end._socket.send(b"\xc1 no word")
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert not client.alive
        with pytest.raises(EngineError):
            client.submit([5], LONG, stream=True)
        streams[0].cancel()
        await client.close()
        return client, ends

    client, ends = guarded(loop, die())
    assert sum(isinstance(end, EngineError) for end in ends) > 20
    assert all(isinstance(end, (EngineError, dict)) for end in ends)  # a few may have ended before
    (told,) = {str(end) for end in ends if isinstance(end, EngineError)}
    assert (
        "\n" not in told and ("killed by signal 9" if how == "killed" else "cannot be read") in told
    )
    assert client._process.returncode is not None


def test_what_fails_while_loading_is_raised_by_launch(
    folder: Path, loop: asyncio.Runner, tmp_path: Path
) -> None:
    no_tokenizer = tmp_path / "no_tokenizer"
    no_tokenizer.mkdir()
    for name in ("config.json", "model.safetensors"):
        (no_tokenizer / name).symlink_to(folder / name)

    async def fail(**knobs: Any) -> BaseException:
        with pytest.raises(PenstockError) as caught:
            await launch(Config.of(**{"model": str(folder)} | knobs))
        return caught.value

    async def all_of_them() -> list[BaseException]:
        return await asyncio.gather(
            fail(model=str(tmp_path / "none")),
            fail(kv_cache_tokens=10**12),
            fail(model=str(no_tokenizer)),
        )

    errors = guarded(loop, all_of_them())
    assert [type(error) for error in errors] == [CheckpointError, CapacityError, TokenizerError]
    assert not any("\n" in str(error) for error in errors)


PARENT = """
import asyncio, sys
from penstock.config import Config
from penstock.engine.launch import launch
from penstock.request import SamplingParams

async def main():
    client = await launch(Config.of(model=sys.argv[1], dtype="float32", kv_cache_tokens=2048, max_num_seqs=8))
    stream = client.submit([5], SamplingParams(n=8, max_tokens=None, ignore_eos=True), stream=True)
    async for _ in stream:
        break
    print(client._process.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_a_parent_that_is_killed_leaves_no_engine(folder: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    ending = os.pidfd_open(engine)
    try:
        os.kill(engine, 0)  # it lives
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        # a pidfd can be read from once its process has ended
        readable, _, _ = select.select([ending], [], [], HANG)
        assert readable == [ending]
    finally:
        os.close(ending)

"""`serve` with two server processes over one engine: the real scheduler and channel, a runner that
computes nothing. What a model's generation_config.json asks for and no answer gets is said once, by
one of them."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_runner import Orders, expected
from in_loop import Events, close, post
from service import COMPLETIONS, Serving, commands, make_folder, parent_of, until

from penstock.config import Config
from penstock.errors import CapacityError, UsageError
from penstock.server.api_server.multi_process import share_port
from penstock.server.api_server.serve import serve
from penstock.server.api_server.site import tell_unserved

pytestmark = pytest.mark.torch

SERVERS = 2


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("fake")
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "no_repeat_ngram_size": 3}'
    )
    return folder, make_folder(folder, Orders(step_seconds=0.02), longest=2048)


@pytest.fixture(scope="module")
def serving(words: tuple[Path, list[int]]) -> Iterator[Serving]:
    with Serving(words[0], servers=SERVERS) as made:
        yield made


def test_what_a_model_asks_for_in_vain_is_said_by_one_server(serving: Serving) -> None:
    said = serving.stderr().splitlines()
    assert sum("no_repeat_ngram_size" in line for line in said) == 1
    for word in (" rows and contexts of 2,048 fit", f"listens on {serving.url}, keys: none"):
        assert sum(word in line for line in said) == 1, said


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (None, []),  # a checkpoint without the file is sound
        (
            {
                "temperature": 0.6,
                "eos_token_id": [1, 2],
                "no_repeat_ngram_size": 0,
                "do_sample": True,
            },
            [],
        ),
        (
            {"temperature": 0.6, "no_repeat_ngram_size": 3, "typical_p": 0.9},
            ["no_repeat_ngram_size, typical_p:"],
        ),
        ({"odd\nkey\x1b[2J": 1}, ["odd"]),
    ],
)
def test_what_changes_samples_and_is_not_served_is_named(
    tmp_path: Path, asked: dict[str, Any] | None, told: list[str]
) -> None:
    """In one line without the folder, whatever the keys are."""
    if asked is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(asked))
    tell_unserved(tmp_path, err := io.StringIO())
    said = err.getvalue()
    assert said.count("\n") == len(told) and all(
        f"asks for {each}" in said.replace("'", "") for each in told
    )
    assert "\x1b" not in said and str(tmp_path) not in said


def connections(pid: int) -> int:
    """Counts the sockets that a process has open; what it closes meanwhile counts no more."""
    found = 0
    with os.scandir(f"/proc/{pid}/fd") as files:
        for each in files:
            with suppress(FileNotFoundError):
                found += os.readlink(each.path).startswith("socket:")
    return found


def test_connections_spread_and_each_stream_gets_its_own_tokens_on_either_server(
    serving: Serving, words: tuple[Path, list[int]]
) -> None:
    """And those of readers that leave are gone."""
    port, before = int(serving.url.rsplit(":", 1)[1]), [connections(pid) for pid in serving.workers]

    def body(number: int, tokens: int) -> dict[str, Any]:
        prompt = {"prompt": [number, 7, 7], "seed": number, "max_tokens": tokens}
        return {**prompt, "stream": True, "return_token_ids": True, "ignore_eos": True}

    async def main() -> None:
        streams, leaving = [], []
        while (
            min(connections(pid) - was for pid, was in zip(serving.workers, before, strict=True))
            < 6
        ):
            number = len(streams)
            streams.append(await post(port, body(number, 20 + number)))
            leaving.append(await post(port, body(number, 1900)))
            await leaving[-1][0].readline()
        for _, writer in leaving:
            await close(writer)
        read = [Events(reader) for reader, _ in streams]
        await asyncio.gather(*(events.read() for events in read))
        for number, events in enumerate(read):
            assert events.whole and events.ids[0] == expected(
                [number, 7, 7], 20 + number, words[1], number
            )
        for _, writer in streams:
            await close(writer)

    asyncio.run(main())
    until(serving.at_rest)


def test_each_server_tells_the_sums_of_all(serving: Serving) -> None:
    names = ("e2e_request_latency_seconds_count", "request_generation_tokens_sum")

    def sums() -> set[tuple[float, ...]]:
        """Of several answers, each on a connection of its own: of whichever server takes it."""
        told = [serving.metrics() for _ in range(8)]
        return {tuple(page.get(f"penstock:{name}", 0.0) for name in names) for page in told}

    until(lambda: len(sums()) == 1)
    ((count, made),) = sums()
    for _ in range(20):
        assert (
            httpx.post(serving.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 3}).status_code
            == 200
        )
    until(lambda: sums() == {(count + 20, made + 60)})
    assert {httpx.get(serving.url + "/health").status_code for _ in range(8)} == {200}


def test_no_process_that_is_started_has_the_key_in_its_environment(
    words: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "of-the-environment")
    with Serving(words[0], servers=SERVERS) as serving:
        started = [pid for pid in commands() if parent_of(pid) == serving.process.pid]
        assert len(started) > SERVERS  # an engine, the servers, and what renders chats
        for pid in started:
            found = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"PATH=" in found and b"of-the-environment" not in found
        asked = {
            "headers": {"authorization": "Bearer of-the-environment"},
            "json": {"prompt": "x", "max_tokens": 1},
        }
        assert httpx.post(serving.url + COMPLETIONS, **asked).status_code == 200


def test_a_single_engine_is_not_restarted(serving: Serving) -> None:
    answer = httpx.post(serving.url + "/admin/restart")
    assert answer.status_code == 400 and "--data-parallel-size" in answer.json()["error"]["message"]
    assert httpx.get(serving.url + "/health").json() == {"ready": True}


def test_a_shared_port_is_shared_with_nobody_else() -> None:
    with share_port("127.0.0.1", 0, 3) as listeners:
        (address,) = {listener.getsockname() for listener in listeners}
        for state in ("bound", "listening"):
            if state == "listening":
                listeners[0].listen()
            with (
                pytest.raises(CapacityError, match=f"port {address[1]}"),
                share_port("127.0.0.1", address[1], 2),
            ):
                pass
    with share_port("127.0.0.1", address[1], 2):
        pass


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_count_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match="api_server_count"):
        serve(Config.of(), port=0, api_server_count=count)

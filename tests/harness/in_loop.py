"""A server in this very event loop over a fake engine's process, so that its tasks can be counted;
requests by hand.

It knows serve's parts and raw HTTP/1.1; what is asked, and when connections are cut, is its
callers'.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bare_http import CLOSE, request
from fake_process import COMMAND

from penstock.config import Config
from penstock.engine.async_client import AsyncClient
from penstock.engine.launch import launch
from penstock.server.api_server.port import bind
from penstock.server.api_server.shutdown import StopSignals
from penstock.server.api_server.site import Site, serve_engine
from penstock.server.batch.state_folder import StateFolder
from penstock.server.online.auth import AccessPolicy
from penstock.server.openai.http_limits import HttpLimits


class Here:
    """The server, its client of the engine, and what was open before anybody asked."""

    def __init__(self, client: AsyncClient, port: int) -> None:
        self.client, self.port = client, port
        self._files, self._tasks = self._now()

    def look_again(self) -> None:
        """Takes the most tasks that were there: `wait_for` begins and ends one each time that a
        loop goes round."""
        self._tasks = max(self._tasks, self._now()[1])

    def _now(self) -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())

    async def rest(self, seconds: float) -> dict[str, float]:
        """What is left over once all is at rest, or after so many seconds:
        all of it should be 0."""
        left: dict[str, float] = {}
        for _ in range(int(seconds * 50)):
            files, tasks = self._now()
            stats = self.client.stats()
            left = {
                "rows": stats["running"],
                "waiting": stats["waiting"],
                "blocks": stats["kv_usage"],
                "requests": len(self.client._streams) + len(self.client._client.asked),
                "descriptors": files - self._files,
                "tasks": max(tasks - self._tasks, 0),  # of a start still under way there were more
            }
            if not any(left.values()):
                break
            await asyncio.sleep(0.02)
        return left


@contextlib.asynccontextmanager
async def serving_here(
    folder: Path, limits: HttpLimits | None = None, state: StateFolder | None = None, **knobs: Any
) -> AsyncIterator[Here]:
    client = await launch(Config.of(model=str(folder), **knobs), COMMAND)
    stop, ready = StopSignals(), asyncio.Event()
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        site = Site(
            "fake",
            AccessPolicy(),
            limits or HttpLimits(drain_seconds=1, max_num_queued_reqs=1_000_000),
        )
        serving = asyncio.create_task(
            serve_engine(client, listener, site, stop, ready.set, state=state)
        )
        try:
            await asyncio.wait(
                (serving, asyncio.ensure_future(ready.wait())), return_when=asyncio.FIRST_COMPLETED
            )
            port = listener.getsockname()[1]
            # stats are there from here on
            reader, writer = await post(port, {"prompt": "x", "max_tokens": 1})
            await reader.read()
            await close(writer)
            await asyncio.sleep(0.3)
            here = Here(client, port)
            for _ in range(3):
                await asyncio.sleep(0.007)
                here.look_again()
            yield here
        finally:
            stop()
            stop()
            await serving
            await client.close()


async def post(
    port: int, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(body, CLOSE))
    return reader, writer


async def close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Events:
    """Token ids of an answer's events, by choice, as they come."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.ids: dict[int, list[int]] = {}
        self.whole = False  # all of it came
        self.error: str | None = None

    async def read(self, rng: random.Random | None = None, chance: float = 0.0) -> None:
        """To the end; or until `rng` says stop before an event, as it does with this chance."""
        while line := await self._reader.readline():
            if line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200"):
                self.error = line.decode().strip()
            if not line.startswith(b"data: "):
                continue
            if rng is not None and rng.random() < chance:
                return
            if line == b"data: [DONE]\n":
                self.whole = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.error = event["error"]["code"]
                return
            for choice in event["choices"]:
                self.ids.setdefault(choice["index"], []).extend(choice["token_ids"] or [])

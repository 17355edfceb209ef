"""launch: starts an engine in its own process. Returns a client for this event loop once the engine
is ready.

With several engines, or several processes that share one, supervisor.py starts the engines and each
process joins them (replica_set.py), with the functions here. Knows processes and the channel's
addresses; not its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.children.carried_error import CarriedError
from penstock.children.spawn import command_of, could_not_start, how_ended
from penstock.config import Config
from penstock.engine.async_client import AsyncClient, EngineProcess
from penstock.engine.build_engine import EngineFacts
from penstock.engine.channel import ClientEnd, Ready, Up
from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.errors import EngineError

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

ENGINE = command_of("penstock.engine.process")


@dataclass(frozen=True, slots=True)
class Place:
    """GPUs and CPU cores of a replica. visible: its CUDA_VISIBLE_DEVICES; None: this process's.
    cores: CPU cores it is pinned to; empty: not pinned."""

    visible: str | None = None
    cores: list[int] = field(default_factory=list)


async def launch(
    config: Config, engine: Sequence[str] = ENGINE, step_timeout: float = STEP_TIMEOUT
) -> AsyncClient:
    """Starts the engine and waits until it is ready. Raises the engine's error if it fails to load.

    engine: the command of its process; benchmarks pass a process that computes nothing. An engine
    that completes no step for `step_timeout` seconds, while it has work, is ended.
    """
    config.check()
    with addresses(1) as (address,):
        end = ClientEnd(address)
        try:
            process = await start(config, [address], engine, step_timeout)
        except BaseException:
            end.close()
            raise
        try:
            return await join(end, process, not config.model.skip_tokenizer_init, step_timeout)
        except BaseException:
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise


@contextlib.contextmanager
def addresses(clients: int) -> Iterator[list[str]]:
    """Yields one ZeroMQ address per client. Engine and client must connect inside the block;
    afterwards the addresses are gone."""
    # the folder and its sockets are accessible to this user alone
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    try:
        yield [f"ipc://{folder / f'client{client}'}" for client in range(clients)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def start(
    config: Config,
    addresses: Sequence[str],
    engine: Sequence[str] = ENGINE,
    step_timeout: float = STEP_TIMEOUT,
    place: Place = Place(),
) -> asyncio.subprocess.Process:
    """Starts the engine's process for one client per address; returns while it loads. Raises
    CapacityError."""
    environment = (
        None if place.visible is None else {**os.environ, "CUDA_VISIBLE_DEVICES": place.visible}
    )
    try:
        process = await asyncio.create_subprocess_exec(
            *engine, stdin=asyncio.subprocess.PIPE, env=environment
        )
    except OSError as error:
        raise could_not_start("the engine's process", error) from error
    # Standard input stays open after this line: the engine exits when it closes.
    assert process.stdin is not None
    # the process runs a single replica, so it gets no data_parallel_size
    knobs = {name: value for name, value in config.told().items() if name != "data_parallel_size"}
    said = {
        "addresses": list(addresses),
        "knobs": knobs,
        "step_timeout": step_timeout,
        "cores": place.cores,
    }
    process.stdin.write(msgspec.json.encode(said) + b"\n")
    return process


async def join(
    end: ClientEnd, process: EngineProcess, tokenizer: bool, step_timeout: float
) -> AsyncClient:
    """Waits until the engine is ready and returns its client. Raises the engine's error if it fails
    to load, or TokenizerError; `end` is closed then."""
    try:
        facts = await facts_of(end, process)
        loaded = load_tokenizer(facts) if tokenizer else None
    except BaseException:
        end.close()
        raise
    return AsyncClient(facts, loaded, end, process, step_timeout)


def load_tokenizer(facts: EngineFacts) -> Tokenizer:
    """Returns the tokenizer of the engine's model. Raises TokenizerError."""
    from penstock.text.tokenizer import Tokenizer

    folder = Path(facts.tokenizer or facts.folder).expanduser()
    return Tokenizer.load(folder, vocab_size=facts.vocab_size, chat_template=facts.chat_template)


async def facts_of(end: ClientEnd, process: EngineProcess) -> EngineFacts:
    """Waits for Ready and returns its facts. Raises the engine's error, or EngineError if its
    process ended."""
    word = asyncio.ensure_future(end.receive())
    gone = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({word, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not word.done():
            # the process's last message may still be on the way
            await asyncio.wait({word}, timeout=0.5)
        if not word.done():
            raise EngineError(
                f"the engine's process {how_ended(process.returncode)} while it loaded"
            )
        return _facts(word.result())
    finally:
        for task in (word, gone):
            task.cancel()


def _facts(word: Up) -> EngineFacts:
    if isinstance(word, CarriedError):
        raise word.error()
    if not isinstance(word, Ready):
        raise EngineError("the engine spoke before it was ready")
    return word.facts

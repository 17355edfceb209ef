"""launch: starts an engine in a process of its own and gives a client for this event loop once it is ready.

It knows processes and the channel's address; not what crosses.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.config import Config
from penstock.engine.async_client import AsyncClient
from penstock.engine.channel import ClientEnd, Failed, Ready, Up
from penstock.engine.client import error_of
from penstock.engine.engine import Refused
from penstock.engine.open import EngineFacts
from penstock.errors import CapacityError, EngineError

ENGINE = (sys.executable, "-m", "penstock.engine.process")


async def launch(config: Config, engine: Sequence[str] = ENGINE) -> AsyncClient:
    """Starts the engine and waits until it is ready. Raises what the engine raised while it loaded.

    `engine` is the command of its process; benchmarks bring one that computes nothing.
    """
    config.check()
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))  # readable by this user alone, and so is the socket in it
    end = ClientEnd(f"ipc://{folder / 'engine'}")
    try:
        process = await asyncio.create_subprocess_exec(*engine, stdin=asyncio.subprocess.PIPE)
    except OSError as error:
        end.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise CapacityError(
            f"the engine's process could not be started: {error.strerror}: free memory or raise the process limit"
        ) from error
    try:
        await _tell(process, f"ipc://{folder / 'engine'}", config)
        facts = await _ready(end, process)
        tokenizer = None
        if not config.model.skip_tokenizer_init:
            from penstock.text.tokenizer import Tokenizer

            tokenizer = Tokenizer.load(Path(facts.folder), vocab_size=facts.vocab_size)
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        end.close()
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # both ends hold the socket by now, or never will
    return AsyncClient(facts, tokenizer, end, process)


async def _tell(process: asyncio.subprocess.Process, address: str, config: Config) -> None:
    """The line on standard input, which stays open: its end would be the engine's."""
    knobs = {name: getattr(place, name) for name, place in config.places().items()}
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode({"address": address, "knobs": knobs}) + b"\n")
    await process.stdin.drain()


async def _ready(end: ClientEnd, process: asyncio.subprocess.Process) -> EngineFacts:
    """Waits for Ready; Failed, or the process's end, is raised."""
    word = asyncio.ensure_future(end.receive())
    gone = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({word, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not word.done():
            await asyncio.wait({word}, timeout=0.5)  # its last words may still be on the way
        if not word.done():
            raise EngineError(f"the engine's process ended with code {process.returncode} while it loaded")
        return _facts(word.result())
    finally:
        for task in (word, gone):
            task.cancel()


def _facts(word: Up) -> EngineFacts:
    if isinstance(word, Failed):
        raise error_of(Refused(-1, word.kind, word.message, word.param))
    if not isinstance(word, Ready):
        raise EngineError("the engine spoke before it was ready")
    return word.facts

"""Targets of fuzzing: bytes go in, and what comes out but by the house's own errors is a fault, and
is raised.

Each takes any bytes at all and returns; it raises AssertionError, or whatever our code raised that
it shouldn't have. It knows the parts under test, all but HTTP (fuzz_app.py); who draws the bytes,
and how cleverly, is its callers' (tests of hypothesis).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzz_bounds import PATIENCE, bounded, check_error

from penstock.errors import CheckpointError, PenstockError, UsageError

COMPLETIONS = "/v1/completions"


# --- a batch's input


def split(path: Path, data: bytes, longest: int, read: int) -> None:
    """Lines as the batches read them, `read` bytes at a time, against a reading of the whole."""
    from penstock.server.batch.batch_limits import BatchJobLimits
    from penstock.server.batch.input_file import read_lines

    async def found() -> list[tuple[int, bytes]]:
        limits = BatchJobLimits(max_line_bytes=longest, read_bytes=read)
        return [each async for each in read_lines(path, limits)]

    path.write_bytes(data)
    with bounded():
        got = asyncio.run(found())
    whole = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert got == [
        (number, line[: longest + 1]) for number, line in enumerate(whole, 1) if line.strip()
    ]


class LineCheck:
    """The check of a batch's lines."""

    def __init__(self) -> None:
        from server_fake import Facts

        self._facts: Any = Facts()

    def good(self, line: bytes, endpoint: str = COMPLETIONS) -> bool:
        """Whether a batch would run it; any other end than LineError is a fault."""
        from penstock.server.batch.batch_limits import BatchJobLimits
        from penstock.server.batch.input_file import LineCheck
        from penstock.server.openai.batch_line import LineError

        with bounded():
            try:
                LineCheck(
                    endpoint, "fake", self._facts, BatchJobLimits(max_line_bytes=50_000)
                ).line(line)
            except LineError as error:
                said = str(error)
                assert said and "\n" not in said and error.code
                return False
        return True


def row(line: bytes) -> bool:
    """A row of `penstock run`: whether it can be run."""
    from penstock.jobs.input_rows import parse_row

    with bounded():
        try:
            parse_row(line, 1, seed=0)
        except UsageError as error:
            assert str(error).startswith("row 1") and "\n" not in str(error)
            return False
    return True


def form(kind: bytes, body: Sequence[bytes]) -> tuple[dict[str, str], str | None, bytes] | None:
    """What an upload's parser makes of a body in pieces; None where it refuses it."""
    from penstock.server.batch.upload import UploadParser
    from penstock.server.openai.http_errors import HttpError

    with bounded():
        try:
            parser = UploadParser(kind.decode("latin-1"), 100_000)
            for piece in body:
                parser.write(piece)
            upload = parser.end()
        except HttpError as error:
            check_error(error)
            return None
    return upload.fields, upload.filename, parser.take(100_000)


# --- a model's files


def config(folder: Path, data: bytes) -> bool:
    """Whether a config.json of these bytes is one; it is a whole one then, or else one
    CheckpointError."""
    from penstock.models.read_config import read_model_config

    (folder / "config.json").write_bytes(data)
    with bounded():
        try:
            read = read_model_config(folder)
        except CheckpointError as error:
            check_error(error)
            assert str(folder) in str(error)
            return False
    assert read.head_dim > 0 and not read.head_dim % 2 and not read.heads % read.kv_heads
    assert 0 < read.context < 2**31 and len(read.windows) == read.num_layers
    assert all(0 <= token < read.vocab_size for token in read.eos_ids)
    return True


def generation_config(folder: Path, data: bytes) -> bool:
    from penstock.models.generation_config import read_generation_defaults
    from penstock.request import SamplingParams

    (folder / "generation_config.json").write_bytes(data)
    with bounded():
        try:
            read = read_generation_defaults(folder)
        except CheckpointError as error:
            check_error(error)
            return False
        SamplingParams(**read.sampling)  # a request that says nothing is one
    return True


def tokenizer_config(folder: Path, data: bytes) -> bool:
    """Beside a sound tokenizer.json."""
    from penstock.text.tokenizer import Tokenizer

    (folder / "tokenizer_config.json").write_bytes(data)
    with bounded():
        try:
            read = Tokenizer.load(folder, vocab_size=300)
        except CheckpointError as error:
            check_error(error)
            return False
        assert isinstance(read.decode(read.encode("as it was")), str)
    return True


def checkpoint(folder: Path) -> bool:
    """Whether a folder's weights can be read; what can is of the shape that its header says."""
    from penstock.weights.checkpoint import ITEM_BYTES, read_entries, read_tensors

    with bounded():
        try:
            entries = [
                entry for entry in read_entries(folder).values() if entry.dtype in ITEM_BYTES
            ]
            for entry, tensor in read_tensors(entries):
                assert tuple(tensor.shape) == entry.shape
        except CheckpointError as error:
            check_error(error)
            assert str(folder) in str(error)
            return False
    return True


# --- the channel


class EngineLoop:
    """An engine over the fake runner: takes words that came down, turns until it is at rest."""

    MOST_STEPS = 20_000
    MOST_SAMPLES = 64

    def __init__(self, folder: Path) -> None:
        from service import make_folder

        make_folder(folder)
        self._folder = folder

    def turn(self, messages: Sequence[bytes]) -> str:
        """How it ended: "rest", or the name of the error that the process would end with,
        and tell."""
        from fake_process import open_fake
        from fake_runner import Orders, write_orders

        from penstock.config import Config
        from penstock.engine.channel import DOWN, Ask, Cancel
        from penstock.errors import EngineError

        write_orders(self._folder, Orders(step_seconds=0.0))
        engine, _ = open_fake(Config.of(model=str(self._folder)))
        with bounded():
            for data in messages:
                try:
                    word = DOWN.decode(data)
                except EngineError as error:
                    check_error(error)
                    return "EngineError"
                if isinstance(word, Ask):
                    asked = word.request.sampling
                    if (
                        asked.prompt_logprobs is None
                        and not asked.min_tokens
                        and asked.n <= self.MOST_SAMPLES
                    ):
                        engine.submit(word.request)  # the fake runner serves no others
                elif isinstance(word, Cancel):
                    engine.cancel(word.request_id, word.sample)
                engine.step()
            for _ in range(self.MOST_STEPS):
                if not engine.has_work:
                    break
                engine.step()
            assert not engine.has_work, "it does not come to rest"
        engine.scheduler.check()
        assert engine.scheduler.pool.held == 0
        return "rest"


class Ends:
    """A client's end of the channel, without the channel."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(self) -> Any:
        from penstock.engine.channel import UP

        return UP.decode(await self.coming.get())

    def send_down(self, word: Any) -> None:
        """Nobody listens."""

    def close(self, *, flush: bool = False) -> None:
        """Nothing to let go of."""


def heard(messages: Sequence[bytes], last: bytes) -> list[str]:
    """What becomes of two streams, one with news as they come and one whole, of a client that hears
    these messages and then `last`, which ends both: the name of each one's error, or "end". None
    waits for ever."""
    from penstock.engine.async_client import AsyncClient, SharedEngine
    from penstock.engine.build_engine import EngineFacts
    from penstock.engine.request_stream import Stream
    from penstock.request import SamplingParams

    facts = EngineFacts(
        model="m", folder="f", max_model_len=64, max_num_seqs=8, vocab_size=256, eos_token_ids=()
    )

    async def end(stream: Stream) -> str:
        try:
            async for _ in stream:
                pass
        except PenstockError as error:
            check_error(error)
            return type(error).__name__
        return "end"

    async def listen() -> list[str]:
        ends = Ends()
        client = AsyncClient(facts, None, ends, SharedEngine(lambda: None))  # type: ignore[arg-type]
        sampling = SamplingParams(n=2, max_tokens=9, detokenize=False, logprobs=1)
        streams = [client.submit([1, 2], sampling, stream=each) for each in (True, False)]
        waiting = asyncio.gather(*map(end, streams))
        for data in (*messages, last):
            ends.coming.put_nowait(data)
        ended = list(await asyncio.wait_for(waiting, PATIENCE / 2))
        assert client.alive or client.death
        await client.close()
        return ended

    with bounded():
        return asyncio.run(listen())

"""Measures the server's cost of text and answers, in microseconds of a core a token.

    python benchmarks/answers.py [--json]

A made-up engine sends results like those of monkeys: requests of 1,024 samples with a stop string,
lengths geometric around 126 tokens, ids uniform over 128,256 (the worst case for caches), so that a
step ends a few samples of many requests. The results cross the real wire format into the real
client, and the real code makes the answers; only process, socket and HTTP are left out. No model,
no GPU. Measured separately and in sum:

    text      wire, stop strings and detokenising of samples that are not streamed
    answers   from the wire to the body's bytes: without logprobs, with the chosen token's, with 5
              likely ones
    events    from the wire to the events' bytes, a token an event, 1,000 streams: without and with
              logprobs

A block is the longest time for which the event loop ran nothing else, by wall clock; `burst` is 1 M
tokens with logprobs, of 1,024 samples that end in one step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop
from random_tokenizer import write_tokenizer

from penstock.engine.async_client import AsyncClient
from penstock.engine.build_engine import EngineFacts
from penstock.engine.channel import UP, StepOutputs
from penstock.engine.client import Client
from penstock.request import SamplingParams
from penstock.schedule.deltas import GOES_ON, LENGTH, STOP, Deltas
from penstock.server.online import handlers
from penstock.server.online.active_call import ActiveCall
from penstock.server.online.app_state import AppState
from penstock.server.online.metrics import Metrics
from penstock.server.openai.answers import CompletionAnswer
from penstock.server.openai.logprobs_json import TokenSpellings
from penstock.server.openai.prompt_ids import TokenizedPrompt
from penstock.server.openai.translate import Call
from penstock.text.tokenizer import Tokenizer

STOPS = ["Question:"]
N, MEAN, LONGEST = 1024, 126, 1024
ROWS = 8192
VOCAB = 128_256
STREAMS, STEPS = 1000, 40
FACTS = EngineFacts(
    model="made-up",
    folder="",
    max_model_len=8192,
    max_num_seqs=ROWS,
    vocab_size=VOCAB,
    eos_token_ids=(),
)


def load_tokenizer(given: str | None) -> Tokenizer:
    """Loads a given tokenizer.json(.gz), or the demo's extended with made-up tokens to 128,256."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), None if given is None else Path(given), VOCAB)
        return Tokenizer.load(Path(folder), vocab_size=VOCAB)


class Process:
    """Stands for the process of an engine that never ends."""

    returncode = None

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


class End:
    """The client's end of the channel: sent messages are dropped,
    received ones were packed before."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = iter(messages)

    def send_down(self, word: Any) -> None:
        pass

    async def receive(self) -> Any:
        await asyncio.sleep(0)
        message = next(self._messages, None)
        if message is None:
            await asyncio.Event().wait()
        return UP.decode(cast(bytes, message))

    def close(self) -> None:
        pass


def scores(count: int, vocab: int, likely: int | None, draw: np.random.Generator) -> dict[str, Any]:
    """Returns logprob columns of `count` tokens, with `likely` likely ones each; empty for None."""
    if likely is None:
        return {}
    top = -np.sort(draw.gamma(2.0, 2.0, (count, likely)), axis=1).astype(np.float32)
    return {
        "chosen": -draw.gamma(2.0, 4.0, count).astype(np.float32),
        "rank": draw.integers(1, vocab, count, np.int32),
        "top_ids": draw.integers(0, vocab, (count, likely), np.int32),
        "top": top,
    }


def whole_news(requests: int, n: int, vocab: int, likely: int | None, lengths: Any) -> list[bytes]:
    """Returns the messages of samples that are not streamed: one a step, with the samples that
    ended.

    lengths: [requests * n] tokens of each sample. Samples run in the order of their requests, ROWS
    at once.
    """
    draw = np.random.default_rng(7)
    # Rows come free as samples end: a heap would say when; with this many rows the mean is near
    # enough.
    ends = np.arange(requests * n) // ROWS * MEAN + lengths
    order = np.argsort(ends, kind="stable")
    messages = []
    for step in np.split(order, np.flatnonzero(np.diff(ends[order])) + 1):
        size = lengths[step]
        start = np.concatenate(([0], np.cumsum(size))).astype(np.int32)
        total = int(start[-1])
        stopped = size < lengths.max()
        deltas = Deltas(
            (step // n).astype(np.int64),
            (step % n).astype(np.int32),
            np.where(stopped, STOP, LENGTH).astype(np.int8),
            np.full(step.size, -1, np.int32),
            start,
            draw.integers(0, vocab, total, np.int32),
            **scores(total, vocab, likely, draw),
        )
        messages.append(UP.encode(StepOutputs(deltas, [], None)))
    return messages


def token_news(rows: int, steps: int, vocab: int, likely: int | None) -> list[bytes]:
    """Returns the messages of `rows` streamed requests: one token of each a step."""
    draw = np.random.default_rng(7)
    who, zeros, start = (
        np.arange(rows),
        np.zeros(rows, np.int32),
        np.arange(rows + 1, dtype=np.int32),
    )
    messages = []
    for step in range(steps):
        finish = np.full(rows, LENGTH if step == steps - 1 else GOES_ON, np.int8)
        tokens = draw.integers(0, vocab, rows, np.int32)
        more = scores(rows, vocab, likely, draw)
        messages.append(
            UP.encode(
                StepOutputs(Deltas(who, zeros, finish, zeros - 1, start, tokens, **more), [], None)
            )
        )
    return messages


class Gap:
    """Measures the longest time between two turns of the event loop."""

    def __init__(self) -> None:
        self.longest, self._task = 0.0, asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now

    def end(self) -> float:
        self._task.cancel()
        return self.longest


async def _sink(message: Any) -> None:
    pass


async def serve(
    spellings: TokenSpellings,
    messages: list[bytes],
    requests: int,
    asked: dict[str, Any],
    *,
    stream: bool = False,
) -> tuple[float, float, int]:
    """Answers `requests` bodies from these messages. Returns (processor seconds, longest block,
    bytes)."""
    tokenizer = spellings.tokenizer
    assert tokenizer is not None
    sampling = SamplingParams(**asked)
    client = AsyncClient(FACTS, tokenizer, cast(Any, End(messages)), cast(Any, Process()))
    service = AppState(client=client, model="made-up", metrics=Metrics(client, "made-up"))
    service.spellings = spellings
    call = Call(
        prompts=[TokenizedPrompt([1, 2, 3])],
        sampling=sampling,
        stream=stream,
        include_usage=False,
        logprobs=sampling.logprobs,
    )
    gap = Gap()
    begin = time.thread_time()
    sizes = await asyncio.gather(*(_answer(service, call, stream) for _ in range(requests)))
    seconds = time.thread_time() - begin
    return seconds, gap.end(), sum(sizes)


async def _answer(service: AppState, call: Call, stream: bool) -> int:
    running = ActiveCall(service, call)
    answer = CompletionAnswer(call, service.model, service.spellings)
    if stream:
        await handlers.EventStream(service, running, answer, None)._write(_sink)
        return 0
    return sum(map(len, await handlers.buffer_answer(service, running, answer)))


def text_seconds(tokenizer: Tokenizer, messages: list[bytes], requests: int) -> float:
    """Returns the processor seconds of the client alone: messages to text, with a search for stop
    strings."""
    client = Client(FACTS, tokenizer, lambda word: None)
    for _ in range(requests):
        client.submit([1, 2, 3], SamplingParams(n=N, max_tokens=LONGEST, stop=STOPS))
    begin = time.thread_time()
    for message in messages:
        word = UP.decode(message)
        assert isinstance(word, StepOutputs) and word.deltas is not None
        client.process(word.deltas)
    return time.thread_time() - begin


def best(
    times: int,
    spellings: TokenSpellings,
    messages: list[bytes],
    requests: int,
    asked: dict[str, Any],
    **how: Any,
) -> Any:
    """Returns the fastest of several runs of `serve`, and the shortest of their longest blocks."""
    runs = []
    for _ in range(times):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runs.append(runner.run(serve(spellings, messages, requests, asked, **how)))
    return min(run[0] for run in runs), 1e3 * min(run[1] for run in runs), runs[0][2]


def measure(tokenizer: Tokenizer, requests: int, times: int) -> dict[str, float]:
    spellings = TokenSpellings(tokenizer, VOCAB)
    begin = time.thread_time()
    spellings.of(as_ids=False).tables  # noqa: B018 - made by looking
    found = {"tables_ms": 1e3 * (time.thread_time() - begin)}
    lengths = np.minimum(np.random.default_rng(3).geometric(1 / MEAN, requests * N), LONGEST)
    tokens = int(lengths.sum())
    plain = {"n": N, "max_tokens": LONGEST, "stop": STOPS}
    messages = whole_news(requests, N, VOCAB, None, lengths)
    found["text_us"] = (
        1e6 * min(text_seconds(tokenizer, messages, requests) for _ in range(times)) / tokens
    )
    found["text_core_percent"] = 100 * found["text_us"] * 0.15  # at 150k tok/s
    for key, likely in (("answer", None), ("answer_logprobs", 0), ("answer_likely", 5)):
        messages = whole_news(requests, N, VOCAB, likely, lengths)
        seconds, found[f"{key}_block_ms"], size = best(
            times, spellings, messages, requests, {**plain, "logprobs": likely}
        )
        found[f"{key}_us"], found[f"{key}_bytes"] = 1e6 * seconds / tokens, size / tokens
    found["logprobs_times"] = found["answer_logprobs_us"] / found["answer_us"]
    for key, likely in (("event", None), ("event_logprobs", 0)):
        messages = token_news(STREAMS, STEPS, VOCAB, likely)
        asked = {"max_tokens": STEPS, "logprobs": likely}
        seconds, found[f"{key}_block_ms"], _ = best(
            times, spellings, messages, STREAMS, asked, stream=True
        )
        found[f"{key}_us"] = 1e6 * seconds / (STREAMS * STEPS)
    burst = whole_news(1, N, VOCAB, 0, np.full(N, LONGEST))
    _, found["burst_block_ms"], _ = best(times, spellings, burst, 1, {**plain, "logprobs": 0})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", help="a tokenizer.json or .json.gz of up to 128,256 tokens; default: made up"
    )
    parser.add_argument("--requests", type=int, default=4, help="of 1,024 samples each")
    parser.add_argument("--times", type=int, default=3, help="the quickest run counts")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    tokenizer = load_tokenizer(asked.tokenizer)
    tokenizer.stop_index  # noqa: B018 - made by looking, and a server's first request does
    found = measure(tokenizer, asked.requests, asked.times)
    if asked.json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:28} {value:10.3f}")


if __name__ == "__main__":
    main()

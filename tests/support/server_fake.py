"""A fake engine with the client's interface, a tokenizer of a few hundred tokens, and a server
thread over both.

It computes nothing: token k of sample i is letter (i + k) of the alphabet, so that tests know every
answer; or a text that a test gives it. A test can hold it, let it die, and see which streams were
cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from penstock.engine.async_client import ReplicaState
from penstock.engine.control import SLEEP, WAKE_UP, Control
from penstock.engine.engine import TAGS
from penstock.engine.group_stop import GroupStop
from penstock.errors import (
    CheckpointError,
    ContextLengthError,
    EngineError,
    PenstockError,
    UsageError,
)
from penstock.request import Delta, Logprob, SamplingParams
from penstock.sandbox.sandbox import SandboxPool
from penstock.sandbox.sandbox_process import (
    ChatJob,
    GrammarJob,
    Job,
    Reply,
    TellJob,
    TextJob,
    TokensJob,
    tokens_json,
)
from penstock.server.api_server.http_protocol import http_protocol
from penstock.server.api_server.port import bind
from penstock.server.api_server.routes import build_app
from penstock.server.batch.manager import BatchManager
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.app_state import AppState
from penstock.server.online.auth import AccessPolicy
from penstock.server.online.metrics import Metrics
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.chat_template import render
from penstock.text.grammar import check_grammar
from penstock.text.parsers.parser_registry import NO_PARSERS, AnswerParsers
from penstock.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}{%"
    " if add_generation_prompt %}<assistant>{% endif %}{% if shout is defined %}{{ shout }}{%"
    " endif %}"
)
CONTEXT = 256


def make_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> Tokenizer:
    """Byte-level, one token a byte: 256 tokens, "a" is one of them, and no BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@dataclass
class Facts:
    model: str = "fake"
    folder: str = "/no/files"
    max_model_len: int = CONTEXT
    max_num_seqs: int = 16
    vocab_size: int = 256
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


class FakeStream:
    def __init__(
        self, engine: FakeEngine, ids: list[int], sampling: SamplingParams, stream: bool
    ) -> None:
        self.engine, self.ids, self.sampling, self.stream = engine, ids, sampling, stream
        self.asked = self  # what is known of its request, as PendingRequest has it
        self.cancelled = self.background = False
        self.tenant = self.salt = 0
        self.answers = False
        self.prompt_logprobs: list[Any] | None = None
        self.num_cached_tokens, self.guesses = 0, engine.guesses
        self.waited, self.begun = 0.0, None
        self.end = "length"

    def cancel(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            self.engine.open.discard(self)

    def listen(self, hear: Callable[[], None]) -> None:
        """As Stream's, by a task that reads."""
        self.heard: list[Delta] = []
        self.over: PenstockError | bool = False

        async def read() -> None:
            try:
                async for deltas in self:
                    self.heard += deltas
                    hear()
                self.over = True
            except PenstockError as error:
                self.over = error
            hear()

        self.task = asyncio.ensure_future(read())

    def take(self) -> tuple[list[Delta], bool]:
        if isinstance(self.over, PenstockError):
            raise self.over
        heard, self.heard = self.heard, []
        return heard, self.over

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        if self.engine.refuses is not None:
            raise self.engine.refuses
        sampling, spelt = self.sampling, self.engine.spelling
        room = self.engine.facts.max_model_len - len(self.ids)
        length = min(room, sampling.max_tokens or room)
        whole = {i: [spelt[(i + k) % 26] for k in range(length)] for i in range(sampling.n)}
        if self.engine.says is not None and self.engine.tokenizer is not None:
            said = self.engine.tokenizer.encode(self.engine.says)
            self.end = "stop" if len(said) <= length else "length"
            length = min(length, len(said))
            whole = dict.fromkeys(range(sampling.n), said[:length])
        if self.engine.aborts:
            self.end = "abort"
            yield [self._delta(i, [], last=True) for i in range(sampling.n)]
            return
        self.num_cached_tokens = len(self.ids) // 16 * 16
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *(self._position(token) for token in self.ids[1:])]
        for at in range(length if self.stream else 1):
            await asyncio.sleep(self.engine.step_seconds)
            await self.engine.going.wait()
            if not self.engine.alive:
                raise EngineError("the engine died: told to")
            last = not self.stream or at == length - 1
            yield [
                self._delta(i, ids[at : at + 1] if self.stream else ids, last)
                for i, ids in whole.items()
            ]
        self.engine.open.discard(self)

    def _delta(self, index: int, ids: list[int], last: bool) -> Delta:
        text = (
            self.engine.tokenizer.decode(ids)
            if self.engine.tokenizer and self.sampling.detokenize
            else ""
        )
        delta = Delta(0, index, text, ids)
        if self.sampling.logprobs is not None:
            delta.logprobs = [self._position(token) for token in ids]
        if last:
            delta.finish_reason = self.end
            if self.engine.weights_version != "default":
                delta.weights_version = self.engine.weights_version
        if self.engine.fail_with:
            delta.finish_reason, delta.error = "numerical_error", self.engine.fail_with
        return delta

    def _position(self, token: int) -> dict[int, Logprob]:
        others = [other for other in (7, 8, 9) if other != token]
        return {
            token: Logprob(-0.25, 1),
            **{o: Logprob(-2.0 - i, i + 2) for i, o in enumerate(others)},
        }


class FakeEngine:
    """AsyncClient's interface, without an engine."""

    def __init__(self, tokenizer: Tokenizer | None, **facts: Any) -> None:
        self.tokenizer = tokenizer
        self.facts = Facts(**facts)
        self.spelling = (
            tokenizer.encode("abcdefghijklmnopqrstuvwxyz") if tokenizer else list(range(100, 126))
        )
        self._alive = True
        self.guesses = 0, 0  # right and wrong drafts of every request
        self.open_at_death: frozenset[FakeStream] = frozenset()
        self.cut_before_death = False
        self.weights_version, self.asleep = "default", tuple[str, ...]()
        self.controls: list[tuple[str, str, str]] = []
        self.death: str | None = None
        self.step_age = 0.0
        self.fail_with: str | None = None
        self.says: str | None = None  # what each answer is, if not letters
        self.refuses: UsageError | None = (
            None  # what each request hears, as one whose form is refused
        )
        self.aborts = False  # each request at once, as a control of that mode does
        self.step_seconds = 0.0
        self.restarts = 0
        self.going = asyncio.Event()
        self.going.set()
        self.open: set[FakeStream] = set()
        self.submitted: list[FakeStream] = []

    @property
    def alive(self) -> bool:
        return self._alive

    @alive.setter
    def alive(self, alive: bool) -> None:
        if self._alive and not alive:
            self.open_at_death = frozenset(self.open)
        self._alive = alive

    async def control(self, word: Control) -> None:
        if word.folder == "/no/folder":
            raise CheckpointError("no folder /no/folder: name one")
        self.controls.append((word.what, word.mode, word.folder or str(word.level)))
        self.weights_version = word.version or word.folder or self.weights_version
        self.asleep = {SLEEP: TAGS, WAKE_UP: ()}.get(word.what, self.asleep)

    def submit(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        stream: bool,
        background: bool = False,
        tenant: int = 0,
        salt: int = 0,
        answers: bool = False,
        group_stop: GroupStop | None = None,
    ) -> FakeStream:
        assert (
            all(type(token) is int and 0 <= token < self.facts.vocab_size for token in prompt_ids)
            and prompt_ids
        )
        if not self.alive:
            raise EngineError("the engine is closed")
        if len(prompt_ids) >= self.facts.max_model_len:
            raise ContextLengthError("too long", param="prompt")
        made = FakeStream(self, prompt_ids, sampling, stream)
        made.tenant, made.salt, made.answers = tenant, salt, answers
        made.background = background
        self.submitted.append(made)
        self.open.add(made)
        return made

    def stats(self) -> dict[str, float]:
        names = (
            "prompt_tokens generation_tokens prefix_hit_tokens prefix_query_tokens preemptions"
            " steps wasted_tokens"
        )
        names += " completed_steps tokens_per_second expected_seconds_left jit_compiles jit_loads"
        return {
            "running": len(self.open),
            "waiting": 0,
            "kv_usage": 0.25,
            **dict.fromkeys(names.split(), 7),
        }

    def restart(self) -> None:
        self.restarts += 1

    @property
    def gone(self) -> bool:
        return not self.alive

    def each(self) -> list[ReplicaState]:
        return [ReplicaState(self.alive, 0, self.stats())]

    async def close(self, hurry: asyncio.Event | None = None) -> None:
        self.alive = False


class SandboxesHere:
    """SandboxPool's interface, in threads of this process: no test has to wait for another."""

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        self.tokenizer, self.limit = tokenizer, limit

    async def run(self, jobs: Sequence[Job]) -> list[Reply]:
        return [await asyncio.to_thread(self._do, job) for job in jobs]

    def _do(self, job: Job) -> Reply:
        if isinstance(job, GrammarJob):
            check_grammar(job.asked)
            return Reply()
        if isinstance(job, TokensJob):
            ids = np.frombuffer(job.ids, np.int32)
            return Reply(text=self.tokenizer.decode(ids, skip_special_tokens=False))
        if isinstance(job, TellJob):
            found = self.tokenizer.encode(job.text, add_special_tokens=job.add_special_tokens)
            return Reply(told=tokens_json(found, self.limit, self.tokenizer if job.spelt else None))
        texts = job.texts if isinstance(job, TextJob) else [self._render(job)]
        encode, special = self.tokenizer.encode_prompt, job.add_special_tokens
        ids = [
            encode(text, self.limit, keep=job.keep, add_special_tokens=special) for text in texts
        ]
        return Reply(ids, "" if isinstance(job, TextJob) else texts[0])

    def _render(self, job: ChatJob) -> str:
        return render(
            self.tokenizer,
            job.messages,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            template_kwargs=job.template_kwargs,
            tools=job.tools,
        )

    def close(self) -> None:
        """There is nothing to end."""


class _Uvicorn(uvicorn.Server):
    """Ends at once: uvicorn's own loops look ten times a second whether it should."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for each in [*self.servers, *(sockets or ())]:
            each.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.005)


class Running:
    """A server in a thread: its URL, its fake engine, and a way to run something on its loop."""

    def __init__(
        self, url: str, engine: FakeEngine, service: AppState, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.url, self.engine, self.service, self.loop = url, engine, service, loop

    def on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        # ends a test that would never end
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(600)

    def hold(self, held: bool) -> None:
        async def turn() -> None:
            self.engine.going.clear() if held else self.engine.going.set()

        self.on_loop(turn())

    def pass_time(self, seconds: float) -> None:
        """Sets the clock of the server's loop forward: its timers that are due by then go off."""

        async def turn() -> None:
            before = self.loop.time
            self.loop.time = lambda: before() + seconds  # type: ignore[method-assign]

        self.on_loop(turn())

    def wait_for(self, condition: Any) -> None:
        """Returns when the condition is true on the loop; a test's own timeout ends a wait that
        never does."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        self.on_loop(wait())


@contextlib.contextmanager
def running_server(
    tokenizer: Tokenizer | None,
    *,
    api_key: str | None = None,
    access: AccessPolicy | None = None,
    limits: HttpLimits | None = None,
    sandboxes: SandboxPool | None = None,
    batches: Callable[[AppState], BatchManager] | None = None,
    parsers: AnswerParsers = NO_PARSERS,
    **facts: Any,
) -> Iterator[Running]:
    ready, made = threading.Event(), []

    async def main() -> None:
        engine = FakeEngine(tokenizer, **facts)
        access_ = access or AccessPolicy(
            keys=gather_keys([api_key] if api_key else (), None, {}), admin_without_key=True
        )
        service = AppState(
            client=engine,
            model="fake",
            metrics=Metrics(engine, "fake"),
            limits=limits or HttpLimits(),
            keys=access_.keys,
            admin_without_key=access_.admin_without_key,
            parsers=parsers,
            sandbox_pool=tokenizer
            and (sandboxes or SandboxesHere(tokenizer, engine.facts.max_model_len)),
        )
        app = build_app(service, access_, manager=batches and batches(service))
        protocol = http_protocol(service.limits, access=access_)
        config = uvicorn.Config(
            app,
            loop="none",
            http=protocol,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=100_000,  # a test may be slow between two requests
        )
        server = _Uvicorn(config)
        listener = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        made.extend((Running(url, engine, service, asyncio.get_running_loop()), server))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        ready.set()
        await task
        service.close_sandboxes()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(600)
    try:
        yield made[0]
    finally:
        made[0].loop.call_soon_threadsafe(made[0].service.close)
        made[1].should_exit = True
        thread.join(600)
        assert not thread.is_alive()

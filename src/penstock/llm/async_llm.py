"""AsyncLLM: the engine for who has an event loop of their own: each request an async iterator, answers as they grow.

    async with AsyncLLM("folder-or-hub-id") as llm:
        async for out in llm.generate("Question: ...", SamplingParams(max_tokens=64)):
            print(out.outputs[0].text)

The engine runs in a process of its own (several with data_parallel_size). It knows clients and outputs; no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.engine.control import PREFIX_CACHE, SLEEP, UPDATE, WAKE_UP, Control, Mode
from penstock.errors import EngineError, PenstockError, UsageError
from penstock.llm.inputs import AnyPrompt, as_list, ids_of
from penstock.request import CompletionOutput, Delta, RequestOutput, SamplingParams
from penstock.shared_weights import SharedWeights
from penstock.vllm_arguments import engine_knobs

if TYPE_CHECKING:
    from penstock.engine.request_stream import Stream
    from penstock.replicas.replica_set import EngineClient


class AsyncLLM:
    """A model behind an event loop. The knobs are LLM's. It starts with `start`, or the first request."""

    def __init__(self, model: str = "demo", **knobs: Any) -> None:
        own, told = engine_knobs(str(model), knobs)
        for line in told:
            print(f"penstock: {line}", file=sys.stderr)
        self.config = Config.of(**own)
        self._starting: asyncio.Task[EngineClient] | None = None
        self._streams: dict[str, Stream] = {}
        self._numbers = itertools.count()
        self._closed = False

    async def start(self) -> None:
        """Waits until the engine is ready. Raises what it raised while it loaded."""
        await self._ready()

    async def generate(
        self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yields the request's output each time that it has grown, whole each time, the last one `finished`. Who stops
        reading ends the request. Raises UsageError for what can't run, EngineError where the engine is gone."""
        listed = as_list(prompt)
        if len(listed) != 1:
            raise UsageError(f"generate takes one prompt, and this is {len(listed)}: call it for each", param="prompt")
        given = listed[0]
        client = await self._ready()
        params = SamplingParams() if sampling_params is None else sampling_params
        ids = ids_of(given, client.tokenizer, client.facts.max_model_len)
        name = str(next(self._numbers)) if request_id is None else request_id
        if name in self._streams:
            raise UsageError(f"request_id {name!r} is under way: give each request its own", param="request_id")
        self._streams[name] = stream = client.submit(ids, params, stream=True)
        out = RequestOutput(name, given if isinstance(given, str) else None, ids, finished=False)
        made: dict[int, CompletionOutput] = {}
        try:
            async for deltas in stream:
                for delta in deltas:
                    _add(made, delta)
                out.num_cached_tokens = stream.asked.num_cached_tokens
                out.prompt_logprobs = stream.asked.prompt_logprobs
                out.finished = len(made) == params.n and all(each.finish_reason for each in made.values())
                out.error = next((delta.error for delta in deltas if delta.error), out.error)
                yield replace(out, outputs=[replace(made[index]) for index in sorted(made)])
            if not out.finished:  # `abort` ended it
                for index in range(params.n):
                    sample = made.setdefault(index, CompletionOutput(index, "", []))
                    sample.finish_reason = sample.finish_reason or "abort"
                yield replace(out, outputs=[replace(made[index]) for index in sorted(made)], finished=True)
        finally:
            self._streams.pop(name, None)
            stream.cancel()

    def abort(self, request_id: str) -> None:
        """Ends a request; who reads it is told what it has made, `finish_reason` "abort". Nothing for one that isn't
        under way."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.cancel()

    async def update_weights(
        self,
        model_path: str = "",
        *,
        shared: SharedWeights | None = None,
        weights_version: str | None = None,
        mode: Mode = "wait",
    ) -> None:
        """Puts other weights in the model's place, as POST /update_weights does; mode `abort`: requests under way end
        with what they have made. Raises PenstockError."""
        await self._control(Control(UPDATE, mode, model_path, weights_version, shared))

    async def reset_prefix_cache(self) -> bool:
        """Has no prompt that comes find what was computed so far. Returns that it is so."""
        await self._control(Control(PREFIX_CACHE, mode="keep"))
        return True

    async def sleep(self, level: int = 1, mode: Mode = "wait") -> None:
        """Gives the device's memory back, as POST /sleep does: requests that come wait for `wake_up`. Raises
        PenstockError."""
        await self._control(Control(SLEEP, mode=mode, level=level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes the memory again; tags: of `weights` and `kv_cache`, None: both. Raises PenstockError."""
        await self._control(Control(WAKE_UP, mode="keep", tags=tags))

    async def is_sleeping(self) -> bool:
        """Returns whether weights or KV sleep."""
        return bool((await self._ready()).asleep)

    async def shutdown(self) -> None:
        """Ends the engine; requests under way get an EngineError. Twice is once."""
        self._closed = True
        starting, self._starting = self._starting, None
        if starting is None:
            return
        try:
            client = await starting
        except PenstockError:
            return  # it never ran, and who waited for it was told why
        await client.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def _control(self, word: Control) -> None:
        await (await self._ready()).control(word)

    async def _ready(self) -> EngineClient:
        if self._closed:
            raise EngineError("this AsyncLLM is shut down: make a new one")
        if self._starting is None:
            from penstock.replicas.launch_engines import launch_engines

            self._starting = asyncio.ensure_future(launch_engines(self.config))
        return await asyncio.shield(self._starting)


def _add(made: dict[int, CompletionOutput], delta: Delta) -> None:
    """Adds a delta to its sample."""
    out = made.setdefault(delta.index, CompletionOutput(delta.index, "", []))
    out.text += delta.text
    out.token_ids = out.token_ids + delta.token_ids
    out.finish_reason, out.stop_reason = delta.finish_reason, delta.stop_reason
    if delta.logprobs is not None:
        out.logprobs = [*(out.logprobs or []), *delta.logprobs]

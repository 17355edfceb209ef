"""AsyncLLM: the Python API for asyncio. Each request is an async iterator over its growing outputs.

    async with AsyncLLM("folder-or-hub-id") as llm:
        async for out in llm.generate("Question: ...", SamplingParams(max_tokens=64)):
            print(out.outputs[0].text)

The engine runs in its own process (several with data_parallel_size). Knows clients and outputs; no
HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.engine.control import PREFIX_CACHE, SLEEP, UPDATE, WAKE_UP, Control, Mode
from penstock.errors import EngineError, PenstockError, UsageError
from penstock.llm.engine_args import EngineArgs, arguments_of
from penstock.llm.inputs import AnyPrompt, as_list, ids_of
from penstock.llm.outputs import RequestBuilder
from penstock.request import FIRST_WEIGHTS, RequestOutput, RequestOutputKind, SamplingParams
from penstock.shared_weights import SharedWeights
from penstock.vllm_arguments.sift import check_call, engine_knobs

if TYPE_CHECKING:
    from penstock.engine.request_stream import Stream
    from penstock.replicas.replica_set import EngineClient

SHUT_DOWN = "this AsyncLLM is shut down: make a new one"


class AsyncLLM:
    """A loaded model for callers with an event loop. Takes the arguments of LLM. The engine starts
    at `start` or at the first request."""

    def __init__(self, model: str = "demo", **knobs: Any) -> None:
        own, told = engine_knobs(str(model), knobs)
        for line in told:
            print(f"penstock: {line}", file=sys.stderr)
        self.config = Config.of(**own)
        self._starting: asyncio.Task[EngineClient] | None = None
        self._streams: dict[str, Stream] = {}
        self._numbers = itertools.count()
        self._closed = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Makes an AsyncLLM from AsyncEngineArgs. The engine starts at `start` or at the first
        request."""
        return cls(**arguments_of(engine_args))

    @property
    def weights_version(self) -> str:
        """Version name of the weights in use: `default` until the first update."""
        started = (
            self._starting is not None and self._starting.done() and not self._starting.cancelled()
        )
        return (
            self._starting.result().weights_version if started and self._starting else FIRST_WEIGHTS
        )

    async def check_health(self) -> None:
        """Raises EngineError if the engine is gone, or its start's error if that failed; never
        waits."""
        if self._closed:
            raise EngineError(SHUT_DOWN)
        if self._starting is None or not self._starting.done():
            return
        client = self._starting.result()
        if not client.alive:
            raise EngineError(client.death or "no replica takes requests")

    async def start(self) -> None:
        """Waits until the engine is ready. Raises the errors of its start."""
        await self._ready()

    async def generate(
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **vllms: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the request's outputs; the last one is `finished`. sampling_params.output_kind
        chooses between the whole output each time it grows (CUMULATIVE), only its new part (DELTA),
        and one output at the end (FINAL_ONLY, the cheapest). Leaving the iteration ends the
        request. vllms: vLLM's other arguments, accepted only with values that change nothing.
        Raises UsageError for a request that can't run, EngineError if the engine is gone."""
        check_call("generate", vllms)
        listed = as_list(prompt)
        if len(listed) != 1:
            raise UsageError(
                f"generate takes one prompt, and this is {len(listed)}: call it for each",
                param="prompt",
            )
        client = await self._ready()
        params = SamplingParams() if sampling_params is None else sampling_params
        ids = ids_of(listed[0], client.tokenizer, client.facts.max_model_len)
        name = str(next(self._numbers)) if request_id is None else request_id
        if name in self._streams:
            raise UsageError(
                f"request_id {name!r} is under way: give each request its own", param="request_id"
            )
        kind = params.output_kind
        once = kind is RequestOutputKind.FINAL_ONLY
        self._streams[name] = stream = client.submit(ids, params, stream=not once)
        built = RequestBuilder(name, listed[0], params.n)
        try:
            async for deltas in stream:
                for delta in deltas:
                    built.add(delta, stream.asked)
                if built.finished or not once:
                    yield built.output(kind)
            if not built.finished:  # the request was ended by `abort`
                built.abort()
                yield built.output(kind)
        finally:
            self._streams.pop(name, None)
            stream.cancel()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends one request or several. Each yields a last output with its text so far and
        `finish_reason` "abort". Ignores ids of no running request."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            stream = self._streams.get(name)
            if stream is None:
                continue
            if stream.asked.stream or (await self._ready()).asleep:
                stream.cancel()
            else:
                stream.cut()  # the engine still sends the samples' text so far

    async def update_weights(
        self,
        model_path: str = "",
        *,
        shared: SharedWeights | None = None,
        weights_version: str | None = None,
        mode: Mode = "wait",
    ) -> None:
        """Replaces the model's weights, as POST /update_weights does. mode: `wait` for running
        requests, `keep` them going with the new weights, or `abort` them. Raises PenstockError."""
        await self._control(Control(UPDATE, mode, model_path, weights_version, shared))

    async def reset_prefix_cache(self) -> bool:
        """Makes later prompts ignore cached prefixes. Always returns True."""
        await self._control(Control(PREFIX_CACHE, mode="keep"))
        return True

    async def sleep(self, level: int = 1, mode: Mode = "wait") -> None:
        """Frees the device's memory, as POST /sleep does; new requests wait for `wake_up`. Raises
        PenstockError."""
        await self._control(Control(SLEEP, mode=mode, level=level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocates the device's memory again. tags: `weights`, `kv_cache`; None: both. Raises
        PenstockError."""
        await self._control(Control(WAKE_UP, mode="keep", tags=tags))

    async def is_sleeping(self) -> bool:
        """Returns True while weights or the KV cache are asleep."""
        return bool((await self._ready()).asleep)

    async def shutdown(self) -> None:
        """Ends the engine; running requests raise EngineError. Idempotent."""
        self._closed = True
        starting, self._starting = self._starting, None
        if starting is None:
            return
        try:
            client = await starting
        except PenstockError:
            return  # the start failed, and its callers have seen the error
        await client.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def _control(self, word: Control) -> None:
        await (await self._ready()).control(word)

    async def _ready(self) -> EngineClient:
        if self._closed:
            raise EngineError(SHUT_DOWN)
        if self._starting is None:
            from penstock.replicas.launch_engines import launch_engines

            self._starting = asyncio.ensure_future(launch_engines(self.config))
        return await asyncio.shield(self._starting)

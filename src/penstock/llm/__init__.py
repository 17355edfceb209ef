"""LLM: the Python API over lists of prompts. Its engine runs in the caller's process, so notebooks
and scripts without a main guard work. With data_parallel_size above 1 the engines are other
processes (replicas.py).

    llm = LLM("folder-or-hub-id")
    params = SamplingParams(n=64, temperature=0.6, max_tokens=256, stop=["Question:"])
    outs = llm.generate(prompts, params)

Knows the engine and its client; no jobs, files or HTTP.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.config import Config, ModelOptions
from penstock.errors import EngineError, FaultError, TokenizerError, UsageError
from penstock.llm.between import AT_WORK, CLOSED, BetweenCalls
from penstock.llm.engine_args import EngineArgs, arguments_of
from penstock.llm.inputs import (
    AnyPrompt,
    Finished,
    Message,
    Prompt,
    as_list,
    ids_of,
    needed,
    params_for,
)
from penstock.llm.label_scorer import LabelScorer
from penstock.llm.outputs import RequestBuilder, Told, finished_of
from penstock.request import FIRST_WEIGHTS, Delta, Request, RequestOutput, SamplingParams
from penstock.sandbox.sandbox import Sandbox
from penstock.sandbox.sandbox_process import ChatJob
from penstock.status_line import Bar
from penstock.text.chat import check_messages, check_options
from penstock.vllm_arguments.sift import check_call, engine_knobs

if TYPE_CHECKING:
    from penstock.engine.client import PendingRequest
    from penstock.engine.engine import Engine
    from penstock.llm.hf_tokenizer import HfTokenizer
    from penstock.llm.replicas import ReplicaEngines
    from penstock.text.tokenizer import Tokenizer

__all__ = ["LLM", "Finished", "Prompt"]
# prompts are pulled from the iterator until there are this many unfinished samples per row
_AHEAD = 2


class LLM(BetweenCalls, LabelScorer):
    """A loaded model. `model`: a folder, a hub id, or `demo`. The other arguments are the fields of
    Config by name. Arguments of vLLM are accepted too, if they ask for nothing else than what
    Penstock does (`penstock.vllm_arguments`)."""

    def __init__(self, model: str = "demo", **knobs: Any) -> None:
        own, told = engine_knobs(str(model), knobs)
        for line in told:
            print(f"penstock: {line}", file=sys.stderr)
        self.config = Config.of(**own)
        self._replicas: ReplicaEngines | None = None
        if self.config.parallel.data_parallel_size == 1:
            self._open_here()
        else:
            self._open_replicas()
        self._process = os.getpid()
        self._sandbox: Sandbox | None = None
        # held by the call of generate, chat or stream that is stepping the engine
        self._turning = threading.Lock()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Makes an LLM from EngineArgs."""
        return cls(**arguments_of(engine_args))

    def _open_here(self) -> None:
        from penstock.engine.build_engine import build_engine, model_folder
        from penstock.engine.client import Client

        folder = model_folder(self.config)
        # The tokenizer takes a third of a second to load, so it loads while the device starts.
        with ThreadPoolExecutor(1, "penstock-tokenizer") as beside:
            skip = self.config.model.skip_tokenizer_init
            reading = None if skip else beside.submit(_read_tokenizer, folder, self.config.model)
            self._engine, self.facts = build_engine(self.config, folder)
        try:
            self._tokenizer = None if reading is None else reading.result()
        except BaseException:
            self._engine.close()
            raise
        self._client = Client(self.facts, self._tokenizer, self._down)
        # closes the engine if the LLM is dropped without close(), and at the interpreter's end
        self._finalizer = weakref.finalize(self, self._engine.close)

    def _open_replicas(self) -> None:
        from penstock.llm.replicas import ReplicaEngines

        self._replicas = ReplicaEngines(self.config)
        self.facts, self._tokenizer = (
            self._replicas.replicas.facts,
            self._replicas.replicas.tokenizer,
        )
        self._finalizer = weakref.finalize(self, self._replicas.close)

    # --- generate and chat ------------------------------------------------------------------------

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **vllms: Any,
    ) -> list[RequestOutput]:
        """Samples for each prompt (a text, token ids, or a list of either), in the order of the
        prompts.

        A prompt that can't run (too long) gives a RequestOutput with `error` and no outputs; the
        others go on. `use_tqdm`: show a progress line on a terminal. vllms: vLLM's other arguments,
        accepted only with values that change nothing.
        """
        check_call("generate", vllms)
        listed = as_list(prompts)
        each = params_for(listed, sampling_params)
        asked = [
            Prompt(key=i, prompt=p, params=s)
            for i, (p, s) in enumerate(zip(listed, each, strict=True))
        ]
        return self._run(asked, use_tqdm)

    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        **vllms: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of messages) or a list of conversations, by the model's
        chat template.

        add_generation_prompt, continue_final_message, chat_template_kwargs, tools: see `text.chat`.

        Raises TokenizerError for a model without a chat template. An error of one conversation goes
        into its output's `error`.
        """
        self._refuse_a_fork()
        check_call("chat", vllms)
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }
        check_options(**options)
        listed: list[Any] = list(messages)
        if listed and isinstance(listed[0], dict):
            listed = [listed]
        if listed and (fault := self._chat_sandbox().chat_fault) is not None:
            raise fault
        each = params_for(listed, sampling_params)
        pairs = enumerate(zip(listed, each, strict=True))
        asked = [Prompt(key=i, messages=m, params=s, **options) for i, (m, s) in pairs]
        return self._run(asked, use_tqdm)

    def stream(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object] | None = None
    ) -> Iterator[Finished]:
        """Runs a long job: pulls prompts as rows become free, and yields each sample when it ends,
        in any order.

        Memory doesn't grow with the number of prompts. Closing the iterator early cancels the
        running requests. after_step: function called after each engine step, even if no sample
        ended in it, once the step's samples have been consumed. An exception from it ends the
        stream.
        """
        # Closed explicitly: in Python 3.12 closing a generator doesn't close the inner one that it
        # iterates over.
        with closing(self.steps(prompts, after_step=after_step)) as steps:
            for ended in steps:
                yield from ended

    def steps(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object] | None = None
    ) -> Generator[list[Finished]]:
        """Yields the same samples as `stream`, as one list per engine step, mostly empty: for
        callers that do something between steps."""
        with closing(self._steps(prompts, after_step)) as steps:
            for told in steps:
                yield [
                    finished_of(*each)
                    for each in told
                    if each[1] is None or each[0].finish_reason is not None
                ]

    def watch(self, goes_on: Callable[[], None]) -> None:
        """Calls `goes_on` now and then while a step's layers make progress, since a step on a CPU
        may take minutes. For callers that end an engine that hangs."""
        self.engine.runner.watch(goes_on)

    # --- the tokenizer, counters, and closing -----------------------------------------------------

    def get_tokenizer(self) -> HfTokenizer:
        """The model's tokenizer (docs/text.md), also with transformers' methods: callable,
        `apply_chat_template`, `batch_decode` and more. Raises UsageError with skip_tokenizer_init.
        """
        from penstock.llm.hf_tokenizer import HfTokenizer

        return HfTokenizer.over(
            needed(self._tokenizer, "get_tokenizer"), lambda job: self._chat_sandbox().run(job)
        )

    def stats(self) -> dict[str, float]:
        """Returns the engine's gauges, and its counters since the start. Prompt tokens shared by
        the samples of a request are counted once (`prefilled_tokens`)."""
        return self._engine.stats() if self._replicas is None else self._replicas.stats()

    @property
    def generation_tokens(self) -> int:
        """Number of output tokens made so far. Unlike `stats`, which walks the queues, it may be
        read from any thread."""
        if self._replicas is not None:
            return int(self._replicas.stats().get("generation_tokens", 0))
        return int(self._engine.scheduler.counts["generation_tokens"])

    @property
    def engine(self) -> Engine:
        """The engine in this process, for measurements (benchmarks/shapes.py watches its runner).
        Raises UsageError with data_parallel_size above 1."""
        if self._replicas is not None:
            raise UsageError(
                "several engines run in processes of their own: leave data_parallel_size out"
            )
        return self._engine

    def close(self) -> None:
        """Stops the device and frees the memory. Idempotent."""
        self._finalizer()
        if self._sandbox is not None:
            self._sandbox.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- requests to the engine, deltas back ------------------------------------------------------

    def _down(self, word: Request | tuple[int, int | None]) -> None:
        if isinstance(word, Request):
            refused = self._engine.submit(word)
            if refused is not None:
                raise refused.error.error()
        else:
            self._engine.cancel(*word)

    def _ids(self, prompt: Prompt | Any) -> tuple[list[int], Prompt]:
        """Returns the prompt's token ids, and the prompt with its messages rendered to text."""
        if not isinstance(prompt, Prompt):
            kind = type(prompt).__name__
            raise TypeError(
                f"stream takes penstock.Prompt(key=..., prompt=..., params=...), and this is {kind}"
            )
        if prompt.messages is not None:
            job = ChatJob(
                messages=check_messages(prompt.messages),
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                template_kwargs=prompt.chat_template_kwargs,
                tools=prompt.tools,
            )
            done = self._chat_sandbox().run(job)
            return done.ids[0], replace(prompt, prompt=done.text)
        if prompt.prompt is None:
            raise UsageError("a prompt needs `prompt` or `messages`", param="prompt")
        return ids_of(prompt.prompt, self._tokenizer, self.facts.max_model_len), prompt

    def _chat_sandbox(self) -> Sandbox:
        """Returns the process that renders chats. Started for the first chat, and again if it has
        died."""
        if self._sandbox is None or not self._sandbox.usable:
            self._sandbox = Sandbox.open(needed(self._tokenizer, "chat"), self.facts.max_model_len)
            weakref.finalize(self, self._sandbox.close)
        return self._sandbox

    def _deltas(self, prompts: Iterable[Prompt]) -> Generator[Told]:
        """Yields all deltas one by one, each with its request and prompt."""
        with closing(self._steps(prompts)) as steps:
            for told in steps:
                yield from told

    def _steps(
        self, prompts: Iterable[Prompt], after_step: Callable[[], object] | None = None
    ) -> Generator[list[Told]]:
        """Submits prompts while rows are free, steps the engine, and yields each step's deltas
        with their request and prompt.

        A refused prompt is yielded before the step, without a request. after_step: see `stream`.
        """
        from penstock.engine.interrupts import held_interrupts

        self._refuse_a_fork()
        if not self._finalizer.alive:
            raise EngineError(CLOSED)
        if not self._turning.acquire(blocking=False):
            raise UsageError(AT_WORK)
        if self._replicas is not None:
            try:
                with closing(self._replicas.deltas(prompts, self._ids, after_step)) as deltas:
                    for told in deltas:
                        yield [told]
            finally:
                self._turning.release()
            return
        source = iter(prompts)
        known: dict[int, tuple[PendingRequest, Prompt]] = {}
        room, fills = (
            _AHEAD * self.facts.max_num_seqs,
            self._engine.scheduler.limits.max_batched_tokens,
        )
        try:
            self._refuse_asleep()
            while True:
                taken = 0
                while room > 0 and (prompt := next(source, None)) is not None:
                    try:
                        with held_interrupts():
                            ids, prompt = self._ids(prompt)
                            asked = self._client.submit(
                                ids,
                                prompt.params,
                                samples=prompt.samples,
                                group_stop=prompt.group_stop,
                                answers=prompt.answers,
                            )
                            known[asked.request_id] = asked, prompt
                    except (UsageError, TokenizerError, FaultError) as error:
                        # the error refuses only this prompt
                        yield [
                            (Delta(-1, -1, finish_reason="error", error=str(error)), None, prompt)
                        ]
                        continue
                    room -= asked.remaining
                    taken += len(ids)
                    if taken >= fills and not self._engine.flights:
                        # the waiting prefill fills a step and the device is idle: launch the step
                        # first, and pull further prompts while it runs
                        break
                if not known:
                    return
                news, stop = self._step()
                room += sum(delta.finish_reason is not None for delta in news)
                yield [(delta, *known[delta.request_id]) for delta in news]
                for delta in news:
                    if not self._client.waits_for(delta.request_id):
                        known.pop(delta.request_id, None)
                if after_step is not None:
                    after_step()
                if stop is not None:
                    raise stop
        finally:
            try:
                with held_interrupts():
                    for asked, _ in known.values():
                        self._client.cancel(asked)
                    self._settle()
            finally:
                self._turning.release()

    def _step(self) -> tuple[list[Delta], KeyboardInterrupt | None]:
        """Runs a step and returns its deltas. Ctrl-C during the step is returned, not raised, so
        that samples that ended in it (perhaps after minutes) still go out. A second Ctrl-C raises
        at once."""
        from penstock.engine.interrupts import held_interrupts

        self._refuse_a_fork()
        news: list[Delta] | None = None
        try:
            with held_interrupts():
                deltas = self._engine.step()
                news = self._client.process(deltas) if deltas is not None else []
                if (version := self._engine.weights_version) != FIRST_WEIGHTS:
                    for delta in news:
                        delta.weights_version = version
        except KeyboardInterrupt as pressed:
            if news is None:
                raise
            return news, pressed
        return news, None

    def _settle(self) -> None:
        """Finishes the steps that are still running on the device, and drops their results."""
        # a forked child may only drop the iterator that it inherited
        here = os.getpid() == self._process
        while here and self._engine.has_work and not self._engine.broken and self._finalizer.alive:
            self._engine.step()

    def _run(self, prompts: list[Prompt], progress: bool) -> list[RequestOutput]:
        """Runs prompts with the keys 0, 1, ..., and returns their outputs in this order. progress:
        show a progress bar."""
        built = [RequestBuilder(str(i), p.prompt, p.params.n) for i, p in enumerate(prompts)]
        bar = Bar(sum(p.params.n for p in prompts)) if progress else None
        try:
            for delta, asked, prompt in self._deltas(prompts):
                built[prompt.key].add(delta, asked, prompt.prompt)
                if bar is not None and delta.finish_reason is not None:
                    bar.advance()
        finally:
            if bar is not None:
                bar.close()
        return [each.output() for each in built]


def _read_tokenizer(folder: Path, model: ModelOptions) -> Tokenizer:
    from penstock.models.read_config import read_model_config
    from penstock.text.tokenizer import Tokenizer

    # Import torch first: the import holds the GIL and so delays other threads; loading the
    # tokenizer behind it releases the GIL and runs beside them.
    import_module("torch")
    size = read_model_config(folder).vocab_size
    return Tokenizer.load(
        model.tokenizer_folder(folder), vocab_size=size, chat_template=model.chat_template
    )

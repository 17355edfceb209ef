"""An LLM that computes nothing: the jobs' tests kill it, stop it and count what it was asked.

A sample is a function of (prompt, seed, sample index) alone, as a real one is. Samples end in a
shuffled order. A prompt longer than CONTEXT characters is refused as the engine refuses one that is
longer than the context.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import pytest

from penstock.jobs.progress import Progress
from penstock.llm import Finished, Prompt
from penstock.request import CompletionOutput, Delta

CONTEXT = 20_000
IN_FLIGHT = 8


class FakeLLM:
    """delay: seconds a sample takes; a step ends one. dies_after: samples until Ctrl-C, None:
    never."""

    def __init__(self, delay: float = 0.0, dies_after: int | None = None) -> None:
        self.delay, self.dies_after = delay, dies_after
        self.asked: list[Prompt] = []
        self.generation_tokens = 0
        self.most_in_flight = 0
        self.closed = False
        self.facts = SimpleNamespace(sampling_defaults={}, max_num_seqs=IN_FLIGHT)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.closed = True

    def stats(self) -> dict[str, Any]:
        return {"generation_tokens": self.generation_tokens, "prompt_tokens": 0, "steps": 0}

    def stream(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object]
    ) -> Iterator[Finished]:
        order, waiting, source = random.Random(0), list[Finished](), iter(prompts)
        given = 0
        while True:
            while len(waiting) < IN_FLIGHT and (prompt := next(source, None)) is not None:
                self.asked.append(prompt)
                waiting += self._samples(prompt)
                _cut_if_over(prompt, waiting)
            self.most_in_flight = max(self.most_in_flight, len({f.key for f in waiting}))
            if not waiting:
                return
            if self.dies_after is not None and given >= self.dies_after:
                raise KeyboardInterrupt
            time.sleep(self.delay)
            finished = waiting.pop(order.randrange(len(waiting)))
            _hear(self.asked, finished, waiting)
            self.generation_tokens += len(finished.output.token_ids) if finished.output else 0
            given += 1
            yield finished
            after_step()

    def watch(self, goes_on: Callable[[], None]) -> None:
        """Its steps have no layers."""

    def steps(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object]
    ) -> Iterator[list[Finished]]:
        for finished in self.stream(prompts, after_step=after_step):
            yield [finished]

    def _samples(self, prompt: Prompt) -> list[Finished]:
        text = str(prompt.prompt if prompt.messages is None else prompt.messages)
        if len(text) > CONTEXT:
            error = f"the prompt has {len(text)} tokens, the context {CONTEXT}"
            return [Finished(key=prompt.key, output=None, error=error, prompt_tokens=0)]
        wanted = range(prompt.params.n) if prompt.samples is None else prompt.samples
        drawn = [sample(text, prompt.params.seed, i) for i in wanted]
        return [
            Finished(key=prompt.key, output=o, error=None, prompt_tokens=len(text)) for o in drawn
        ]


class Waves(FakeLLM):
    """All samples of `size` prompts end in one step; `idle` steps follow in which none does. look:
    called after each of those, as a kill would come."""

    def __init__(self, size: int, idle: int, look: Callable[[], object]) -> None:
        super().__init__()
        self.size, self.idle, self.look = size, idle, look

    def stream(
        self, prompts: Iterable[Prompt], *, after_step: Callable[[], object]
    ) -> Iterator[Finished]:
        source = iter(prompts)
        while wave := list(islice(source, self.size)):
            self.asked += wave
            for prompt in wave:
                yield from self._samples(prompt)
            for _ in range(self.idle):
                after_step()
                self.look()


def _hear(asked: list[Prompt], finished: Finished, waiting: list[Finished]) -> None:
    """Lets who counts a prompt's answers hear one, and cuts those that wait where it is over."""
    (prompt,) = (prompt for prompt in asked if prompt.key == finished.key)
    output = finished.output
    if prompt.group_stop is not None and output is not None:
        prompt.group_stop.hear(
            Delta(0, output.index, output.text, output.token_ids, output.finish_reason)
        )
        _cut_if_over(prompt, waiting)


def _cut_if_over(prompt: Prompt, waiting: list[Finished]) -> None:
    if prompt.group_stop is not None and prompt.group_stop.over:
        for other in (f.output for f in waiting if f.key == prompt.key and f.output is not None):
            other.text, other.token_ids = other.text[:4], other.token_ids[:2]
            other.finish_reason, other.stop_reason = "abort", "stop_when"


def sample(text: str, seed: int | None, index: int) -> CompletionOutput:
    """Half of the samples answer with the number of characters of the question, which the tests
    make the right one."""
    drawn = blake2b(f"{text}/{seed}/{index}".encode(), digest_size=8).digest()
    question = text.rpartition("Question: ")[2].removesuffix("\nAnswer:")
    number = len(question) if drawn[0] % 2 else drawn[1]
    return CompletionOutput(
        index, f" It is {number}.\n#### {number}", list(range(5 + drawn[2] % 20)), "stop"
    )


def shown_by(room: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    """The progress of each sitting of the job that `room` holds, from its begin on."""
    shown: list[Progress] = []

    class Shown(Progress):
        def __enter__(self) -> Progress:
            shown.append(self)
            return super().__enter__()

    monkeypatch.setattr(room, "Progress", Shown)
    return shown

"""Runs many canaries at once on an LLM's engine, cancels some of them on the way, and holds every
token against its prompt. It knows the client's side of the engine; not what happens on the device.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from canary_model import Canary, canary, header

from penstock import LLM, SamplingParams
from penstock.engine.client import PendingRequest

HEADERS = (0, 0, 3, 16, 40, 64, 65, 150)  # lengths; each is shared by an eighth of the requests


@dataclass(slots=True)
class Bird:
    """A request: what it must say, and what it has said. `leaves`: the step in which the client
    cancels it."""

    canary: Canary
    params: SamplingParams
    stream: bool
    leaves: int | None
    said: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Flock:
    """Everything that was asked at once, and what came of it."""

    birds: list[Bird]
    wrong: list[str] = field(default_factory=list)
    left: int = 0  # requests cancelled while they had samples to come
    steps: int = 0
    grouped: int = 0  # rows of steps that were attended in a prefix group

    @classmethod
    def of(cls, count: int, seed: int, leaving: float = 0.15) -> Flock:
        rng = random.Random(seed)
        headers = [header(rng, length) for length in HEADERS]
        return cls([_bird(rng, headers, leaving) for _ in range(count)])

    def fly(self, llm: LLM, meddle: Callable[[int], None] | None = None) -> None:
        """All of them, to their ends. meddle: called with the step's number after each,
        to do harm."""
        client, engine = llm._client, llm.engine
        self._watch(engine.runner)
        asked = [client.submit(b.canary.prompt, b.params, stream=b.stream) for b in self.birds]
        by_id = {a.request_id: bird for a, bird in zip(asked, self.birds, strict=True)}
        while engine.has_work:
            deltas = engine.step()
            for delta in client.process(deltas) if deltas is not None else []:
                self._hear(by_id[delta.request_id], delta)
            self._let_go(client, asked)
            self.steps += 1
            if meddle is not None:
                meddle(self.steps)
        self.wrong += [
            f"{b.canary} of {b.params.n} ended {b.ended}"
            for b in self.birds
            if not self._is_over(b)
        ]

    def _let_go(self, client: Any, asked: list[PendingRequest]) -> None:
        for one, bird in zip(asked, self.birds, strict=True):
            if bird.leaves == self.steps and client.waits_for(one.request_id):
                client.cancel(one)
                self.left += 1
                bird.leaves = -1

    def _hear(self, bird: Bird, delta: Any) -> None:
        said = bird.said.setdefault(delta.index, [])
        if bird.leaves == -1 or delta.index in bird.ended:
            self.wrong.append(f"news of a sample that is over: {delta}")
        wanted = bird.canary.answer(len(delta.token_ids), len(said))
        if delta.token_ids != wanted:
            self.wrong.append(
                f"{delta.index} of {bird.canary} after {said[-3:]}: {delta.token_ids} for {wanted}"
            )
        said += delta.token_ids
        if delta.finish_reason is not None:
            bird.ended[delta.index] = delta.finish_reason
            if (len(said), delta.finish_reason) != _end(bird):
                self.wrong.append(
                    f"{delta.index} of {bird.canary}: {len(said)} tokens, {delta.finish_reason}"
                )

    def _is_over(self, bird: Bird) -> bool:
        return bird.leaves == -1 or len(bird.ended) == bird.params.n

    def _watch(self, runner: Any) -> None:
        launch = runner.launch

        def watched(plan: Any) -> Any:
            self.grouped += int(plan.group_start[-1])
            return launch(plan)

        runner.launch = watched


def _end(bird: Bird) -> tuple[int, str]:
    """How many tokens a sample makes, and why it ends."""
    most = bird.params.max_tokens
    assert most is not None
    for stop in bird.params.stop_token_ids or ():
        tokens = bird.canary.answer(most)
        if stop in tokens:
            return tokens.index(stop) + 1, "stop"
    return most, "length"


def _bird(rng: random.Random, headers: list[list[int]], leaving: float) -> Bird:
    one = canary(rng, rng.choice(headers))
    asks: dict[str, Any] = rng.choice(
        [
            {"temperature": 0},
            {"temperature": 1},
            {"temperature": 1, "top_p": 0.9},
            {"temperature": 0.7, "top_k": 5, "min_p": 0.01},
            {"temperature": 1, "logprobs": 2},
            {"temperature": 0, "frequency_penalty": 0.1, "presence_penalty": 0.3},
            {"temperature": 1, "stop_token_ids": [rng.choice(one.cycle)]},
        ]
    )
    params = SamplingParams(
        **asks,
        n=rng.choice([1, 1, 1, 2, 4]),
        max_tokens=rng.choice([1, 2, 15, 16, 17, 40, 90, 150]),
        detokenize=False,
    )
    return Bird(
        one, params, rng.random() < 0.5, rng.randrange(200) if rng.random() < leaving else None
    )

"""The works that shapes are measured by: what is asked of an engine, how much of it, and what was aimed at.

A work is the same through `LLM` and over HTTP. It knows prompts and sampling; no engine and no clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.demo import problems_file, shots_file
from penstock.errors import UsageError
from penstock.jobs.problems import load_problems
from penstock.jobs.prompts import draw_shots, make_prompt
from penstock.jobs.shapes_model import Shape, shape_named
from penstock.request import SamplingParams

SEED = 42
SHOTS = 4
WAYS = ("llm", "http")
STOP_SHARE = 1 / 128
STOP = "<a pair of letters>"  # which one depends on the tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure must be and is meant to be on an H200. figure: the result's key."""

    figure: str
    must: float
    aim: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """count prompts: of `length` random ids each, or (length 0) problems with their shots, as text; n samples of each.

    big: on the family's larger model.   groups: False has the engine attend no prefix together.
    ways: through `LLM` in the process, or over HTTP.   stream: over HTTP as server-sent events.
    against: the work that this one is a variant of.   profile_rows, profile_after: when a step is steady: the share of
    the rows that run, and how many such steps have gone by.
    """

    name: str
    count: int
    n: int = 1
    length: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    big: bool = False
    groups: bool = True
    ways: tuple[str, ...] = WAYS
    stream: bool = False
    against: str | None = None
    profile_rows: float = 0.9
    profile_after: int = 8
    profile_steps: int = 8
    targets: dict[str, Target] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int:
        return int(self.sampling["max_tokens"])

    def smaller(self) -> Work:
        """The same in small, to warm an engine up: few samples of few tokens."""
        short = min(8, self.max_tokens)
        few = {**self.sampling, "max_tokens": short}
        names = self.__dataclass_fields__
        kept = {name: getattr(self, name) for name in names}
        return Work(**{**kept, "count": min(4, self.count), "n": min(16, self.n), "sampling": few})


@dataclass(frozen=True, slots=True)
class Family:
    """What `--shape` stands for: the model of most works, the larger one of some, and how much is asked of them."""

    shape: Shape
    big: Shape
    works: tuple[Work, ...]

    def shape_of(self, work: Work) -> Shape:
        return self.big if work.big else self.shape


def family(name: str) -> Family:
    """Raises UsageError for a shape that there isn't."""
    shape = shape_named(name)
    big = shape_named("llama-3-8b") if name == "llama-3.2-1b" else shape
    works = _works(2, 8, 48, 6, (6, 12), (40, 6), (5, 64), (4, 8)) if name == "tiny" else _works(
        16, 1024, 1024, 1000, (128, 1024), (1024, 128), (128, 256), (128, 256)
    )  # fmt: skip
    return Family(shape, big, works)


def chosen(works: Sequence[Work], names: Sequence[str]) -> list[Work]:
    """The works of these names in the order in which they run; `all` is all. Raises UsageError."""
    known = {work.name: work for work in works}
    for name in names:
        if name not in known and name != "all":
            raise UsageError(f"there is no work {name!r}: there are all, {', '.join(known)}", param="work")
    return [work for work in works if "all" in names or work.name in names]


def _works(
    problems: int, n: int, longest: int, at_once: int, out: tuple[int, int], into: tuple[int, int],
    alone: tuple[int, int], big: tuple[int, int],
) -> tuple[Work, ...]:  # fmt: skip
    """The list; pairs are (prompt ids, output tokens)."""
    monkeys = {"temperature": 0.6, "max_tokens": longest, "stop": ["Question:"]}

    def variant(name: str, targets: dict[str, Target], *, groups: bool = True, **more: Any) -> Work:
        return Work(
            name=name, count=problems, n=n, sampling={**monkeys, **more}, groups=groups,
            against="monkeys" if name != "monkeys" else None, targets=targets,
        )  # fmt: skip

    def ids(name: str, count: int, sizes: tuple[int, int], **more: Any) -> Work:
        sampling = {"max_tokens": sizes[1], "ignore_eos": True}
        return Work(name=name, count=count, length=sizes[0], sampling=sampling, stream=True, **more)

    rate = "output_tokens_per_second"
    return (
        variant("monkeys", {"http": Target(rate, 110e3, 135e3)}),
        ids("128-1024", at_once, out, profile_after=40, targets={"llm": Target(rate, 60e3, 72e3)}),
        ids(
            "1024-128", at_once, into, profile_rows=0.0, profile_after=20,
            targets={"llm": Target("requests_per_second", 130, 155)},
        ),
        ids("one", 1, alone, profile_steps=40, targets={"llm": Target(rate, 800, 1100)}),
        variant("monkeys-top-p", {"http": Target(rate, 90e3, 115e3)}, top_p=0.95),
        variant("monkeys-logprobs", {"http": Target("percent_lost", 5, 2)}, logprobs=0),  # the chosen token's
        variant("monkeys-stops", {"llm": Target("thrown_away_percent", 3, 3)}, stop=[STOP], ignore_eos=True),
        variant("monkeys-alone", {"http": Target(rate, 60e3, 75e3)}, groups=False),
        ids("big", problems * 8, big, big=True, targets={"llm": Target(rate, 11e3, 13.5e3)}),
        Work(
            name="start-up", count=1, length=8, sampling={"max_tokens": 1}, ways=("llm",),
            targets={"llm": Target("warm_seconds", 20, 8)},
        ),
    )  # fmt: skip


# --- what is asked


def prompts_of(work: Work, shape: Shape, problems: str | None, shots: str | None, salt: str) -> list[Any]:
    """The prompts of a work: lists of ids, or texts. Another salt draws other ids, so that nothing is cached."""
    if work.length:
        return id_prompts(work.count, work.length, shape.vocab, f"{work.name}/{salt}")
    return problem_prompts(work.count, problems, shots)


def id_prompts(count: int, length: int, vocab: int, salt: str) -> list[list[int]]:
    draw = random.Random(f"{SEED}/{salt}")
    return [[draw.randrange(vocab) for _ in range(length)] for _ in range(count)]


def problem_prompts(count: int, problems: str | None, shots: str | None) -> list[str]:
    """The first problems of the file, four shots before each; without files the demo's. Raises UsageError."""
    asked = load_problems(problems or str(problems_file()), "test")
    pool = load_problems(shots, "train") if shots else asked if problems else load_problems(str(shots_file()), "train")
    if len(asked) < count:
        raise UsageError(f"{problems} holds {len(asked)} problems, the work asks {count}: give more", param="problems")
    return [make_prompt(p.question, draw_shots(pool, p.question, SHOTS, SEED, p.index)) for p in asked[:count]]


def params_of(work: Work, stop: str) -> SamplingParams:
    """`stop`: the pair of letters for works that end by a stop string. Prompts of ids get ids back, no text."""
    sampling = dict(work.sampling)
    if sampling.get("stop") == [STOP]:
        sampling["stop"] = [stop]
    return SamplingParams(n=work.n, detokenize=not work.length, **sampling)


def body_of(work: Work, model: str, prompt: Any, stop: str) -> dict[str, Any]:
    """The body of /v1/completions; every field is vLLM's too."""
    body = {"model": model, "prompt": prompt, "n": work.n, **work.sampling}
    if body.get("stop") == [STOP]:
        body["stop"] = [stop]
    if work.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body

"""Timed runs of a workload through an engine. A model is opened once, and engines with different
option values take turns on it.

Knows engines and clocks; `decide.py` draws conclusions from the figures.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from penstock.artifact.manifest import Value
from penstock.build.work_sample import WorkSample
from penstock.config import BLOCK_SIZE, Config
from penstock.engine.build_engine import engine_over, open_model
from penstock.engine.engine import Engine
from penstock.engine.roofline import RooflineGauge, limit_seconds
from penstock.errors import EngineError, UsageError
from penstock.execute.runner import TorchRunner
from penstock.request import Request, SamplingParams
from penstock.schedule.deltas import GOES_ON
from penstock.schedule.step import StepPlan


@dataclass(slots=True, frozen=True)
class Timing:
    """The timing of workloads that ran one after the other."""

    seconds: float
    output_tokens: int
    requests: int
    latency: float  # median seconds of a request
    least_seconds: float | None  # shortest possible time on this device by its data sheet


class OpenModel:
    """An opened model. Used as `with OpenModel(config, folder) as model`, then `model.run(works,
    {option: value})`."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.runner = config, open_model(config, folder)

    def __enter__(self) -> OpenModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.runner.close()
        give_back()

    def run(self, works: Sequence[WorkSample], knobs: Mapping[str, Value] | None = None) -> Timing:
        """Runs workloads with these scheduling options in place of the config's. The prefix cache
        starts empty."""
        told: dict[str, Any] = {
            name: getattr(place, name) for name, place in self.config.places().items()
        }
        # the model and its kernels have been opened before
        engine = engine_over(self.runner, Config.of(**{**told, **(knobs or {})}))
        return _sum([_timed(engine, self.runner, work) for work in works])

    def look(self, work: WorkSample) -> WorkSample:
        """Runs a workload whose answers end by themselves; returns it with their measured
        lengths."""
        drawn, counts = self.answers(work), [params.get("n", 1) for params in work.sampling]
        firsts = np.cumsum([0, *counts[:-1]])
        outputs = [
            max(1, round(statistics.fmean(len(answer) for answer in drawn[first : first + count])))
            for first, count in zip(firsts, counts, strict=True)
        ]
        return replace(work, outputs=outputs, ends=False)

    def answers(
        self, work: WorkSample, tell: Callable[[int], None] = lambda tokens: None
    ) -> list[list[int]]:
        """Returns the tokens of every sample, one prompt's samples after the other. tell: called
        with the number of new tokens, for progress. An answer that ends early counts with its full
        planned length, so that the counts add up to the plan.
        """
        counts = [params.get("n", 1) for params in work.sampling]
        firsts = np.cumsum([0, *counts])
        found: list[list[int]] = [[] for _ in range(work.samples)]
        for request, sample, tokens, ended in _turn(engine_over(self.runner, self.config), work):
            answer = found[int(firsts[request]) + sample]
            answer += tokens
            tell(len(tokens) + (work.outputs[request] - len(answer) if ended else 0))
        return found


def give_back() -> None:
    """Returns torch's unused memory to the device, since the next engine sizes its KV cache by the
    free bytes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _WholeWork(RooflineGauge):
    """A RooflineGauge over all steps of a run, instead of the last second's."""

    def launching(self, plan: StepPlan) -> None:
        self._steps.note(plan)

    def read(self) -> None:
        """Does nothing: the steps are summed at the end of the run."""

    def least_seconds(self) -> float:
        return limit_seconds(self._steps.columns(), self._sizes, self._machine)


def in_time(
    model: OpenModel, works: list[WorkSample], room: float, tell: Callable[[str], None]
) -> list[WorkSample]:
    """Returns the workloads, cut so that they take about `room` seconds together: with shorter
    answers, and with fewer prompts if prompts alone take too long. Runs everything once to measure.
    tell: called with a text about the cut.
    """
    short = [work.cut(0.0, 2) for work in works]
    model.run(short)  # a warm-up run, which is not timed
    prompts, whole = model.run(short).seconds, model.run(works).seconds
    if whole <= room:
        return works
    if room <= 2 * prompts:
        share = room / (2 * prompts)
        tell(
            f"timed runs are of {share:.1%} of the prompts, with short answers: all would take"
            " longer than there is"
        )
        return [work.fewer(share).cut(prompts / max(whole - prompts, prompts)) for work in works]
    share = (room - prompts) / (whole - prompts)
    tell(
        f"answers are cut to {share:.0%} of their length in timed runs: all would take longer than"
        " there is"
    )
    return [work.cut(share) for work in works]


def kv_tokens_of(works: Sequence[WorkSample], config: Config) -> int:
    """Returns the tokens of KV cache that an engine needs for the largest workload. Engines get no
    more, so that two fit beside each other."""
    most = max(work.tokens * min(1.0, work.concurrency / work.samples) for work in works)
    longest = config.memory.max_model_len or longest_of(works)
    return -(-int(max(most, longest)) // BLOCK_SIZE) * BLOCK_SIZE


def longest_of(works: Sequence[WorkSample]) -> int:
    """Returns the context length that the workloads need: tokens of the longest prompt with its
    answer, plus one."""
    return (
        max(
            len(p) + out
            for work in works
            for p, out in zip(work.prompts, work.outputs, strict=True)
        )
        + 1
    )


def _timed(engine: Engine, runner: TorchRunner, work: WorkSample) -> Timing:
    limit = None
    if runner.rated is not None:
        limit = engine.limit = _WholeWork(runner.model_sizes, runner.rated)
    begun = time.perf_counter()
    ends: dict[int, float] = {}
    tokens = 0
    for request, _, drawn, ended in _turn(engine, work):
        tokens += len(drawn)
        if ended:
            ends[request] = time.perf_counter() - begun
    seconds = time.perf_counter() - begun
    least = None if limit is None else limit.least_seconds()
    return Timing(seconds, tokens, len(work.prompts), statistics.median(ends.values()), least)


def _turn(engine: Engine, work: WorkSample) -> Iterator[tuple[int, int, list[int], bool]]:
    """Runs a workload; yields (prompt index, sample index, new tokens, True if the sample ended) as
    steps are read."""
    places = zip(work.prompts, work.sampling, work.outputs, strict=True)
    for place, (prompt, params, out) in enumerate(places):
        sampling = SamplingParams(
            **params, max_tokens=out, ignore_eos=not work.ends, detokenize=False
        )
        refused = engine.submit(
            Request(
                request_id=place, prompt=np.array(prompt, np.int32).tobytes(), sampling=sampling
            )
        )
        if refused is not None:
            raise UsageError(
                f"prompt {place} of {work.told} cannot run: {refused.error.message}",
                param=refused.error.param,
            )
    while engine.has_work:
        news = engine.step()
        if news is None:
            continue
        for i in range(news.count):
            ended = int(news.finish[i]) != GOES_ON
            drawn = news.tokens[news.start[i] : news.start[i + 1]].tolist()
            yield int(news.request[i]), int(news.sample[i]), drawn, ended


def _sum(timings: Sequence[Timing]) -> Timing:
    if not timings:
        raise EngineError("a trial without works")
    least = [timing.least_seconds for timing in timings if timing.least_seconds is not None]
    return Timing(
        seconds=sum(timing.seconds for timing in timings),
        output_tokens=sum(timing.output_tokens for timing in timings),
        requests=sum(timing.requests for timing in timings),
        latency=statistics.fmean(timing.latency for timing in timings),
        least_seconds=sum(least) if len(least) == len(timings) else None,
    )

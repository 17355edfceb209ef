"""Tunes the engine's options by timed runs. Each run is the whole workload. Runs with a candidate
value alternate with runs with the default. At the end the expected throughput is measured.

    learn how long answers are -> cut runs to the available time -> one knob after the other ->
    steps' seconds -> all choices against all defaults: if they are no faster, the defaults stay

Joins timed runs (trial.py), decisions (decide.py) and a clock. Each option is tried with the values
already chosen for the options before it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.artifact.describe import describe_decision, describe_work
from penstock.artifact.manifest import Decision, ExpectedWork, StepSeconds, Value, name_of
from penstock.build.build_state import Result
from penstock.build.decide import REPEATS, decide, measure, middle, noise_percent
from penstock.build.options import BuildOptions
from penstock.build.trial import OpenModel, Timing, in_time, kv_tokens_of
from penstock.build.tune_kernels import tune_kernels
from penstock.build.work_sample import WorkSample
from penstock.config import Config
from penstock.errors import CapacityError
from penstock.execute.kv_dtype import reads_eight_bits
from penstock.execute.open_runner import find_device, find_ops
from penstock.execute.padding import GRAPH_ROWS, padded
from penstock.execute.step_table import steps_like, time_steps
from penstock.models.read_config import read_model_config
from penstock.row_table import MOST_SPECULATIVE_TOKENS
from penstock.speculative import SpeculativeConfig, with_counts

# shares of the tuning time: for kernel parameters, for the table of step seconds, for the last
# comparison
KERNELS_SHARE, TABLE_SHARE, LAST_SHARE = (0.2, 0.1, 0.2)
RUNS = 16  # assumed number of runs in a round over all options; runs are shortened to fit the time
# options that can change while a model is open
DRAFTS = "speculative_config"
SCHEDULING = frozenset({"max_num_batched_tokens", "steps_ahead", "prefix_groups", DRAFTS})
# most drafts of a row that are tried, beside the option's default; the last one is the most that
# there may be
DRAFT_COUNTS = (1, 2, 3, 6, MOST_SPECULATIVE_TOKENS)


Run = Callable[[Sequence[WorkSample]], Timing]


class Choices(NamedTuple):
    """Option values and kernel parameters (tunables) of one engine, where two engines are
    compared."""

    knobs: dict[str, Value]
    tunables: dict[str, Value]


class Tuned(msgspec.Struct):
    """The result of tuning. works: the workloads, with the measured lengths of their answers."""

    decisions: list[Decision]
    engine: dict[str, Value]
    tunables: dict[str, Value]
    expected: list[ExpectedWork]
    step_seconds: StepSeconds
    works: list[WorkSample]


def tune(
    options: dict[str, Any], works: list[dict[str, Any]], coarse_kv: str | None = None
) -> Result:
    """Tunes the engine of the model folder `out`. coarse_kv: the reason why keys and values must
    stay unquantized; None: 8 bits may be tried. Runs in a stage process."""
    asked = msgspec.convert(options, BuildOptions)
    tuner = Tuner(asked, msgspec.convert(works, list[WorkSample]), coarse_kv)
    told: dict[str, Any] = msgspec.to_builtins(tuner.run())
    return told


class Tuner:
    """Tunes one built engine. coarse_kv: the reason why an 8-bit KV cache is not tried; None: it
    is. clock: returns seconds."""

    def __init__(
        self,
        options: BuildOptions,
        works: list[WorkSample],
        coarse_kv: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._works, self._coarse_kv, self._clock = options, works, coarse_kv, clock
        self._folder = Path(options.out)
        self._seconds = 60.0 * options.tune_minutes
        self._end = 0.0  # time on `clock` at which tuning of options ends
        self._chosen: dict[str, Value] = {}  # option -> value chosen so far
        self._tunables: dict[str, Value] = {}
        self._decisions: list[Decision] = []
        # values of speculative_config to try, the user's first; [] if its drafts are not tuned
        self._drafts: list[Value] = []
        if (text := self._options.config().schedule.speculative_config) is not None:
            counts = with_counts(text, DRAFT_COUNTS)
            self._drafts = [text, *counts] if counts else []
        self._more = options.objective != "latency"
        self._unit = "output tok/s" if self._more else "ms a request"

    def run(self) -> Tuned:
        """Tries the options one after the other and keeps the winners. Without any time all
        defaults stay."""
        if not self._seconds:
            if any(work.ends for work in self._works):
                with OpenModel(self._config(), self._folder) as model:
                    self._look(model)
            self._choose_graphs()
            return Tuned(self._decisions, self._chosen, {}, [], StepSeconds(), self._works)
        kernels = self._seconds * KERNELS_SHARE
        if self._config().parallel.tensor_parallel_size > 1:
            _say(
                "kernels' cuts are left at their defaults: they are timed on a whole model, and"
                " ranks have shares"
            )
        else:
            self._decisions += tune_kernels(
                self._config(), self._folder, self._works, self._clock() + kernels, _tell
            )
        self._tunables = {
            each.name: each.chosen for each in self._decisions if each.chosen != each.default
        }
        with OpenModel(self._config(), self._folder) as model:
            self._look(model)
            runs = in_time(model, self._works, self._seconds / (RUNS * REPEATS), _say)
            self._end = self._clock() + self._seconds * (
                1.0 - KERNELS_SHARE - TABLE_SHARE - LAST_SHARE
            )
            waiting, reopened = self._scheduling(model), self._reopening()
            for place, (name, candidates) in enumerate(waiting):
                share = (self._end - self._clock()) / (len(waiting) + len(reopened) - place)
                self._try(name, candidates, share, partial(self._timed, model, runs, name))
            steps = [
                step for work in self._works for step in steps_like(work.facts(), model.runner)
            ]
            unspent = 0.0 if reopened else max(0.0, self._end - self._clock())
            table = time_steps(model.runner, steps, self._seconds * TABLE_SHARE + unspent)
        for place, (name, value) in enumerate(reopened):
            self._try_reopened(
                name, value, runs, (self._end - self._clock()) / (len(reopened) - place)
            )
        expected = self._compare(runs)
        self._choose_graphs()
        return Tuned(self._decisions, self._chosen, self._tunables, expected, table, self._works)

    def _look(self, model: OpenModel) -> None:
        """Measures the lengths of answers that end by themselves."""
        for place, work in enumerate(self._works):
            if work.ends:
                self._works[place] = model.look(work)
                _say(describe_work(self._works[place].facts()))

    # --- options that can change while a model is open

    def _scheduling(self, model: OpenModel) -> list[tuple[str, list[Value]]]:
        """Returns the options that can change while a model is open, each with its candidate
        values, default first."""
        tokens, rows = (
            model.runner.max_batched_tokens,
            max(work.concurrency for work in self._works),
        )
        fewer: list[Value] = [
            n for n in (tokens // 2, tokens // 4, tokens // 8) if n >= max(rows, 256)
        ]
        wanted: list[tuple[str, list[Value]]] = [
            ("max_num_batched_tokens", [None, *fewer]),
            ("steps_ahead", [1, 0, 2]),
        ]
        if any(work.facts().shares for work in self._works) and model.runner.grouping:
            wanted.append(("prefix_groups", ["auto", "always", "off"]))
        return [(DRAFTS, self._drafts)] * bool(self._drafts) + [
            (name, values)
            for name, values in wanted
            if name not in self._options.named and len(values) > 1
        ]

    def _try(
        self, name: str, candidates: list[Value], share: float, run: Callable[[Value], Timing]
    ) -> None:
        """Times an option's values and keeps the best. share: seconds that this may take."""
        measured = measure(
            candidates, lambda value: self._figure([run(value)]), self._clock() + share, self._clock
        )
        self._take(decide(name, candidates, measured, self._unit, more=self._more))

    def _take(self, decision: Decision) -> None:
        self._decisions.append(decision)
        if decision.chosen != decision.default:
            self._chosen[decision.name] = decision.chosen
        _tell(decision)

    def _timed(self, model: OpenModel, runs: list[WorkSample], name: str, value: Value) -> Timing:
        return model.run(runs, self._scheduled({**self._chosen, name: value}))

    def _scheduled(self, knobs: dict[str, Value]) -> dict[str, Value]:
        """Returns the options for a run on a model that is opened for the most drafts."""
        return {DRAFTS: self._drafts[0], **knobs} if self._drafts else knobs

    def _most_drafts(self) -> Value:
        """Returns the value of speculative_config that a model is opened with: of those that are
        tried, and then of the chosen one and the default, the one with the most drafts."""
        decided = [each for each in self._decisions if each.name == DRAFTS]
        tried = [decided[0].default, decided[0].chosen] if decided else self._drafts
        return max(tried, key=lambda text: SpeculativeConfig.of(str(text)).num_speculative_tokens)

    def _figure(self, timings: Sequence[Timing]) -> float:
        if self._more:
            return sum(each.output_tokens for each in timings) / sum(
                each.seconds for each in timings
            )
        return 1e3 * sum(each.latency for each in timings) / len(timings)

    # --- options for which a model must be opened again

    def _reopening(self) -> list[tuple[str, Value]]:
        """Returns the options for which the model must be opened again, each with the one value to
        try."""
        device = find_device(self._config().model.device)
        if device.type == "cpu":
            # nothing to try on a CPU: it has no CUDA graphs, and an 8-bit KV cache is slower there
            # (docs/design/eight_bits.md)
            return []
        rows = padded(max(work.concurrency for work in self._works))
        wanted: list[tuple[str, Value]] = [("max_num_seqs", rows)]
        if self._coarse_kv is not None:
            self._take(
                Decision(name="kv_cache_dtype", chosen="auto", default="auto", note=self._coarse_kv)
            )
        elif reads_eight_bits(device, find_ops(self._config())) and not self._options.retune:
            wanted.append(("kv_cache_dtype", "fp8"))
        return [each for each in wanted if each[0] not in self._options.named]

    def _try_reopened(self, name: str, value: Value, runs: list[WorkSample], share: float) -> None:
        candidates: list[Value] = [getattr(Config().places()[name], name), value]
        sides = [Choices({**self._chosen, name: each}, self._tunables) for each in candidates]
        try:
            with self._beside(runs, sides) as engines:
                by_value = dict(zip(candidates, engines, strict=True))
                self._try(name, candidates, share, lambda each: by_value[each](runs))
        except CapacityError as error:
            self._take(
                decide(
                    name, candidates, {}, self._unit, more=self._more, note=f"not timed: {error}"
                )
            )

    @contextmanager
    def _beside(self, runs: list[WorkSample], sides: Sequence[Choices]) -> Iterator[list[Run]]:
        """Opens an engine for each of these choices, and warms them up. Choices that differ only in
        scheduling share one model; others have a model each, with no more KV cache than the runs
        need. Raises CapacityError when they do not fit.
        """
        own = [(_without(side.knobs, SCHEDULING), side.tunables) for side in sides]
        with ExitStack() as opened:
            models: list[OpenModel] = []
            for place, (knobs, tunables) in enumerate(own):
                if own[place] in own[:place]:
                    models.append(models[own.index(own[place])])
                    continue
                config = self._config(tunables, **knobs)
                if any(other != own[0] for other in own):
                    config.memory.kv_cache_tokens = max(
                        kv_tokens_of(runs, config), self._context(config)
                    )
                models.append(opened.enter_context(OpenModel(config, self._folder)))
                models[-1].run([runs[0].cut(0.0, 2)])
            scheduling = [
                self._scheduled(_without(side.knobs, side.knobs.keys() - SCHEDULING))
                for side in sides
            ]
            yield [
                partial(model.run, knobs=each)
                for model, each in zip(models, scheduling, strict=True)
            ]

    def _context(self, config: Config) -> int:
        return config.memory.max_model_len or read_model_config(self._folder).context

    def _choose_graphs(self) -> None:
        """Sets max_cudagraph_capture_size to the workload's rows, so that no CUDA graphs of larger
        steps are captured at start."""
        name, rows = (
            "max_cudagraph_capture_size",
            padded(max(work.concurrency for work in self._works)),
        )
        gpu = find_device(self._config().model.device).type == "cuda"
        if gpu and rows < GRAPH_ROWS and name not in self._options.named:
            note = (
                "the most rows of the work: a shorter start, and steps of more rows are padded"
                " further"
            )
            self._take(Decision(name=name, chosen=rows, default=None, note=note))

    # --- all chosen options against the defaults

    def _compare(self, runs: list[WorkSample]) -> list[ExpectedWork]:
        """Runs each workload with all chosen values and with the defaults; reverts to the defaults
        if the chosen values are no faster. Returns the expected results."""
        both = [Choices(self._chosen, self._tunables), Choices({}, {})]
        both = both if both[0] != both[1] else both[:1]
        sides = []
        try:
            with self._beside(runs, both) as engines:
                sides = self._rounds(runs, engines)
        except CapacityError:
            # the two engines do not fit beside each other: run one after the other, although a
            # change of the machine's clock rate then affects the comparison
            for each in both:
                with self._beside(runs, [each]) as engines:
                    sides += self._rounds(runs, engines)
        best = (
            self._settle(*([self._figure(each) for each in side] for side in sides))
            if len(both) > 1
            else 0
        )
        rounds = sides[best] if runs is self._works else self._whole_runs()
        return [
            self._expect(work, [each[place] for each in rounds])
            for place, work in enumerate(self._works)
        ]

    def _whole_runs(self) -> list[list[Timing]]:
        """Runs the uncut workloads with the chosen values: REPEATS times, or fewer if time is
        short, but at least once."""
        end, rounds = self._clock() + self._seconds * LAST_SHARE, list[list[Timing]]()
        with self._beside(self._works, [Choices(self._chosen, self._tunables)]) as (engine,):
            while not rounds or (len(rounds) < REPEATS and self._clock() < end):
                rounds.append([engine([work]) for work in self._works])
        return rounds

    def _rounds(self, runs: list[WorkSample], engines: Sequence[Run]) -> list[list[list[Timing]]]:
        """Runs the engines in turn; returns the timings by engine, round and workload."""
        sides: list[list[list[Timing]]] = [[] for _ in engines]
        for _ in range(REPEATS):
            for side, engine in zip(sides, engines, strict=True):
                side.append([engine([work]) for work in runs])
        return sides

    def _settle(self, chosen: list[float], default: list[float]) -> int:
        """Returns which values stay: 0 the chosen ones, 1 the defaults. A value that won three
        rounds by itself may have won by noise."""
        decision = decide(
            "all together",
            ["defaults", "chosen"],
            {"defaults": default, "chosen": chosen},
            self._unit,
            more=self._more,
        )
        faster = decision.chosen == "chosen"
        if not faster:
            self._chosen, self._tunables = {}, {}
            note = "was taken back: all choices together won by no more than the noise"
            self._decisions = [
                (
                    replace(
                        each,
                        chosen=each.default,
                        won_percent=0.0,
                        note=f"{name_of(each.chosen)} {note}",
                    )
                    if each.chosen != each.default
                    else each
                )
                for each in self._decisions
            ]
        self._decisions.append(decision)
        _tell(self._decisions[-1])
        return 0 if faster else 1

    def _expect(self, work: WorkSample, timings: Sequence[Timing]) -> ExpectedWork:
        rates = [each.output_tokens / each.seconds for each in timings]
        shares = [
            each.least_seconds / each.seconds for each in timings if each.least_seconds is not None
        ]
        return ExpectedWork(
            told=work.told,
            output_tokens_per_second=round(middle(rates), 1),
            noise_percent=round(noise_percent(rates), 2) if len(rates) > 1 else None,
            requests_per_second=round(
                middle([each.requests / each.seconds for each in timings]), 3
            ),
            request_ms=round(middle([1e3 * each.latency for each in timings]), 2),
            share_of_limit=round(middle(shares), 4) if shares else None,
        )

    def _config(self, tunables: Mapping[str, Value] | None = None, **knobs: Value) -> Config:
        """Returns a config with these options and kernel parameters, for enough drafts if their
        number is tuned. tunables None: the chosen parameters."""
        if self._drafts:
            knobs = {DRAFTS: self._most_drafts(), **knobs}
        config = self._options.config(str(self._folder), **knobs)
        config.tuned = dict(self._tunables if tunables is None else tunables)
        return config


def _without(knobs: Mapping[str, Value], names: Collection[str]) -> dict[str, Value]:
    return {name: value for name, value in knobs.items() if name not in names}


def _tell(decision: Decision) -> None:
    _say(describe_decision(decision))


def _say(line: str) -> None:
    print(f"penstock:   {line}", file=sys.stderr, flush=True)

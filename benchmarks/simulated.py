"""Compares the simulator with the engine: measures a table of steps, runs works, and simulates
them.

    python benchmarks/simulated.py                         # the demo model on the CPU, small
    python benchmarks/simulated.py --shape llama-3.2-1b --full --out DIR     # works for a GPU
    python benchmarks/simulated.py --shape llama-3.2-1b --full --dp 2
                                                           # jobs on two GPUs, by LLM

The works go through the engine in this process, without text or HTTP; the simulation uses the
lengths that the samples had. A row a work: output tokens a second, the median request's seconds,
and for arriving requests the first token's, measured and simulated. Asserts nothing. On a busy
machine use OMP_NUM_THREADS=1 and --cpu-clock, which counts this process's CPU seconds and skips
waits for arrivals.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from knobs import read_knob
from random_model import SHAPES, load_format, write_model

from penstock.config import Config
from penstock.demo import model_folder, problems_file, shots_file
from penstock.engine.build_engine import build_engine
from penstock.engine.engine import Engine
from penstock.jobs.problems import draw_shots, load_problems, make_prompt
from penstock.llm import LLM, Prompt
from penstock.request import Request, SamplingParams
from penstock.schedule.deltas import GOES_ON
from penstock.simulate.asked_load import AskedLoad
from penstock.simulate.fleet import Fleet
from penstock.simulate.measure_steps import measure_steps
from penstock.simulate.simulated_engine import SimulatedEngine, open_engine
from penstock.text.tokenizer import Tokenizer

AHEAD = 2  # samples in the engine, times its rows: as LLM.stream
SHARE = 0.8  # of what the mixed batch ran at, for requests that arrive
COLUMNS = ("out tok/s", "request p50, s", "first p50, s", "first p95, s")


@dataclass(slots=True)
class Work:
    """Requests: prompts with max_tokens each. ends: the model may end answers earlier. arrival:
    seconds; empty: a job."""

    name: str
    prompts: list[list[int]]
    limits: list[int]
    n: int = 1
    temperature: float = 1.0
    ends: bool = False
    arrival: list[float] = field(default_factory=list)

    def sampling(self, number: int) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            max_tokens=self.limits[number],
            ignore_eos=not self.ends,
            seed=number,
            detokenize=False,
        )


@dataclass(slots=True)
class Ran:
    """The result of a work. lengths: of each request's samples. Times are of requests, from the
    beginning."""

    seconds: float
    lengths: list[list[int]]
    came: list[float]
    first: list[float]
    end: list[float]

    def figures(self) -> tuple[float, ...]:
        """Returns the known ones of COLUMNS; a job's requests have to wait, so they have no
        first-token figures."""
        whole, first = (np.subtract(column, self.came) for column in (self.end, self.first))
        found = [(whole, 50), (first, 50), (first, 95)]
        known = [float(np.percentile(*of)) for of in found if not np.isnan(of[0]).any()]
        return sum(map(sum, self.lengths)) / self.seconds, *known


def drive(engine: Engine, work: Work, rows: int, clock: Callable[[], float]) -> Ran:
    """Runs a work through an engine."""
    count = len(work.prompts)
    ran = Ran(0.0, [], [0.0] * count, [], [np.nan] * count)
    # Whole columns: at 100,000 tokens a second a loop over events would be what is measured.
    first, lengths = np.full(count, np.nan), np.zeros(count * work.n, np.int64)
    left, given, room, arrives = [work.n] * count, 0, AHEAD * rows, bool(work.arrival)
    begun = clock()
    while given < count or engine.has_work:
        now = clock() - begun
        while given < count and (work.arrival[given] <= now if arrives else room > 0):
            ran.came[given] = work.arrival[given] if arrives else 0.0
            prompt = np.array(work.prompts[given], np.int32).tobytes()
            request = Request(
                request_id=given, prompt=prompt, sampling=work.sampling(given), stream=arrives
            )
            assert engine.submit(request) is None
            given, room = given + 1, room - work.n
        if not engine.has_work:
            if clock is time.process_time:
                begun -= work.arrival[given] - now
            else:
                time.sleep(min(1e-3, max(0.0, work.arrival[given] - now)))
            continue
        news = engine.step()
        now = clock() - begun
        if news is None or not news.count:
            continue
        # a sample stands here once
        lengths[news.request * work.n + news.sample] += np.diff(news.start)
        if arrives:
            first[news.request[np.isnan(first[news.request])]] = now
        for number in news.request[news.finish != GOES_ON].tolist():
            left[number], room = left[number] - 1, room + 1
            ran.end[number] = now if not left[number] else np.nan
    ran.seconds, ran.first, ran.lengths = (
        clock() - begun,
        first.tolist(),
        lengths.reshape(count, work.n).tolist(),
    )
    return ran


def drive_llm(llm: LLM, work: Work) -> Ran:
    """Runs a job through an LLM of several replicas; only its rate is known."""
    lengths: list[list[int]] = [[] for _ in work.prompts]
    begun = time.perf_counter()
    asked = (Prompt(key=k, prompt=p, params=work.sampling(k)) for k, p in enumerate(work.prompts))
    for finished in llm.stream(asked):
        assert finished.output is not None
        lengths[finished.key].append(len(finished.output.token_ids))
    nothing = [np.nan] * len(lengths)
    return Ran(time.perf_counter() - begun, lengths, [0.0] * len(lengths), nothing, nothing)


def simulated(engine: SimulatedEngine, work: Work, ran: Ran, replicas: int) -> tuple[float, ...]:
    """Returns the simulated figures of the same work, with its samples' measured lengths."""
    starts = np.cumsum([0, *map(len, ran.lengths)])
    nothing = np.zeros(len(work.prompts), np.int32)
    load = AskedLoad(
        arrival=np.array(ran.came),
        prompt=np.array([len(p) for p in work.prompts], np.int32),
        start=starts,
        output=np.array([length for each in ran.lengths for length in each], np.int32),
        limit=np.array(work.limits, np.int32) if work.ends else nothing,
        shared=nothing,
        header=nothing,
        at_once=not work.arrival,
    )
    fleet = Fleet(load, engine.limits, engine.costs, replicas, engine.steps_ahead)
    outcome = fleet.run()
    nan = np.full(len(load), np.nan)
    end, first = outcome.end if replicas == 1 else nan, outcome.first if work.arrival else nan
    return Ran(
        float(outcome.end.max()), ran.lengths, ran.came, first.tolist(), end.tolist()
    ).figures()


def works_of(folder: Path, vocabulary: int, args: argparse.Namespace) -> list[Work]:
    """Returns the jobs; the last one's rate sets the arrival rate."""
    draw, full = random.Random(0), args.full
    tokenizer = Tokenizer.load(folder)
    problems, pool = load_problems(args.problems, "test"), load_problems(args.shots, "train")
    asked = [
        make_prompt(p.question, draw_shots(pool, p.question, 4, 42, p.index))
        for p in problems[: 16 if full else 8]
    ]

    def ids(count: int, length: int) -> list[list[int]]:
        return [[draw.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]

    monkeys = Work(
        "monkeys",
        [tokenizer.encode(text) for text in asked],
        [1024 if full else 96] * len(asked),
        n=1024 if full else 48,
        temperature=0.6,
        ends=True,
    )
    if full:
        return [
            monkeys,
            Work("1024x128", ids(1000, 1024), [128] * 1000),
            Work("128x1024", ids(1000, 128), [1024] * 1000),
        ]
    lengths = [(draw.randrange(20, 300), draw.randrange(10, 120)) for _ in range(150)]
    mixed = Work(
        "mixed batch", [ids(1, into)[0] for into, _ in lengths], [out for _, out in lengths]
    )
    return [monkeys, mixed]


def arriving(work: Work, ran: Ran, seconds: float) -> Work:
    """Returns arriving requests of the work's kind, at SHARE of the rate at which it ran."""
    draw, rate = np.random.default_rng(1), SHARE * len(work.prompts) / ran.seconds
    count = int(rate * seconds)
    turn = [place % len(work.prompts) for place in range(count)]
    arrival = np.cumsum(draw.exponential(1 / rate, count)).tolist()
    # nothing is cached
    shuffled = [draw.permutation(work.prompts[place]).tolist() for place in turn]
    return Work(
        f"{SHARE:.0%} of its rate",
        shuffled,
        [work.limits[place] for place in turn],
        arrival=arrival,
    )


def print_row(name: str, measured: tuple[float, ...], told: tuple[float, ...]) -> dict[str, Any]:
    cells = [
        f"{a:10,.4g} {b:10,.4g} {100 * (b / a - 1):+6.1f} %"
        for a, b in zip(measured, told, strict=True)
    ]
    print(f"{name:16}" + "".join(f"{cell:>32}" for cell in cells), flush=True)
    return {"work": name, "measured": measured, "simulated": told}


def main() -> None:
    args, begun = _arguments(), time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        knobs: dict[str, Any] = {"device": args.device}
        folder = model_folder()
        if args.shape:
            folder = Path(temporary) / "model"
            write_model(SHAPES[args.shape], folder, args.tokenizer)
            knobs |= {
                "model": str(folder),
                "load_format": load_format(folder),
                "max_model_len": SHAPES[args.shape].max_model_len,
            }
        else:
            knobs |= {
                "max_num_seqs": 128,
                "max_num_batched_tokens": 512,
                "max_model_len": 1024,
                "kv_cache_tokens": 60_000,
            }
        knobs |= dict(args.knob)
        out = Path(args.out or temporary)
        out.mkdir(parents=True, exist_ok=True)
        table = args.table or out / "steps.json"
        if args.table is None:
            measure_steps(Config.of(**knobs), table, clock=args.clock)
        rows = run(knobs, open_engine(table, {}), folder, args)
        off = max(
            abs(told / real - 1)
            for row in rows
            for real, told in zip(row["measured"][:2], row["simulated"][:2], strict=True)
        )
        print(
            f"rates and middle times are off by {off:.1%} at most;"
            f" {time.perf_counter() - begun:.0f} s in all"
        )
        (out / "simulated.json").write_text(json.dumps(rows, indent=1))


def run(
    knobs: dict[str, Any], engine: SimulatedEngine, folder: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Prints and returns a row a work."""
    print(f"{'':16}" + "".join(f"{name + ': measured, simulated':>32}" for name in COLUMNS))
    rows = []
    if args.dp > 1:
        with LLM(**knobs, data_parallel_size=args.dp) as llm:
            works = works_of(folder, llm.facts.vocab_size, args)
            drive_llm(llm, smaller(works[-1]))
            for work in works:
                ran = drive_llm(llm, work)
                rows.append(
                    print_row(work.name, ran.figures(), simulated(engine, work, ran, args.dp))
                )
        return rows
    real, facts = build_engine(Config.of(**knobs))

    def once(work: Work) -> Ran:
        real.scheduler.reset_prefix_cache()  # a second time its prompts are new again
        return drive(real, work, facts.max_num_seqs, args.clock)

    try:
        works = works_of(folder, facts.vocab_size, args)
        once(smaller(works[0]))
        for work in works:
            ran = min((once(work) for _ in range(args.repeats)), key=lambda each: each.seconds)
            rows.append(print_row(work.name, ran.figures(), simulated(engine, work, ran, 1)))
        work = arriving(works[-1], ran, args.seconds)
        ran = once(work)
        rows.append(print_row(work.name, ran.figures(), simulated(engine, work, ran, 1)))
    finally:
        real.runner.close()
    return rows


def smaller(work: Work) -> Work:
    return Work(
        work.name, work.prompts[:4], [min(8, limit) for limit in work.limits[:4]], n=min(4, work.n)
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="random weights; left out: the demo model"
    )
    parser.add_argument("--tokenizer", type=Path, help="random_model's")
    parser.add_argument("--full", action="store_true", help="the works of a GPU")
    parser.add_argument(
        "--problems", default=str(problems_file()), help="as `penstock monkeys` takes them"
    )
    parser.add_argument("--shots", default=str(shots_file()), help="where their examples come from")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--table", type=Path, help="a table that was measured before")
    parser.add_argument("--seconds", type=float, default=30.0, help="for which requests arrive")
    parser.add_argument("--repeats", type=int, default=2, help="of each job: the fastest counts")
    parser.add_argument("--knob", action="append", default=[], type=read_knob, metavar="NAME=VALUE")
    parser.add_argument("--out")
    parser.add_argument("--cpu-clock", dest="clock", action="store_const", const=time.process_time)
    parser.set_defaults(clock=time.perf_counter)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Measures this machine's speed on models of named shapes with random weights, and the parts of a
step.

    python benchmarks/shapes.py --out DIR             # Llama-3.2-1B's shape, and 8B's for one work
    python benchmarks/shapes.py --out DIR --work monkeys --work one
                                                      # adds rows to results.json in DIR
    python benchmarks/shapes.py --out DIR --work big-one --knob quantization=fp8
                                --knob kv_cache_dtype=fp8
    python benchmarks/shapes.py --out DIR --shape tiny --knob device=cpu
                                                      # 0.3 M parameters, to try the script

Every work goes through the public `LLM`: small once, then timed, then again to profile a few steps.
Works of one engine share a process, because a kernel that faults ends its process.
docs/performance.md explains the columns. `penstock bench run` measures the same folder over HTTP
(scripts/edition.sh).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from knobs import read_knob
from random_model import SHAPES, Shape, load_format, write_model
from random_tokenizer import rare_pair
from router_weights import spread_experts
from step_limit import Machine, probe
from step_parts import PARTS, Profile, start_profiler
from step_watch import Watch

from penstock import SamplingParams
from penstock.demo import problems_file, shots_file
from penstock.engine.roofline import limit_seconds
from penstock.errors import PenstockError
from penstock.execute.open_runner import find_device, find_dtype
from penstock.jobs.problems import draw_shots, load_problems, make_prompt
from penstock.llm import LLM, Prompt

SEED, SHOTS = 42, 4
STOP = "<a pair of letters>"  # which one depends on the tokenizer
STOP_SHARE = 1 / 128
START_UP = "start-up"
# More works of the 8B shape: one request, few, many at once, and as many as fit. (prompt ids,
# output tokens)
BIG = (
    ("one", 1, (128, 256)),
    ("16", 16, (128, 256)),
    ("1000", 1000, (128, 1024)),
    ("1000-1000", 1500, (1000, 1000)),
    ("128-2048", 2000, (128, 2048)),
    ("128-128", 8000, (128, 128)),
)
# Samples of one prompt at once: (name, prompt ids, samples, whether the engine attends to the
# prompt together).
GROUPS = (("1024", 1024, 256, True), ("2000", 2000, 256, True), ("2000-alone", 2000, 256, False))
# (title, width, key, format)
COLUMNS = (
    ("out tok/s", 11, "output_tokens_per_second", ",.0f"),
    ("req/s", 8, "requests_per_second", ",.1f"),
    ("limit %", 9, "limit_percent", ".1f"),
    ("host ms", 9, "host_ms", ".2f"),
    ("thrown %", 10, "thrown_away_percent", ".2f"),
    ("peak MiB", 10, "peak_memory_mib", ",.0f"),
    ("s", 7, "seconds", ".1f"),
    ("ms a step", 11, "step_ms", ".3f"),
)
NAME, PART = 18, 13


# --- what is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Prompts and samples to run. count: number of prompts, of `length` random ids each, or (length
    0) of problems with their shots, as text; n samples of each.

    big: on the 8B shape. named: runs only if named. groups: False turns prefix groups off.
    profile_rows, profile_after: a step is steady when this share of the rows run and this many such
    steps have passed.
    """

    name: str
    count: int
    n: int = 1
    length: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    big: bool = False
    named: bool = False
    groups: bool = True
    profile_rows: float = 0.9
    profile_after: int = 8
    profile_steps: int = 8

    def smaller(self) -> Work:
        """Returns a small version, to warm an engine up: few samples of few tokens."""
        few = {**self.sampling, "max_tokens": min(8, self.sampling["max_tokens"])}
        return replace(self, count=min(4, self.count), n=min(16, self.n), sampling=few)


def works_of(shape: str) -> tuple[Work, ...]:
    """Returns the works for a shape; pairs are (prompt ids, output tokens)."""
    tiny = shape == "tiny"
    problems, n, longest, at_once = (2, 8, 48, 6) if tiny else (16, 1024, 1024, 1000)
    out, into, alone, big = (
        ((6, 12), (40, 6), (5, 64), (4, 8))
        if tiny
        else ((128, 1024), (1024, 128), (128, 256), (128, 256))
    )

    def monkeys(name: str, *, groups: bool = True, **more: Any) -> Work:
        sampling = {"temperature": 0.6, "max_tokens": longest, "stop": ["Question:"], **more}
        return Work(name=name, count=problems, n=n, sampling=sampling, groups=groups)

    def ids(name: str, count: int, sizes: tuple[int, int], **more: Any) -> Work:
        return Work(
            name=name,
            count=count,
            length=sizes[0],
            sampling={"max_tokens": sizes[1], "ignore_eos": True},
            **more,
        )

    return (
        monkeys("monkeys"),
        ids("128-1024", at_once, out, profile_after=40),
        ids("1024-128", at_once, into, profile_rows=0.0, profile_after=20),
        ids("one", 1, alone, profile_steps=40),
        monkeys("monkeys-top-p", top_p=0.95),
        monkeys("monkeys-logprobs", logprobs=0),  # the chosen token's
        monkeys("monkeys-stops", stop=[STOP], ignore_eos=True),
        monkeys("monkeys-alone", groups=False),
        ids("big", problems * 8, big, big=True),
        *(
            ids(
                f"groups-{name}",
                problems,
                (length, 128),
                n=n,
                groups=groups,
                named=True,
                profile_after=40,
            )
            for name, length, n, groups in GROUPS
        ),
        *(
            ids(f"big-{name}", 6 if tiny else count, out if tiny else sizes, big=True, named=True)
            for name, count, sizes in BIG
        ),
        ids(START_UP, 1, (8, 1)),
    )


def prompts_of(work: Work, vocab: int, options: argparse.Namespace, salt: str) -> list[Any]:
    """Returns a work's prompts: lists of ids, or texts. Another salt draws other ids, so that
    nothing is cached."""
    if work.length:
        draw = random.Random(f"{SEED}/{work.name}/{salt}")
        return [[draw.randrange(vocab) for _ in range(work.length)] for _ in range(work.count)]
    asked = load_problems(options.problems or str(problems_file()), "test")
    shots = options.shots or (None if options.problems else str(shots_file()))
    pool = load_problems(shots, "train") if shots else asked
    if len(asked) < work.count:
        raise SystemExit(
            f"{options.problems} holds {len(asked)} problems, {work.name} asks {work.count}"
        )
    return [
        make_prompt(p.question, draw_shots(pool, p.question, SHOTS, SEED, p.index))
        for p in asked[: work.count]
    ]


def params_of(work: Work, stop: str) -> SamplingParams:
    """Returns a work's parameters. stop:
    the pair of letters for works that end by a stop string."""
    sampling = dict(work.sampling)
    if sampling.get("stop") == [STOP]:
        sampling["stop"] = [stop]
    return SamplingParams(n=work.n, detokenize=not work.length, **sampling)


# --- in a process of its own


class Bench:
    """An open LLM, and the instruments to measure its works."""

    def __init__(
        self, llm: LLM, shape: Shape, machine: Machine, options: argparse.Namespace
    ) -> None:
        self.sizes = llm.engine.runner.model_sizes
        self.llm, self.shape, self.machine, self.options = llm, shape, machine, options
        self.cuda = machine.device == "cuda"
        self.stop = rare_pair(llm.get_tokenizer().token_bytes, STOP_SHARE)
        self.watch = llm.engine.runner = Watch(llm.engine.runner)
        if options.profile:
            start_profiler(self.cuda).stop()  # the first start takes seconds

    def run(self, work: Work) -> dict[str, Any]:
        """Returns a work's figures."""
        self.draw(work.smaller(), "warm")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        before = self.llm.stats()["generation_tokens"]
        seconds, samples, tokens = self.draw(
            work, "run", deadline=time.monotonic() + self.options.seconds
        )
        cut, steps, waited = self.watch.cut, self.watch.steps, self.watch.waited
        tokens = int(self.llm.stats()["generation_tokens"] - before) if cut else tokens
        computed = int(steps.columns()["rows"].sum())
        row = {
            "shape": self.shape.name,
            "cut": cut,
            "seconds": seconds,
            "output_tokens": tokens,
            "steps": len(steps),
            "output_tokens_per_second": tokens / seconds,
            "requests_per_second": samples / work.n / seconds,
            "thrown_away_percent": None
            if cut or not computed
            else 100.0 * (computed - tokens) / computed,
            "host_ms": 1e3 * (seconds - waited) / len(steps) if len(steps) else None,
            "limit_percent": self.share_of_limit(seconds),
            "peak_memory_mib": self.peak(),
        }
        return row | (self.profile(work) if self.options.profile else {})

    def share_of_limit(self, seconds: float) -> float:
        """Returns the least possible time over the measured time, in percent."""
        return 100.0 * limit_seconds(self.watch.steps.columns(), self.sizes, self.machine) / seconds

    def draw(self, work: Work, salt: str, **limits: Any) -> tuple[float, int, int]:
        """Runs a work once, until its end or until the watch interrupts it. Returns seconds,
        samples that ended, and their tokens."""
        params, samples, tokens = params_of(work, self.stop), 0, 0
        listed = prompts_of(work, self.shape.vocab, self.options, salt)
        self.watch.begin(**limits)
        begin = time.monotonic()
        try:
            for finished in self.llm.stream(
                Prompt(key=k, prompt=p, params=params) for k, p in enumerate(listed)
            ):
                if finished.output is None or finished.error is not None:
                    raise SystemExit(
                        f"{work.name}: prompt {finished.key} gave no sample: {finished.error}"
                    )
                samples += 1
                tokens += len(finished.output.token_ids)
        except KeyboardInterrupt:
            if not self.watch.cut:
                raise
        return time.monotonic() - begin, samples, tokens

    def profile(self, work: Work) -> dict[str, Any]:
        rows = int(work.profile_rows * min(work.count * work.n, self.llm.facts.max_num_seqs))
        window = Profile(
            rows=rows, after=work.profile_after, steps=work.profile_steps, cuda=self.cuda
        )
        self.draw(work, "profile", window=window, deadline=time.monotonic() + self.options.seconds)
        return window.parts()

    def peak(self) -> float:
        """Returns the peak memory of this process in MiB: of the GPU during the work, of the
        machine since its start."""
        most = (
            torch.cuda.max_memory_reserved() / 1024
            if self.cuda
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )
        return most / 1024


def run_session(
    works: list[Work], knobs: dict[str, Any], shape: Shape, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs the works of one engine; returns name -> figures, or the error."""
    # a shell's background job is started deaf to it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows: dict[str, Any] = {}
    try:
        device = find_device(knobs.get("device", "auto"))
        # while the memory is free
        machine = probe(shape, device, find_dtype(knobs.get("dtype", "auto"), device))
        machine = machine.shared_by(int(knobs.get("tensor_parallel_size", 1)))
        begin = time.monotonic()
        with LLM(**knobs) as llm:
            if options.spread_experts:
                spread_experts("penstock", llm)
            print(f"{shape.name} opened in {time.monotonic() - begin:.1f} s", flush=True)
            bench = Bench(llm, shape, machine, options)
            for work in works:
                rows[work.name] = row = bench.run(work)
                print(
                    f"{work.name:{NAME}}{row['output_tokens_per_second']:,.0f} output tok/s",
                    flush=True,
                )
    except PenstockError as error:
        left = next(work.name for work in works if work.name not in rows)
        rows[left] = {"failed": str(error)}
    return rows


def first_token(knobs: dict[str, Any]) -> float:
    """Opens an LLM and draws a token; returns the time of the token, on the clock that all
    processes share."""
    with LLM(**knobs) as llm:
        llm.generate(
            [list(range(100, 108))], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
        )
        return time.monotonic()


# --- the run


def start_up_seconds(knobs: dict[str, Any], *, cold: bool) -> float:
    """Returns the seconds from a process's start to its first token. cold: weights out of the page
    cache, Triton's cache empty."""
    usual = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as empty:
        if cold:
            os.environ["TRITON_CACHE_DIR"] = empty
            for path in Path(knobs["model"]).glob("*.safetensors"):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.monotonic()
        try:
            return float(in_a_process(first_token, knobs)) - begin
        finally:
            os.environ.pop("TRITON_CACHE_DIR", None)
            os.environ |= {} if usual is None else {"TRITON_CACHE_DIR": usual}


def in_a_process(function: Any, *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def sessions(works: list[Work], shape: str) -> Iterator[list[Work]]:
    """Yields groups of works that one engine serves, the most important first; in the 1B shape big
    works have their own engine."""
    usual = [work for work in works if work.name != START_UP]
    for groups, big in ((True, False), (False, False), (True, True)):
        here = [
            w for w in usual if w.groups == groups and (w.big and shape == "llama-3.2-1b") == big
        ]
        if here:
            yield here


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the chosen works; returns and writes results.json,
    which accumulates runs of one folder."""
    path = options.out / "results.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    every = works_of(options.shape)
    works = [
        work for work in every if (work.name in options.work if options.work else not work.named)
    ]
    asked_start_up = START_UP in (work.name for work in works)
    for session in [*sessions(works, options.shape), *([[]] if asked_start_up else [])]:
        big = bool(session) and session[0].big and options.shape == "llama-3.2-1b"
        shape = SHAPES["llama-3-8b" if big else options.shape]
        folder = options.out / "models" / shape.name
        write_model(shape, folder, options.tokenizer, weights=asked_start_up and not big)
        knobs = {"max_model_len": shape.max_model_len, **options.knobs}
        knobs |= {"model": str(folder), "load_format": load_format(folder)}
        if session and not session[0].groups:
            knobs["prefix_groups"] = "off"
        try:
            if session:
                found |= in_a_process(run_session, session, knobs, shape, options)
            else:  # the first of three fills the caches that the last one finds full
                cold, _, warm = (
                    start_up_seconds(knobs, cold=cold) for cold in (True, False, False)
                )
                found[START_UP] = {"shape": shape.name, "seconds": warm, "cold_seconds": cold}
        except BrokenProcessPool:
            found |= {
                work.name: {"failed": "its process died: its last words are above"}
                for work in session
            }
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def print_table(found: dict[str, Any]) -> None:
    print(
        f"\n{'work':{NAME}}" + "".join(f"{title:>{width}}" for title, width, _, _ in COLUMNS),
        end="",
    )
    print("".join(f"{part:>{PART}}" for part in PARTS))
    for name, row in found.items():
        if "failed" in row:
            print(f"{name:{NAME}}{row['failed']}")
            continue
        cells = "".join(f"{number(row.get(key), form):>{width}}" for _, width, key, form in COLUMNS)
        parts = row.get("parts_ms") or {}
        cells += "".join(f"{number(parts.get(part), '.3f'):>{PART}}" for part in PARTS)
        more = [f"{row['cold_seconds']:.1f} s cold"] if "cold_seconds" in row else []
        more += ["cut"] * bool(row.get("cut")) + [row.get("parts_missing", "")]
        print(f"{name:{NAME}}{cells}  {', '.join(filter(None, more))}".rstrip())


def number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("shapes-out"), help="folder for models and results.json"
    )
    parser.add_argument("--shape", default="llama-3.2-1b", choices=SHAPES)
    names = [work.name for work in works_of("tiny")]
    parser.add_argument(
        "--work", action="append", choices=names, help="again for several; left out: all"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="a work's longest; it is cut then"
    )
    parser.add_argument(
        "--no-profile", dest="profile", action="store_false", help="no parts of a step"
    )
    parser.add_argument(
        "--spread-experts", action="store_true", help="tokens differ in their experts; on a GPU"
    )
    return with_model(parser, words)


def with_model(parser: argparse.ArgumentParser, words: list[str] | None) -> argparse.Namespace:
    """Parses `words` with the options of a model and its work beside the parser's own, `--out`
    among them. Makes the folder; `knobs` are the engine's, by name."""
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json (.gz too); left out: the demo's, filled up"
    )
    parser.add_argument("--problems", help="as `penstock monkeys` takes them; left out: the demo's")
    parser.add_argument("--shots", help="where examples come from; left out: the other problems")
    told = "one of the engine's; again"
    parser.add_argument(
        "--knob", action="append", default=[], type=read_knob, metavar="NAME=VALUE", help=told
    )
    options = parser.parse_args(words)
    options.knobs = dict(options.knob)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def main(words: list[str] | None = None) -> int:
    found = run(arguments(words))
    print_table(found)
    return 1 if any("failed" in row for row in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

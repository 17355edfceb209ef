"""Measures the host's part of a step: plan + build batch + commit at many live rows, without a
device.

    python benchmarks/host_step.py --rows 8192 --context 1000 [--json]

Medians on one core, prefix caching on, at `--context` tokens a row and again at four times as many:

    step      plan + build + commit of a step: steady, and with turnover (at each step one row in
              128 ends and a waiting tail takes its place). Rows are tails of groups of 1,024.
    admit     one group of 1,024 tails beside 7/8 of the rows: from submit to the launch in which
              the last of them join
    finish    the step in which 1,000 rows end: tails of groups, and requests of one sample, whose
              generated blocks go to the prefix tree: 512 in this step, and 512 in each later one
              (`after`: the extra cost of each later step)

Times are processor times of the single thread that does everything, so that a busy machine measures
the same. admit and finish are costs beyond as many steady steps. build is everything that a launch
does before the model's forward, run on the CPU with torch on one thread; so it includes work that a
GPU does itself (writing the joining rows' columns and tables). Asserts nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from penstock.execute.kv_cache import KvCache
from penstock.execute.padding import EXACT, BesideSizes
from penstock.execute.sampling_mirror import SamplingMirror
from penstock.execute.staged_plan import PlanStager
from penstock.execute.staging_buffer import Staging
from penstock.request import Request, SamplingParams
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import NO_TOKEN, StepPlan, StepTokens

VOCAB = 128_256
END = 2
TAILS = 1024
OWN = 96  # tokens that a row has made when the clock starts
NEW = 600  # tokens that a row may make
Parts = tuple[float, float, float]  # seconds of plan, build, commit


class Host:
    """A scheduler with a device whose tokens end no row, except rows chosen to end."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self.scheduler = Scheduler(limits)
        cpu = torch.device("cpu")
        staging, asked = (
            Staging(limits.max_rows, limits.max_rows, cpu),
            SamplingMirror(limits.max_rows),
        )
        kv = KvCache([], limits.num_blocks + 1, cpu)
        self.stager = PlanStager(staging, EXACT, asked, kv, None, limits.max_rows, True, False)
        self.random = np.random.default_rng(0)
        self.done = np.zeros(limits.max_rows, np.bool_)

    def step(self, end: int = 0, spread: bool = False) -> Parts:
        """Runs one step with nothing in flight, after which `end` rows are over (spread: taken from
        all groups, else the first ones)."""
        start = time.thread_time()
        plan = self.scheduler.plan()
        planned = time.thread_time()
        assert plan is not None
        self.build(plan)
        built = time.thread_time()
        tokens = StepTokens(self.tokens(plan, end, spread))
        answered = time.thread_time()
        self.scheduler.commit(plan, tokens)
        return planned - start, built - planned, time.thread_time() - answered

    def build(self, plan: StepPlan) -> None:
        size, chunks = plan.rows.size, plan.chunks
        self.stager.stage(
            plan, BesideSizes(size, size + (0 if chunks is None else chunks.tokens.size), False)
        )

    def tokens(self, plan: StepPlan, end: int, spread: bool) -> np.ndarray:
        tokens = self.random.integers(10, VOCAB, plan.rows.size).astype(np.int32)
        if plan.joins is not None:
            self.done[plan.joins.rows] = False
        ends = np.arange(end) * (plan.rows.size // end) if spread and end else np.arange(end)
        tokens[ends] = END
        tokens[self.done[plan.rows]] = NO_TOKEN
        self.done[plan.rows[ends]] = True
        return tokens


def request(number: int, prompt: int, n: int) -> Request:
    ids = np.random.default_rng(number).integers(10, VOCAB, prompt).astype(np.int32)
    return Request(
        request_id=number,
        prompt=ids.tobytes(),
        sampling=SamplingParams(n=n, max_tokens=NEW, seed=1),
    )


def filled(rows: int, context: int, tails: int, capacity: int = 0) -> Host:
    """Returns a host with `rows` of `capacity` rows at `context` tokens each,
    in groups of `tails`."""
    capacity = max(capacity, rows)
    prompts = capacity // tails + 64
    limits = SchedulerConfig(
        num_blocks=capacity * (2 * NEW // 16) + prompts * (context // 16 + 2),
        max_rows=capacity,
        max_model_len=context + 1024,
        max_batched_tokens=capacity
        + max(65_536, rows // tails * context // 8),  # filled in few steps
        vocab_size=VOCAB,
        eos_token_ids=(END,),
    )
    host = Host(limits)
    for number in range(rows // tails):
        host.scheduler.submit(request(number, context - OWN, tails))
    while host.scheduler.admission.pending:
        host.step()
    for _ in range(OWN):
        host.step()
    assert host.scheduler.rows.free_count == capacity - rows
    return host


def medians(parts: list[Parts]) -> dict[str, float]:
    """Returns the milliseconds of a step and of its parts."""
    times = np.array(parts) * 1e3
    plan, build, commit = np.median(times, axis=0).tolist()
    return {
        "all": float(np.median(times.sum(axis=1))),
        "plan": plan,
        "build": build,
        "commit": commit,
    }


def steady(rows: int, context: int, steps: int) -> dict[str, float]:
    host = filled(rows, context, min(TAILS, rows))
    return medians([host.step() for _ in range(steps)])


def turnover(rows: int, context: int, steps: int) -> dict[str, float]:
    """Returns the times under repeated sampling, with a queue of groups behind the rows."""
    host = filled(rows, context, min(TAILS, rows))
    for number in range(1 + steps * (rows // 128) // TAILS):
        host.scheduler.submit(request(10**6 + number, context - OWN, TAILS))
    for _ in range(8):
        host.step(end=rows // 128, spread=True)
    found = medians([host.step(end=rows // 128, spread=True) for _ in range(steps)])
    assert host.scheduler.rows.free_count < rows // 64, "no waiting tails were left"
    return found


def beyond(host: Host, spent: float, steps: int) -> float:
    """Returns the milliseconds that `spent` seconds over this many steps cost beyond steady steps,
    measured from now on."""
    return (spent - steps * plain(host)) * 1e3


def plain(host: Host) -> float:
    return statistics.median(sum(host.step()) for _ in range(15))


def admit(rows: int, context: int, times: int) -> float:
    """Returns the milliseconds that one more group's arrival costs, build included."""
    found = []
    host = filled(rows - TAILS, context, TAILS, rows)
    for turn in range(times):
        incoming = request(10**6 + turn, context, TAILS)
        start = time.thread_time()
        host.scheduler.submit(incoming)
        spent, steps = time.thread_time() - start, 0
        while host.scheduler.admission.pending:
            spent += sum(host.step())
            steps += 1
        found.append(beyond(host, spent, steps))
        host.scheduler.cancel(10**6 + turn)
        host.step()
    return statistics.median(found)


def finish(rows: int, context: int, tails: int, times: int) -> dict[str, float]:
    """Returns the milliseconds of the step in which 1,000 rows end, and of each further step until
    their numbers are free again."""
    found, after = [], []
    host = filled(rows, context, tails)
    for _ in range(times):
        gone = host.scheduler.rows.free_count + 1000
        found.append(sum(host.step(end=1000, spread=tails > 1)))
        later = []
        while host.scheduler.rows.free_count < gone:
            later.append(sum(host.step()))
        usual = plain(host)
        found[-1] = (found[-1] - usual) * 1e3
        after += [(spent - usual) * 1e3 for spent in later]
    return {
        "step": statistics.median(found),
        "after": statistics.median(after or [0.0]),
        "steps_after": len(after) / times,
    }


def measure(rows: int, context: int) -> dict[str, Any]:
    one = {
        "context": context,
        "steady": steady(rows, context, 200),
        "turnover": turnover(rows, context, 100),
        "admit": admit(rows, context, 9),
        "finish_tails": finish(rows, context, TAILS, 5),
        "finish_alone": finish(rows, context, 1, 5),
    }
    gc.collect()
    return one


def show(found: list[dict[str, Any]], rows: int) -> None:
    print(f"host time at {rows:,} rows, ms: medians, one core")
    print(f"{'context':>8} {'step':>18} {'all':>6} {'plan':>6} {'build':>6} {'commit':>6}")
    for one in found:
        for name in ("steady", "turnover"):
            parts = one[name]
            times = " ".join(f"{parts[key]:6.2f}" for key in ("all", "plan", "build", "commit"))
            print(f"{one['context']:8,} {name:>18} {times}")
    for one in found:
        tails, alone = one["finish_tails"], one["finish_alone"]
        print(
            f"{one['context']:8,} admit {TAILS:,} tails {one['admit']:.2f}; finish 1,000 tails"
            f" {tails['step']:.2f}; finish 1,000 requests of one sample {alone['step']:.2f}, then"
            f" {alone['after']:.2f} more in each of {alone['steps_after']:.0f} steps"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=8192, help="a multiple of 1,024, at least 2,048"
    )
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = [measure(args.rows, context) for context in (args.context, 4 * args.context)]
    if not args.json:
        show(found, args.rows)
        return
    first = found[0]
    figures = {
        "host_step_ms": first["steady"]["all"],
        "host_admit_group_ms": first["admit"],
        "host_finish_ms": max(first["finish_tails"]["step"], first["finish_alone"]["step"]),
    }
    print(json.dumps({**figures, "rows": args.rows, "details": found}))


if __name__ == "__main__":
    main()

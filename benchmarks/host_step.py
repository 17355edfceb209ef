"""The host's side of a step alone: plan + build batch + commit at many live rows, with a device that computes nothing.

    python benchmarks/host_step.py --rows 8192 --context 1000 [--json]

Prints medians of one core: a steady step, a step at four times the context, admitting one group of 1,024 tails, and
finishing 1,000 rows in one step; all with prefix caching on. Rows are tails of groups of 1,024, as in the monkeys work;
`finish_alone` is the same for 1,000 requests of one sample each, whose generated blocks go to the prefix tree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from penstock.execute.batch import stage
from penstock.request import Request, SamplingParams
from penstock.schedule.limits import Limits
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.step import NO_TOKEN, StepPlan, StepTokens

VOCAB = 128_256
TAILS = 1024


class NullDevice:
    """Answers each plan with tokens that end nothing, but for rows that it is told to end."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.random = np.random.default_rng(0)
        self.done = np.zeros(scheduler.limits.max_rows, np.bool_)

    def step(self, end: int = 0) -> tuple[float, float, float]:
        """One step with nothing in flight; seconds of plan, of building the batch, of commit."""
        start = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None
        stage(plan)
        staged = time.perf_counter()
        tokens = self.tokens(plan, end)
        read = time.perf_counter()
        self.scheduler.commit(plan, StepTokens(tokens))
        return planned - start, staged - planned, time.perf_counter() - read

    def tokens(self, plan: StepPlan, end: int) -> np.ndarray:
        tokens = self.random.integers(10, VOCAB, plan.rows.size).astype(np.int32)
        tokens[:end] = 2
        if plan.joins is not None:
            self.done[plan.joins.rows] = False
        tokens[self.done[plan.rows]] = NO_TOKEN
        self.done[plan.rows[:end]] = True
        return tokens


def request(number: int, prompt: int, n: int, new: int) -> Request:
    ids = np.random.default_rng(number).integers(10, VOCAB, prompt).astype(np.int32)
    return Request(request_id=number, prompt=ids.tobytes(), sampling=SamplingParams(n=n, max_tokens=new, seed=1))


def filled(rows: int, context: int, tails: int) -> NullDevice:
    """`rows` rows at about `context` tokens each, in groups of `tails`, 96 tokens of them generated."""
    own = 96
    blocks = rows * (own + 700) // 16 + (rows // tails + 1) * (context // 16 + 2) + 4096
    limits = Limits(
        num_blocks=blocks,
        max_rows=rows,
        max_model_len=context + 1024,
        max_batched_tokens=max(rows + 16_384, 2 * context * (rows // tails + 1)),
        vocab_size=VOCAB,
        eos_token_ids=(2,),
    )
    device = NullDevice(Scheduler(limits))
    for number in range(rows // tails):
        device.scheduler.submit(request(number, context - own, tails, 600))
    while device.scheduler.rows.free_count or device.scheduler.admission.pending:
        device.step()
    for _ in range(own):
        device.step()
    return device


def steady(rows: int, context: int, steps: int) -> dict[str, float]:
    device = filled(rows, context, min(TAILS, rows))
    parts = np.array([device.step() for _ in range(steps)]) * 1e3
    plan, build, commit = np.median(parts, axis=0)
    return {"all": float(np.median(parts.sum(axis=1))), "plan": plan, "build": build, "commit": commit}


def turnover(rows: int, context: int, steps: int) -> dict[str, float]:
    """As the monkeys work runs: one row in 128 ends at each step, and a waiting tail takes its place."""
    device = filled(rows, context, min(TAILS, rows))
    for number in range(8):
        device.scheduler.submit(request(10**6 + number, context - 96, TAILS, 600))
    parts = np.array([device.step(end=rows // 128) for _ in range(steps)]) * 1e3
    plan, build, commit = np.median(parts, axis=0)
    return {"all": float(np.median(parts.sum(axis=1))), "plan": plan, "build": build, "commit": commit}


def admit(rows: int, context: int, times: int) -> float:
    """From submit to the launch in which a group's 1,024 tails join, ms of host time, beside 7/8 of the rows."""
    found = []
    for _ in range(times):
        device = filled(rows - TAILS, context, TAILS)
        device = grown(device, rows)
        start = time.perf_counter()
        device.scheduler.submit(request(10**6, context, TAILS, 600))
        spent = time.perf_counter() - start
        plain = statistics.median(sum(device.step()) for _ in range(1))
        while device.scheduler.admission.pending:
            spent += sum(device.step())
        found.append((spent + plain) * 1e3)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    print(json.dumps(steady(args.rows, args.context, 100)))
    print(json.dumps(turnover(args.rows, args.context, 100)))


if __name__ == "__main__":
    main()

"""Measures how much faster than real time the simulator is: 8 replicas of 8,192 rows, all
simulated.

    python benchmarks/simulator_pace.py                   # steps of about a 1B's on an H200: 36 ms
                                                          # with full rows
    python benchmarks/simulator_pace.py --table FILE      # measured steps
    python benchmarks/simulator_pace.py --plain           # without the shortcuts

The work is repeated sampling. One core; times are processor seconds, so that a busy machine
measures nearly the same. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from itertools import product

import numpy as np

from penstock.artifact.manifest import USUAL_PROMPT, StepSeconds
from penstock.artifact.step_file import read_steps
from penstock.schedule.prefix_groups import SharingCosts
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.simulate.asked_load import AskedLoad
from penstock.simulate.fleet import Fleet
from penstock.simulate.modelled_outputs import END, VOCABULARY
from penstock.simulate.step_costs import StepCosts

ROWS, TAILS, PROMPT, MEAN, MOST = 8192, 1024, 656, 128, 1024
BLOCKS, TOKENS, CONTEXT = 112_000, 16_384, 8192


def seconds_of(rows: int, context: int, prompts: int = 0, pairs: int = 0) -> float:
    """Returns the approximate seconds of a 1B's step on an H200 (docs/performance.md)."""
    return 8e-4 + 3.7e-6 * max(0, rows - 64) + 8e-9 * rows * context + 4e-6 * prompts + 5e-9 * pairs


def about() -> StepSeconds:
    entries = [
        (rows, n, 0, 0, 0, 0, 0, seconds_of(rows, n))
        for rows, n in product(2 ** np.arange(14), (64, 200, CONTEXT))
    ]
    for rows, n in product((0, 1, 128, 1024, ROWS), (1, 512, TOKENS)):
        entries.append(
            (rows, 64, n, min(n, USUAL_PROMPT), 0, 0, 0, seconds_of(rows, 64 if rows else 0, n))
        )
    for shared, members in product((256, 1024), (2, 32, 1024)):
        pairs = 1024 * shared // min(members, 64)
        entries.append((1024, 64, 0, 0, shared, members, 0, seconds_of(1024, 64, 0, pairs)))
    entries += [
        (rows, 528, 0, 0, 0, 0, 512, 1.05 * seconds_of(rows, 528)) for rows in (16, 1024, 4096)
    ]
    rows, context, prompts, length, shared_tokens, members_, spread, took = (
        list(column) for column in zip(*entries, strict=True)
    )
    return StepSeconds(
        rows=rows,
        context=context,
        prompt_tokens=prompts,
        prompt_length=length,
        shared=shared_tokens,
        members=members_,
        spread=spread,
        seconds=took,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    table = about() if args.table is None else read_steps(args.table).step_seconds
    limits = SchedulerConfig(
        num_blocks=BLOCKS,
        max_rows=ROWS,
        max_model_len=CONTEXT,
        max_batched_tokens=TOKENS,
        vocab_size=VOCABULARY,
        eos_token_ids=(END,),
        mask_slots=1,
        sharing=SharingCosts(**asdict(SharingCosts())),
    )
    groups = 50 * args.replicas
    column = np.full(groups, PROMPT, np.int32)
    load = AskedLoad(
        arrival=np.zeros(groups),
        prompt=column,
        start=np.arange(groups + 1) * TAILS,
        output=np.minimum(
            np.random.default_rng(0).geometric(1 / MEAN, groups * TAILS), MOST
        ).astype(np.int32),
        limit=np.full(groups, MOST, np.int32),
        shared=0 * column,
        header=0 * column,
        at_once=True,
    )
    costs = StepCosts(table, args.table or "about", "measure a table with more")
    fleet = Fleet(load, limits, costs, args.replicas, shortcuts=not args.plain)
    begun = time.process_time()
    outcome = fleet.run()
    took = time.process_time() - begun
    found = {
        "simulator_times_the_clock": outcome.seconds / took,
        "virtual_seconds": outcome.seconds,
        "seconds": took,
        "ms_a_step": 1e3 * took / outcome.steps,
        "output_rate": outcome.output_tokens / outcome.seconds,
    }
    print(
        json.dumps(found)
        if args.json
        else "\n".join(f"{name:28} {value:14,.3f}" for name, value in found.items())
    )


if __name__ == "__main__":
    main()

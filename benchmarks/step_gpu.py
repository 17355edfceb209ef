"""Times a decode step on a GPU by part: random weights of a shape (default Llama-3.2-1B's), prefix
groups.

    python benchmarks/step_gpu.py
        8,192 rows in 8 groups that share 656 tokens, then 1,000, 128 and 1 row alone
    python benchmarks/step_gpu.py --rows 1024 --groups 8 --own 96 --top-p 0.95 --logprobs 0

Drives the runner with its own plans, without a scheduler. Prints a line a case: ms a step by part
(torch.profiler's kernels), the device's idle time between them, and the host's time to launch a
step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.config import BLOCK_SIZE, Config
from penstock.execute.first_step import lasting_rows
from penstock.execute.open_runner import open_runner
from penstock.execute.runner import TorchRunner
from penstock.execute.step_table import run_ahead
from penstock.kernels import choose
from penstock.row_table import WANTS_FILTER, WANTS_LOGPROBS, WANTS_PENALTY
from penstock.schedule.step import Joins, Moves, StepPlan

LLAMA_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}
PARTS = {
    "products": (
        "gemm",
        "nvjet",
        "cutlass",
        "linear_",
        "_norm_qkv",
        "_norm_gate",
        "splitK",
        "wgmma",
    ),
    "attention": ("_own", "_parts", "_prefix", "_prefill", "_attend", "_join"),
    "sampling": ("tile_sums", "draw_kernel", "filter_kernel", "_adjust", "_logprobs"),
}


def main() -> None:
    args = _arguments()
    cases = [(args.rows, args.groups)] if args.rows else [(8192, 8), (1000, 0), (128, 0), (1, 0)]
    if args.library:
        choose.CANDIDATES |= {
            op: choose.CANDIDATES[op][-1:] for op in ("prepare_linear", "linear", "linear_gated")
        }
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_1B | json.loads(args.model)))
        runner = open_runner(
            Config.of(load_format="dummy", seed=1, max_num_seqs=args.max_rows), Path(folder)
        )
    about = runner.describe()
    print(
        f"start {time.perf_counter() - begun:.1f} s, KV {about['kv_tokens']:,} tokens, graphs"
        f" {_short(about)}"
    )
    for rows, groups in cases:
        print(json.dumps(_case(runner, args, rows, groups)), flush=True)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"peak {peak:.1f} GiB allocated, {torch.cuda.max_memory_reserved() / 2**30:.1f} reserved")
    runner.close()


def _short(about: dict[str, Any]) -> dict[str, Any]:
    graphs = dict(about.get("graphs") or {})
    graphs["sizes"] = len(graphs.get("sizes", ()))
    return graphs


def _case(runner: TorchRunner, args: argparse.Namespace, rows: int, groups: int) -> dict[str, Any]:
    plans = _Plans(args, rows, groups)
    run_ahead(runner, plans.next, 8)
    torch.cuda.synchronize()
    start = time.perf_counter()
    host = run_ahead(runner, plans.next, args.steps)
    wall = (time.perf_counter() - start) / args.steps * 1e3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_ahead(runner, plans.next, args.profiled)
        torch.cuda.synchronize()
    parts, gap, kernels = _parts(profile)
    print(kernels)
    return {
        "rows": rows,
        "groups": groups,
        "ms": round(wall, 3),
        "tok_s": round(rows / wall * 1e3),
        **parts,
        "gap": gap,
        "host_ms": round(1e3 * statistics.median(host), 3),
    }


def _parts(profile: Any) -> tuple[dict[str, float], float, str]:
    """Returns ms a step by part, idle ms a step, and the largest kernels. Parts may overlap,
    because kernels of few rows start early.

    A step ends with its copy to the host. The first two steps, in which the host has no lead yet,
    and the last, which nothing follows, are left out.
    """
    spans, total, names = [], Counter[str](), Counter[str]()
    events = [
        event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    ends = sorted(event.time_range.end for event in events if "DtoH" in event.name)
    first, last = ends[1], ends[-2]
    steps = len(ends) - 3
    for event in events:
        if not first <= event.time_range.start < last:
            continue
        length = event.time_range.end - event.time_range.start
        part = next(
            (p for p, words in PARTS.items() if any(w in event.name for w in words)), "elementwise"
        )
        total[part] += length / steps / 1e3
        names[event.name[:40]] += length / steps / 1e3
        spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    spans.append((last, last))
    idle, end = 0.0, spans[0][1]
    for start, stop in spans:
        idle += max(0.0, start - end)
        end = max(end, stop)
    largest = "; ".join(f"{name} {ms:.3f}" for name, ms in names.most_common(14))
    return {p: round(ms, 3) for p, ms in total.items()}, round(idle / steps / 1e3, 3), largest


class _Plans:
    """Plans of rows that never end, each with its own blocks behind its group's prefix."""

    def __init__(self, args: argparse.Namespace, rows: int, groups: int) -> None:
        self.args, self.rows, self.groups, self.number = args, rows, groups, 0
        self.prefix = args.shared // BLOCK_SIZE if groups else 0
        self.start = self.prefix * BLOCK_SIZE + (args.own if groups else args.alone)
        self.steps = 8 + args.steps + args.profiled

    def next(self) -> StepPlan:
        rows, step = np.arange(self.rows, dtype=np.int32), self.number
        self.number += 1
        wants = (WANTS_FILTER if self.args.top_p < 1 else 0) | (
            WANTS_LOGPROBS if self.args.logprobs >= 0 else 0
        )
        wants |= WANTS_PENALTY if self.args.repetition != 1 else 0
        size = -(-self.rows // max(self.groups, 1))
        return StepPlan(
            number=step,
            rows=rows,
            lengths=np.full(self.rows, self.start + step, np.int32),
            wants=wants,
            group_start=np.minimum(np.arange(self.groups + 1) * size, self.rows).astype(np.int32),
            group_blocks=self._prefixes(),
            group_length=np.full(self.groups, self.prefix * BLOCK_SIZE, np.int32),
            moves=Moves.none(),
            new_blocks=np.zeros((0, 3), np.int32),
            joins=self._joins(wants, size) if step == 0 else None,
            chunks=None,
        )

    def _prefixes(self) -> np.ndarray:
        return 1 + np.arange(self.groups * self.prefix, dtype=np.int32).reshape(
            self.groups, self.prefix
        )

    def _joins(self, wants: int, size: int) -> Joins:
        own = -(-(self.start + self.steps + 1) // BLOCK_SIZE) - self.prefix
        mine = 1 + self.groups * self.prefix + np.arange(self.rows * own, dtype=np.int32)
        blocks = np.random.default_rng(0).permutation(mine).astype(np.int32).reshape(self.rows, own)
        if self.groups:
            blocks = np.concatenate(
                (self._prefixes()[np.arange(self.rows) // size], blocks), axis=1
            )
        args = self.args
        return lasting_rows(
            blocks,
            self.start,
            temperature=args.temperature,
            top_p=args.top_p,
            repetition=args.repetition,
            logprobs=args.logprobs,
            wants=wants,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("rows", 0),
        ("groups", 0),
        ("shared", 656),
        ("own", 96),
        ("alone", 640),
        ("steps", 32),
        ("profiled", 9),
        ("logprobs", -1),
        ("max-rows", 8192),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (("temperature", 0.6), ("top-p", 1.0), ("repetition", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument(
        "--library", action="store_true", help="the library's products for few rows too"
    )
    parser.add_argument(
        "--model", default="{}", help="keys of config.json that differ from Llama-3.2-1B's"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

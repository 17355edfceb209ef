"""Times a decode step of the runner on a CPU, by part.

    python benchmarks/step_cpu.py --rows 1024 --steps 64 --prompt 300 --top-p 0.9

The weights are random, in the demo's shape (or --hidden and so on), the rows in groups of 64.
Drives TorchRunner with its own plans, without a scheduler. Parts are timed inside the device's
thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import BLOCK_SIZE, Config
from penstock.execute.open_runner import open_runner
from penstock.execute.runner import TorchRunner
from penstock.row_table import WANTS_FILTER, WANTS_PENALTY
from penstock.schedule.step import JOIN_RECORD, Chunks, Joins, Moves, StepPlan

NOTHING = np.zeros(0, np.int32)


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_model(args)))
        tokens = -(-args.rows // args.group) * args.prompt  # all prompts are one step
        limits = {"max_num_seqs": args.rows, "max_num_batched_tokens": tokens}
        config = Config.of(load_format="dummy", dtype=args.dtype, seed=1, **limits)
        runner = open_runner(config, Path(folder))
    times = _timed(runner)
    groups = -(-args.rows // args.group)
    prefix = (args.prompt - 1) // BLOCK_SIZE
    runner.launch(_prefill(groups, prefix, args.prompt, args.vocabulary)).fetch()
    for values in times.values():
        values.clear()
    flights, start = [], time.perf_counter()
    for number in range(args.steps):
        flights.append(runner.launch(_decode(args, number, groups, prefix)))
        if number:
            flights[number - 1].fetch()
    flights[-1].fetch()
    wall = (time.perf_counter() - start) / args.steps * 1e3
    runner.close()
    _show(times, wall, args.rows)


def _timed(runner: TorchRunner) -> dict[str, list[float]]:
    """Wraps the parts of a step; their times are appended to the returned lists, in ms."""
    times: dict[str, list[float]] = defaultdict(list)
    state: Any = runner._state
    for owner, name in (
        (state, "step"),
        (state.model, "forward"),
        (state.model, "logits"),
        (state.draw, "launch"),
        (state.kv, "store_tokens"),
    ):
        setattr(owner, name, _timer(getattr(owner, name), times[name]))
    return times


def _timer(function: Any, into: list[float]) -> Any:
    def timed(*values: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*values)
        finally:
            into.append((time.perf_counter() - start) * 1e3)

    return timed


def _show(times: dict[str, list[float]], wall: float, rows: int) -> None:
    total = {name: statistics.median(values) if values else 0.0 for name, values in times.items()}
    parts = {
        "wall a step": wall,
        "step": total["step"],
        "forward": total["forward"],
        "head product": total["logits"],
        "sampling": total["launch"] - total["logits"],
        "glue": total["step"] - total["forward"] - total["launch"],
    }
    for name, value in parts.items():
        print(f"{name:16s} {value:9.2f} ms")
    print(f"{rows / wall * 1e3:,.0f} tok/s")


def _prefill(groups: int, prefix: int, prompt: int, vocabulary: int) -> StepPlan:
    """Returns a plan of all prompts without their last tokens, each in its own blocks: group g has
    blocks from 1 + g * (prefix + 1) on."""
    count = prompt - 1
    tokens = np.random.default_rng(0).integers(0, vocabulary, groups * count).astype(np.int32)
    chunks = Chunks(
        tokens=tokens,
        start=np.arange(groups + 1, dtype=np.int32) * count,
        context=np.zeros(groups, np.int32),
        blocks=_prompt_blocks(groups, prefix),
        prompt_logprobs=np.full(groups, -1, np.int32),
        next_token=np.full(tokens.size, -1, np.int32),
    )
    return _plan(0, NOTHING, NOTHING, chunks=chunks)


def _prompt_blocks(groups: int, prefix: int) -> np.ndarray:
    return (1 + np.arange(groups * (prefix + 1), dtype=np.int32)).reshape(groups, prefix + 1)


def _decode(args: argparse.Namespace, number: int, groups: int, prefix: int) -> StepPlan:
    rows = np.arange(args.rows, dtype=np.int32)
    own = -(-(args.prompt + args.steps) // BLOCK_SIZE) - prefix
    length = np.full(args.rows, args.prompt - 1 + number, np.int32)
    wants = (WANTS_FILTER if args.top_p < 1 or args.top_k else 0) | (
        WANTS_PENALTY if args.repetition != 1 else 0
    )
    plan = _plan(number + 1, rows, length, wants=wants)
    prompts = _prompt_blocks(groups, prefix)
    if not args.no_groups:
        plan.group_start = np.minimum(np.arange(groups + 1) * args.group, args.rows).astype(
            np.int32
        )
        plan.group_blocks = np.ascontiguousarray(prompts[:, :prefix])
        plan.group_length = np.full(groups, prefix * BLOCK_SIZE, np.int32)
    if number == 0:
        mine = prompts.size + 1 + np.arange(args.rows * own, dtype=np.int32).reshape(args.rows, own)
        of_group = prompts[rows // args.group]
        plan.moves.blocks = np.stack((of_group[:, -1], mine[:, 0]), axis=1)
        plan.joins = _joins(
            args, wants, length, np.concatenate((of_group[:, :prefix], mine), axis=1)
        )
    return plan


def _joins(args: argparse.Namespace, wants: int, length: np.ndarray, blocks: np.ndarray) -> Joins:
    rows = np.arange(args.rows)
    records = np.zeros(args.rows, JOIN_RECORD)
    records["row"], records["sample"], records["seed"] = rows, rows % args.group, rows // args.group
    records["length"], records["last_token"], records["limit"] = (
        length,
        rows % args.vocabulary,
        length + 10_000,
    )
    records["prompt_length"] = records["min_length"] = length + 1
    records["temperature"], records["top_p"], records["top_k"] = (
        args.temperature,
        args.top_p,
        args.top_k,
    )
    records["repetition"], records["ignore_eos"], records["wants"] = args.repetition, 1, wants
    records["stop_ids"] = records["logprobs"] = -1
    return Joins(
        records, blocks, np.zeros(args.rows + 1, np.int32), NOTHING, np.zeros(0, np.float32)
    )


def _plan(
    number: int, rows: np.ndarray, lengths: np.ndarray, wants: int = 0, chunks: Chunks | None = None
) -> StepPlan:
    return StepPlan(
        number=number,
        rows=rows,
        lengths=lengths,
        wants=wants,
        group_start=np.zeros(1, np.int32),
        group_blocks=np.zeros((0, 0), np.int32),
        group_length=NOTHING,
        moves=Moves.none(),
        new_blocks=np.zeros((0, 3), np.int32),
        joins=None,
        chunks=chunks,
    )


def _model(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_type": "qwen2" if args.heads == 14 else "llama",
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("rows", 1024),
        ("steps", 64),
        ("prompt", 300),
        ("group", 64),
        ("vocabulary", 2048),
        ("hidden", 256),
        ("intermediate", 896),
        ("layers", 8),
        ("heads", 4),
        ("kv-heads", 2),
        ("top-k", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (("temperature", 0.6), ("top-p", 1.0), ("repetition", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--no-groups", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()

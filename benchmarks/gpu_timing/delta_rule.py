"""Times of a layer of gated delta rule on a GPU, at a model's sizes: rows beside the copy speed, prompts a token.

    PYTHONPATH=src python benchmarks/gpu_timing/delta_rule.py [--rows 1 128 512 1000] [--prompts 1x8192 8x1024]

A time is the median of replays of a graph that holds the call several times. "share" is of the time that the rows'
states need to be read and written at copy speed. Launches of prompts are timed by torch's profiler.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import rows as timing

from penstock.kernels.delta_rule import DeltaHeads, DeltaWeights
from penstock.kernels.inputs import PrefillInputs, StateInputs, StepInputs
from penstock.kernels.triton.delta_rule import delta_rule

B, GPU, TAPS = torch.bfloat16, torch.device("cuda"), 4
HEADS = DeltaHeads(16, 32, 128, 128)  # Qwen3.5-9B and 35B-A3B


def weights() -> DeltaWeights:
    by_head = (HEADS.value_heads,)
    return DeltaWeights(
        torch.randn(HEADS.channels, TAPS, dtype=B, device=GPU), -torch.rand(by_head, device=GPU),
        torch.randn(by_head, device=GPU), torch.ones(HEADS.value_width, dtype=B, device=GPU), 1e-6,
    )  # fmt: skip


def given(tokens: int) -> tuple[Tensor, Tensor]:
    width = HEADS.channels + HEADS.value_size
    return torch.randn(tokens, width, dtype=B, device=GPU), torch.randn(tokens, 64, dtype=B, device=GPU)


def states(slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    matrix = torch.zeros(slots, HEADS.value_heads, HEADS.key_width, HEADS.value_width, dtype=dtype, device=GPU)
    return torch.zeros(slots, TAPS, HEADS.channels, dtype=B, device=GPU), matrix


def step(rows: int, chunks: int, length: int) -> StepInputs:
    positions = torch.full((rows,), 1000, device=GPU)
    start = torch.arange(chunks + 1, dtype=torch.int32, device=GPU) * length
    prefill = PrefillInputs(start, torch.zeros(chunks, dtype=torch.int32, device=GPU), start) if chunks else None
    slots = torch.arange(rows, device=GPU)
    own = StateInputs(slots, torch.ones(rows, dtype=torch.bool, device=GPU), torch.arange(chunks, device=GPU))
    return StepInputs(positions, slots, rows, None, prefill, states=own)


def time_rows(count: int, dtype: torch.dtype, copy: float) -> None:
    (x, rates), asked, w = given(count), step(count, 0, 0), weights()
    size = count * HEADS.value_size * HEADS.key_width * dtype.itemsize
    layers = [states(count, dtype) for _ in range(timing.copies_of(size))]  # more than a cache holds
    took = 1e3 * timing.timed([partial(delta_rule, x, rates, HEADS, w, *own, asked) for own in layers])
    least = 2 * size / copy * 1e6
    print(f"rows {count:5} {str(dtype)[6:]:9} {took:9.1f} us  share {100 * least / took:5.1f} %", flush=True)


def time_prompts(chunks: int, length: int) -> None:
    (x, rates), own, asked, w = (
        given(chunks * length),
        states(chunks, torch.float32),
        step(0, chunks, length),
        weights(),
    )

    def call() -> Tensor:
        return delta_rule(x, rates, HEADS, w, *own, asked)

    took = 1e3 * timing.timed([call], least=3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    parts = ", ".join(f"{e.key} {e.self_device_time_total:.0f}" for e in seen.key_averages())
    print(f"prompts {chunks} x {length} {took:9.1f} us: {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 128, 512, 1000])
    parser.add_argument("--prompts", nargs="*", default=["1x8192", "8x1024"])
    options = parser.parse_args()
    copy = timing.copy_speed()
    print(f"copy {copy / 1e9:,.0f} GB/s")
    for count in options.rows:
        for dtype in (torch.float32, B):
            time_rows(count, dtype, copy)
    for each in options.prompts:
        time_prompts(*map(int, each.split("x")))


if __name__ == "__main__":
    main()

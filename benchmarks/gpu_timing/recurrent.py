"""Times a recurrent layer's kernels on a GPU, at a model's sizes.

    PYTHONPATH=src python benchmarks/gpu_timing/recurrent.py [--layers delta_rule mamba2]
        [--rows 1 128 512 1000] [--prompts 1x8192 8x1024] [--drafts 4]

    delta_rule  16 key and 32 value heads of 128: Qwen3.5-9B and 35B-A3B
    mamba2      64 heads of 64 in 8 groups, states of 128: Nemotron 3 Nano

A time is the median of replays of a graph that holds the call several times. "share": the time to
read and write the rows' states at copy speed, over the measured time. Prompts' launches are timed
by torch's profiler, a token. --drafts: rows with so many drafts, after as many right ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import rows as timing

from penstock.kernels.delta_rule import DeltaHeads, DeltaWeights
from penstock.kernels.inputs import PrefillInputs, StateInputs, StepInputs
from penstock.kernels.mamba2 import Mamba2Heads, Mamba2Weights
from penstock.kernels.triton.recurrent.delta_rule import delta_rule
from penstock.kernels.triton.recurrent.mamba2 import mamba2

B, GPU, TAPS = torch.bfloat16, torch.device("cuda"), 4
DELTA = DeltaHeads(16, 32, 128, 128)
MAMBA = Mamba2Heads(64, 64, 8, 128)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer to time. call: (a step's inputs, heads, small weights, window, matrix, step) ->
    answers. given: columns of each input tensor. channels: of its convolution. beside: numbers that a
    window has for a token beside these, if rows have drafts. matrix: the shape of a sequence's
    state.
    """

    call: Callable[..., Tensor]
    heads: DeltaHeads | Mamba2Heads
    weights: Callable[[], Any]
    given: tuple[int, ...]
    channels: int
    beside: int
    matrix: tuple[int, int, int]

    def drawn(self, tokens: int) -> list[Tensor]:
        return [torch.randn(tokens, columns, dtype=B, device=GPU) for columns in self.given]

    def states(self, slots: int, dtype: torch.dtype, drafts: int = 0) -> tuple[Tensor, Tensor]:
        matrix = torch.zeros(slots, *self.matrix, dtype=dtype, device=GPU)
        numbers = self.channels + (self.beside if drafts else 0)
        return torch.zeros(slots, TAPS + 2 * drafts, numbers, dtype=B, device=GPU), matrix


def delta_weights() -> DeltaWeights:
    by_head = (DELTA.value_heads,)
    return DeltaWeights(
        torch.randn(DELTA.channels, TAPS, dtype=B, device=GPU),
        -torch.rand(by_head, device=GPU),
        torch.randn(by_head, device=GPU),
        torch.ones(DELTA.value_width, dtype=B, device=GPU),
        1e-6,
    )


def mamba2_weights() -> Mamba2Weights:
    by_head = (MAMBA.heads,)
    return Mamba2Weights(
        torch.randn(MAMBA.channels, TAPS, dtype=B, device=GPU),
        torch.randn(MAMBA.channels, dtype=B, device=GPU),
        -torch.rand(by_head, device=GPU),
        torch.randn(by_head, device=GPU),
        torch.randn(by_head, device=GPU),
    )


LAYERS = {
    "delta_rule": Layer(
        delta_rule,
        DELTA,
        delta_weights,
        (DELTA.channels + DELTA.value_size, 2 * DELTA.value_heads),
        DELTA.channels,
        2 * DELTA.value_heads,
        (DELTA.value_heads, DELTA.key_width, DELTA.value_width),
    ),
    "mamba2": Layer(
        mamba2,
        MAMBA,
        mamba2_weights,
        (MAMBA.columns,),
        MAMBA.channels,
        MAMBA.heads,
        (MAMBA.heads, MAMBA.state_width, MAMBA.head_width),
    ),
}


def step(rows: int, chunks: int, length: int, drafts: int = 0) -> StepInputs:
    offset = torch.arange(1 + drafts, dtype=torch.int32, device=GPU).repeat(rows)
    start = torch.arange(chunks + 1, dtype=torch.int32, device=GPU) * length
    prefill = (
        PrefillInputs(start, torch.zeros(chunks, dtype=torch.int32, device=GPU), start)
        if chunks
        else None
    )
    slots = torch.arange(rows, device=GPU).repeat_interleave(1 + drafts)
    held = torch.full_like(offset, 1000 - drafts)
    own = StateInputs(slots, held, offset, torch.arange(chunks, device=GPU))
    return StepInputs(1000 + offset.long(), slots, len(offset), None, prefill, states=own)


def time_rows(layer: Layer, count: int, dtype: torch.dtype, copy: float, drafts: int) -> None:
    given, asked = layer.drawn(count * (1 + drafts)), step(count, 0, 0, drafts)
    weights = layer.weights()
    size = count * torch.Size(layer.matrix).numel() * dtype.itemsize
    # more than a cache holds
    states = [layer.states(count, dtype, drafts) for _ in range(timing.copies_of(size))]
    calls = [partial(layer.call, *given, layer.heads, weights, *own, asked) for own in states]
    took = 1e3 * timing.timed(calls)
    least = 2 * size / copy * 1e6
    print(
        f"rows {count:5} {str(dtype)[6:]:9} {took:9.1f} us  share {100 * least / took:5.1f} %",
        flush=True,
    )


def time_prompts(layer: Layer, chunks: int, length: int) -> None:
    given, own, asked = (
        layer.drawn(chunks * length),
        layer.states(chunks, torch.float32),
        step(0, chunks, length),
    )
    call = partial(layer.call, *given, layer.heads, layer.weights(), *own, asked)
    took = 1e3 * timing.timed([call], least=3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    parts = ", ".join(f"{e.key} {e.self_device_time_total:.0f}" for e in seen.key_averages())
    print(f"prompts {chunks} x {length} {took:9.1f} us: {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="*", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 128, 512, 1000])
    parser.add_argument("--prompts", nargs="*", default=["1x8192", "8x1024"])
    parser.add_argument("--drafts", type=int, default=0)
    options = parser.parse_args()
    copy = timing.copy_speed()
    print(f"copy {copy / 1e9:,.0f} GB/s")
    for name in options.layers:
        print(name)
        for count in options.rows:
            for dtype in (torch.float32, B):
                time_rows(LAYERS[name], count, dtype, copy, options.drafts)
        for each in options.prompts:
            time_prompts(LAYERS[name], *map(int, each.split("x")))


if __name__ == "__main__":
    main()

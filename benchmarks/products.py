"""Times the matrix products of one forward alone: the limit of an engine whose other work is free.

Takes a Llama-like config (Llama, Mistral, Qwen2, Qwen3: one body) or LFM2's, allocates every
layer's weights, so that caches behave as in a real forward, and times `F.linear` over all of them
and the head.
Knows no engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Weights = list[torch.Tensor]


def weights_of(config: dict[str, Any], dtype: torch.dtype) -> tuple[Weights, torch.Tensor]:
    """Returns random weights in the shapes of a config.json: the layers' in order (qkv and gate-up
    fused; a short convolution's three inputs in place of qkv), and the head's."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    count = config["num_hidden_layers"]
    attends = config.get("full_attn_idxs", range(count))
    shapes = [(hidden, heads * width), (2 * inner, hidden), (hidden, inner)]
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, int]) -> torch.Tensor:
        return torch.empty(shape).uniform_(-1e-1, 1e-1, generator=generator).to(dtype)

    qkv = (heads + 2 * kv_heads) * width
    layers = [
        draw(shape)
        for layer in range(count)
        for shape in ((qkv if layer in attends else 3 * hidden, hidden), *shapes)
    ]
    return layers, draw((config["vocab_size"], hidden))


def forward_seconds(
    layers: Weights, head: torch.Tensor | None, rows: int, *, at_least: float = 2.0
) -> float:
    """Returns the median seconds of one forward's products at `rows` rows; repeats for `at_least`
    seconds, at least 5 times."""
    inputs = {
        weight.shape[1]: torch.randn(rows, weight.shape[1], dtype=weight.dtype) for weight in layers
    }
    every = layers if head is None else [*layers, head]
    return median_seconds(
        lambda: [F.linear(inputs[weight.shape[1]], weight) for weight in every], at_least
    )


def median_seconds(work: Callable[[], object], at_least: float) -> float:
    """Returns the median wall time of `work()`, after one uncounted call."""
    with torch.inference_mode():
        work()
        times: list[float] = []
        while sum(times) < at_least or len(times) < 5:
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)

"""Measures a machine's memory and matrix speed, by a short probe on random data.

engine/roofline.py derives from it the least time of a work's steps: products at the rate measured
here for the row count, all reads at copy speed. Knows no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from random_model import Shape

LADDER = (128, 256, 512, 1024, 2048, 4096, 8192)
LADDER_CPU = (16, 64, 256)
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 27}
ROUNDS = 7
CHAIN = 4  # layers in one graph: their weights together are past the caches


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's measurements for one shape and dtype; a Machine of engine/roofline.py.

    copy: bytes a second, read and written together. rows: measured row counts, ascending. layer,
    head: seconds of one layer's products and of the head's, for each row count; layer_numbers,
    head_numbers: their weights. Other products take the same time a weight.
    """

    device: str
    item: int  # bytes of a number
    copy: float
    rows: tuple[int, ...]
    layer: tuple[float, ...]
    head: tuple[float, ...]
    layer_numbers: float
    head_numbers: float

    def products(
        self, rows: NDArray[np.float64], numbers: int, times: tuple[float, ...], of: float
    ) -> NDArray[np.float64]:
        """Returns the seconds of products with matrices of `numbers` weights, for each row count; 0
        for no rows.

        The rate is interpolated between measured row counts and constant outside; with fewer rows
        reading the weights takes longer anyway.
        """
        measured = np.array(self.rows, np.float64)
        rate = np.interp(rows, measured, measured / np.array(times)) * of / numbers  # rows a second
        weights = numbers * self.item / self.copy
        return np.where(rows > 0, np.maximum(rows / rate, weights), 0.0)

    def layer_seconds(self, tokens: NDArray[np.float64], numbers: int) -> NDArray[np.float64]:
        return self.products(tokens, numbers, self.layer, self.layer_numbers)

    def head_seconds(self, rows: NDArray[np.float64], numbers: int) -> NDArray[np.float64]:
        return self.products(rows, numbers, self.head, self.head_numbers)

    @property
    def best_rate(self) -> float:
        """Returns the best rate of a layer's products, in operations a second."""
        return max(
            2.0 * self.layer_numbers * rows / seconds
            for rows, seconds in zip(self.rows, self.layer, strict=True)
        )

    def shared_by(self, ranks: int) -> Machine:
        """Returns the machine for ranks that share products evenly, without their communication."""
        layer, head = (tuple(t / ranks for t in times) for times in (self.layer, self.head))
        numbers = self.layer_numbers / ranks, self.head_numbers / ranks
        return replace(
            self, layer=layer, head=head, layer_numbers=numbers[0], head_numbers=numbers[1]
        )


def probe(shape: Shape, device: torch.device, dtype: torch.dtype) -> Machine:
    """Measures the machine, in a second or two on a GPU. Medians of several rounds."""
    cuda = device.type == "cuda"
    ladder = LADDER if cuda else LADDER_CPU
    copy = _copy_speed(device)
    with torch.inference_mode():
        chain = [_weights(shape.products, device, dtype) for _ in range(CHAIN if cuda else 1)]
        layer = tuple(_products(chain, rows, device, dtype) / len(chain) for rows in ladder)
        del chain
        head = tuple(
            _products(
                [_weights(((shape.hidden, shape.vocab),), device, dtype)], rows, device, dtype
            )
            for rows in ladder
        )
    if cuda:
        torch.cuda.empty_cache()
    numbers = shape.layer_weights, shape.hidden * shape.vocab
    return Machine(device.type, dtype.itemsize, copy, ladder, layer, head, *numbers)


def _copy_speed(device: torch.device) -> float:
    """Returns the copy speed in bytes a second, read and written together."""
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device.type == "cuda")


def _weights(
    sizes: tuple[tuple[int, int], ...], device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    return [torch.randn(out, into, device=device).to(dtype) for into, out in sizes]


def _products(
    chain: list[list[torch.Tensor]], rows: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Returns the seconds of all products of the chain with `rows` rows."""
    inputs = {
        w.shape[1]: torch.randn(rows, w.shape[1], device=device).to(dtype)
        for weights in chain
        for w in weights
    }
    outs = {
        w.shape[0]: torch.empty(rows, w.shape[0], device=device, dtype=dtype)
        for weights in chain
        for w in weights
    }

    def run() -> None:
        for weights in chain:
            for w in weights:
                torch.mm(inputs[w.shape[1]], w.t(), out=outs[w.shape[0]])

    if device.type != "cuda":
        return _seconds(run, False)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph
    ):  # without launches between them, which few rows would be measured by
        run()
    return _seconds(graph.replay, True)


def _seconds(work: Callable[[], object], cuda: bool) -> float:
    """Returns the median seconds of several rounds, after an uncounted one."""
    work()
    taken = []
    for _ in range(ROUNDS):
        if not cuda:
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return float(np.median(taken))

"""Measures when prefix groups pay: a layer's attention with groups and without, and the cost model.

    python benchmarks/prefix_groups.py [--device cuda] [--times FILE] [--out FILE]
                                       [--shapes 32/8/64,...] [--warm]

Measures uniform steps (members x shared tokens x groups x own tokens), then mixed ones whose groups
each rule chooses itself; fits the constants of `kernels.sharing.MeasuredSharing` and prints the
cost of the rules' choices (`prefix_groups_fit.py`). --times reads an earlier run's --out file and
measures nothing. --warm only compiles kernels; one process a shape compiles them side by side.

On a GPU a call is in a CUDA graph, as in a step, after a write of 64 MB, because in a step a
layer's weights pass through the L2 between two attentions; the write's own time is subtracted.
Shared blocks are truly shared: rows that stand alone find them in the L2 too. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from prefix_groups_fit import RULES, Mixed, Part, Shape, Step, Times, show

from penstock.execute.padding import group_capacity, padded
from penstock.kernels.choose import choose
from penstock.kernels.inputs import AttentionKind, DecodeInputs, GroupInputs, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.prefix_cost import prefix_cost_times
from penstock.schedule.prefix_groups import SharingCosts

BOUND = 8192  # tokens that a row may have, as far as a launch on a GPU knows
MOST_ROWS, MOST_READ = 8192, 1 << 22  # rows of a step; shared tokens that its rows see
FLUSH_BYTES = 64 << 20
SHAPES: list[Shape] = [(32, 8, 64), (32, 8, 128), (14, 2, 64), (16, 16, 128)]
CPU_SHAPES: list[Shape] = [(4, 2, 64), (14, 2, 64)]


class Bench:
    """One head shape's KV on a device, and steps over it."""

    def __init__(self, device: torch.device, shape: Shape, blocks: int) -> None:
        self.device, self.shape = device, shape
        self.heads, self.kv_heads, self.width = shape
        dtype = torch.bfloat16
        ops = choose(device, dtype)
        self.ops = ops
        # as they are in the tree
        self.costs = SharingCosts(**asdict(prefix_cost_times(ops, *shape, dtype, device)))
        self.kv = torch.empty(
            blocks + 1, self.kv_heads, 2, 16, self.width, dtype=dtype, device=device
        )
        for part in self.kv.split(65536):
            part.normal_()
        self.order = torch.randperm(blocks, device=device, dtype=torch.int32) + 1
        self.gpu = device.type == "cuda"
        self.flushed = torch.empty(FLUSH_BYTES if self.gpu else 0, dtype=torch.uint8, device=device)
        self.flush_ms: dict[int, float] = {}
        self.graphs = Graphs() if self.gpu else None

    def step(self, parts: list[Part], chosen: int) -> tuple[torch.Tensor, StepInputs]:
        """Returns queries and inputs of a step whose first `chosen` parts are grouped."""
        rows = sum(part.members for part in parts)
        size = padded(rows) if self.gpu else rows
        table = np.zeros(
            (rows + 1, max(part.tokens // 16 + -(-part.own // 16) for part in parts)), np.int32
        )
        length, skip = np.zeros(rows + 1, np.int32), np.zeros(size, np.int32)
        chosen = min(chosen, self.room(parts))
        start, used = [0], 0
        for number, part in enumerate(parts):
            first, last = start[-1], start[-1] + part.members
            shared, own = part.tokens // 16, -(-part.own // 16)
            table[first:last, :shared] = np.arange(used, used + shared)
            used += shared
            table[first:last, shared : shared + own] = np.arange(
                used, used + part.members * own
            ).reshape(-1, own)
            used += part.members * own
            length[first:last] = part.tokens + part.own - 1
            skip[first:last] = part.tokens if number < chosen else 0
            start.append(last)
        on = self._on
        taken = self.order[on(table.reshape(-1)).long()].view(table.shape)
        taken[-1] = 0
        ids = on(np.minimum(np.arange(size, dtype=np.int32), rows))
        groups = self._groups(parts, start, taken, size, chosen) if chosen else None
        bound = BOUND if self.gpu else int((length[:rows] + 1 - skip[:rows]).max())
        decode = DecodeInputs(
            ids, on(length)[ids.long()], taken, on(length), on(skip), bound, groups
        )
        fused = torch.randn(
            size, (self.heads + 2 * self.kv_heads) * self.width, device=self.device
        ).to(self.kv.dtype)
        q = fused[:, : self.heads * self.width].view(size, self.heads, self.width)
        return q, StepInputs(ids, ids, size, decode, None)

    def room(self, parts: list[Part]) -> int:
        """Returns the number of groups that a step of these parts has room for."""
        return (
            group_capacity(padded(sum(part.members for part in parts))) if self.gpu else len(parts)
        )

    def _groups(
        self, parts: list[Part], start: list[int], table: torch.Tensor, size: int, chosen: int
    ) -> GroupInputs:
        capacity = group_capacity(size) if self.gpu else chosen
        bounds = np.full(capacity + 1, start[chosen], np.int32)
        bounds[: chosen + 1] = start[: chosen + 1]
        tokens = np.zeros(capacity, np.int32)
        tokens[:chosen] = [part.tokens for part in parts[:chosen]]
        blocks = torch.zeros(capacity, table.shape[1], dtype=torch.int32, device=self.device)
        blocks[:chosen] = table[torch.tensor(start[:chosen], device=self.device)]
        return GroupInputs(
            self._on(bounds), blocks, self._on(tokens), bounds.tolist(), tokens.tolist()
        )

    def _on(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device)

    def ms(self, parts: list[Part], chosen: int) -> float:
        """Returns the milliseconds of one layer's attention."""
        q, inputs = self.step(parts, chosen)
        kind = AttentionKind(self.heads, self.kv_heads, self.width, 0, None, self.width**-0.5)
        turned = torch.zeros(
            int(inputs.positions.max()) + 1, 2, self.width // 2, device=self.device
        )
        plan = self.ops.plan(inputs, kind, turned, q.dtype)

        def work() -> torch.Tensor:
            return self.ops.attention(q, LayerKv.plain(self.kv), inputs, kind, plan)

        if self.graphs is None:
            return host_ms(work)
        read = sum(part.members * (part.tokens + part.own) for part in parts)
        calls = 12 if read < 300_000 else 4 if read < 1_500_000 else 2

        def flushed() -> None:
            self.flushed.zero_()
            work()

        if calls not in self.flush_ms:
            self.flush_ms[calls] = self.graphs.ms(lambda: self.flushed.zero_(), calls, 15)
        return self.graphs.ms(flushed, calls, 5) - self.flush_ms[calls]

    def both(self, parts: list[Part]) -> Step:
        room, tile = min(self.room(parts), len(parts)), self.costs.tile_members
        return Step(self.shape, tile, room, parts, self.ms(parts, 0), self.ms(parts, room))

    def by_rules(self, parts: list[Part]) -> Mixed:
        """Times a mixed step under each rule; equal choices are measured once."""
        found: dict[tuple[int, ...], float] = {}
        times, groups = {}, {}
        for name, rule in RULES.items():
            chosen = tuple(rule(parts, self.costs)[: self.room(parts)])
            if chosen not in found:
                rest = [number for number in range(len(parts)) if number not in chosen]
                found[chosen] = self.ms([parts[number] for number in (*chosen, *rest)], len(chosen))
            times[name], groups[name] = found[chosen], len(chosen)
        return Mixed(self.shape, sum(part.members for part in parts), times, groups)


class Graphs:
    """Times work in successive CUDA graphs that share one memory pool; the first graph keeps the
    pool alive."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.first = self.captured(lambda: torch.zeros(1, device="cuda"), 1)

    def captured(self, work: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool)
        for _ in range(calls):
            work()
        graph.capture_end()
        return graph

    def ms(self, work: Callable[[], object], calls: int, rounds: int) -> float:
        """Returns the milliseconds of one call: the median replay's share."""
        work()
        torch.cuda.synchronize()
        graph = self.captured(work, calls)
        return statistics.median([replayed(graph) for _ in range(rounds + 1)][1:]) / calls


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def host_ms(work: Callable[[], object], least: float = 0.03) -> float:
    """Returns the milliseconds of the fastest of several calls, because other processes use the
    machine."""
    work()
    times: list[float] = []
    while len(times) < 5 or sum(times) < least:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times) * 1e3


def uniform(shape: Shape, gpu: bool) -> list[list[Part]]:
    """Returns the uniform cases of a shape; own tokens are varied for the first shape alone."""
    members = (2, 3, 4, 8, 16, 64, 512, 1024) if gpu else (2, 3, 4, 8, 16, 64, 256)
    tokens = (16, 32, 64, 128, 256, 512, 1024, 4096) if gpu else (16, 32, 64, 128, 256, 512)
    groups, owns = ((1, 8, 64, 256), (16, 96, 512)) if gpu else ((1, 4, 16), (16, 96))
    most_rows, most_read = (MOST_ROWS, MOST_READ) if gpu else (512, 1 << 16)
    return [
        [Part(m, n, own)] * count
        for m in members
        for n in tokens
        for count in groups
        for own in (owns if shape == SHAPES[0] or not gpu else owns[1:2])
        if m * count <= most_rows and m * count * n <= most_read
    ]


def mixed(seed: int, gpu: bool) -> list[Part]:
    """Draws groups of any size beside rows alone."""
    rng = random.Random(seed)
    budget = rng.choice([24, 120, 1000, 4000] if gpu else [24, 120])
    parts: list[Part] = []
    while (rows := sum(part.members for part in parts)) < budget:
        members = min(rng.choice([1, 1, 2, 2, 3, 4, 8, 30, 200, 1024]), budget - rows)
        parts.append(
            Part(
                members, rng.choice([16, 32, 64, 128, 256, 656, 2048] if gpu else [16, 64, 256]), 96
            )
        )
    return parts


def blocks_for(cases: list[list[Part]]) -> int:
    return max(
        sum(part.tokens // 16 + part.members * -(-part.own // 16) for part in parts)
        for parts in cases
    )


def warm(device: torch.device, shape: Shape) -> None:
    """Compiles the kernels of the cases."""
    bench = Bench(device, shape, 1 << 16)
    for rows in (2, 8, 64, 264, 1152):
        for parts in ([Part(rows, 64, 16)], [Part(2, 64, 16)] * (rows // 2)):
            bench.both(parts)


def measured(device: torch.device, shapes: list[Shape], mixes: int) -> Times:
    gpu = device.type == "cuda"
    times = Times(torch.cuda.get_device_name(device) if gpu else "cpu", {}, [], [])
    for shape in shapes:
        cases = uniform(shape, gpu)
        drawn = [mixed(seed, gpu) for seed in range(mixes)]
        bench = Bench(device, shape, blocks_for(cases + drawn))
        begun = time.monotonic()
        times.tree[str(shape)] = asdict(bench.costs)
        times.steps += [bench.both(parts) for parts in cases]
        times.mixed += [bench.by_rules(parts) for parts in drawn]
        print(
            f"{shape}: {len(cases)} + {mixes} steps in {time.monotonic() - begun:.0f} s", flush=True
        )
        del bench
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--mixed", type=int, default=24, help="mixed steps of a shape")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--table", action="store_true", help="print every uniform step too")
    asked = parser.parse_args()
    if asked.times:
        show(Times.read(asked.times), asked.table)
        return
    device = torch.device(asked.device)
    shapes = SHAPES if device.type == "cuda" else CPU_SHAPES
    if asked.shapes:
        shapes = [tuple(int(n) for n in one.split("/")) for one in asked.shapes.split(",")]  # type: ignore[misc]
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # the usual one cannot be captured
    if asked.warm:
        for shape in shapes:
            warm(device, shape)
        return
    times = measured(device, shapes, asked.mixed)
    if asked.out:
        asked.out.write_text(json.dumps(asdict(times)))
    show(times, asked.table)


if __name__ == "__main__":
    main()

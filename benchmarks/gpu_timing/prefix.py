"""Times shared prefixes on a GPU: a launch of `_prefix` by tile, beside the limit of its products.

    PYTHONPATH=src python benchmarks/gpu_timing/prefix.py [--width 128] [--eight 0 2]
        [--members 128 1024] [--warm I/N]

8 groups with 656 shared tokens each, as in monkeys, at the heads of a model of that width. A time
is the median of replays of a graph that holds the launch ten times. `off` is the largest difference
from the default tile's answer. --warm compiles the I-th of N parts of the tiles and measures
nothing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from kernels_naive import stored_in

from penstock.kernels.triton.attention import prefix

B, GPU = torch.bfloat16, torch.device("cuda")
GROUPS, SHARED, CALLS = 8, 656, 10
# Llama-3.2-1B; Qwen3-30B-A3B, Llama-3-8B; Gemma 3 4B
HEADS = {
    64: [(32, 8)],
    128: [(32, 4), (32, 8)],
    256: [(8, 4)],
}
Tile = tuple[int, int, int, int]  # query rows, tokens, warps, stages
TILES: list[Tile] = [
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 32, 4, 2),
    (64, 32, 4, 3),
    (64, 128, 4, 2),
    (64, 128, 8, 2),
    (128, 32, 8, 2),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
    (128, 64, 4, 2),
]


class Case:
    """One model's heads and one number of rows."""

    def __init__(self, heads: int, kv_heads: int, width: int, members: int, eight: int) -> None:
        per = -(-SHARED // 16)
        torch.manual_seed(0)
        plain = torch.randn(GROUPS * per + 1, kv_heads, 2, 16, width, device=GPU)
        self.kv = stored_in(plain.to(B), eight)
        rows = GROUPS * members
        fused = torch.randn(rows, (heads + 2 * kv_heads) * width, device=GPU, dtype=B)
        self.q = fused[:, : heads * width].view(rows, heads, width)
        self.start = torch.full((65,), rows, dtype=torch.int32, device=GPU)
        self.start[: GROUPS + 1] = torch.arange(GROUPS + 1) * members
        self.blocks = torch.zeros(64, per, dtype=torch.int32, device=GPU)
        self.blocks[:GROUPS] = 1 + torch.randperm(GROUPS * per, device=GPU).view(GROUPS, per)
        self.length = torch.zeros(64, dtype=torch.int32, device=GPU)
        self.length[:GROUPS] = SHARED
        self.flops = 4.0 * rows * heads * width * SHARED

    def state(self, tile: Tile) -> prefix.PrefixState:
        prefix._shape = lambda *_, **__: tile
        return prefix.PrefixState.of(tuple(self.q.shape), B, GPU, self.kv.kv_heads, 64)

    def launch(self, state: prefix.PrefixState) -> None:
        scale = self.q.shape[2] ** -0.5
        prefix.attend_prefixes(self.q, self.kv, self.start, self.blocks, self.length, scale, state)

    def answer(self, tile: Tile) -> torch.Tensor:
        """Returns the answer [S, H, D] over all parts; parts that the prefix does not reach stay
        unwritten."""
        state = self.state(tile)
        state.answer.zero_()
        state.lse.fill_(-torch.inf)
        self.launch(state)
        share = torch.softmax(state.lse * 0.6931471805599453, -1)
        return (state.answer * share[..., None]).sum(2)

    def ms(self, tile: Tile) -> float:
        state, graph = self.state(tile), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                self.launch(state)
        return float(do_bench(graph.replay, warmup=10, rep=40, return_mode="median")) / CALLS


def measure(case: Case, what: str) -> None:
    wanted = case.answer(TILES[0])
    for tile in TILES:
        try:
            off = float((case.answer(tile) - wanted).abs().max())
            ms = case.ms(tile)
        except Exception as error:  # noqa: BLE001 - a tile that doesn't fit is a row of the table
            print(f"{what:44s} {tile!s:18s} {type(error).__name__}", flush=True)
            continue
        rate = case.flops / ms / 1e9
        print(
            f"{what:44s} {tile!s:18s} {1e3 * ms:9.1f} us  {rate:5.0f} TFLOP/s  off {off:.1g}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, nargs="*", default=[*HEADS], choices=[*HEADS])
    parser.add_argument(
        "--eight", type=int, nargs="*", default=[0, 2], help="what is in eight bits: 1 V, 2 K and V"
    )
    parser.add_argument(
        "--members", type=int, nargs="*", default=[128, 1024], help="rows of a group"
    )
    parser.add_argument("--warm", help="I/N: compile alone")
    asked = parser.parse_args()
    part, parts = map(int, (asked.warm or "0/1").split("/"))
    heads = [(width, *each) for width in asked.width for each in HEADS[width]]
    for (width, of_q, of_kv), eight, members in itertools.product(
        heads, asked.eight, asked.members
    ):
        case = Case(of_q, of_kv, width, members, eight)
        if asked.warm:
            _compile(case, TILES[part::parts])
        else:
            kv = ("K and V wide", "V in 8 bits", "K, V in 8 bits")[eight]
            measure(case, f"{of_q}/{of_kv} heads of {width}, {kv}, 8 x {members} rows")


def _compile(case: Case, tiles: list[Tile]) -> None:
    for tile in tiles:
        try:
            case.launch(case.state(tile))
        except Exception as error:  # noqa: BLE001 - as in measure
            print(tile, type(error).__name__, flush=True)


if __name__ == "__main__":
    main()

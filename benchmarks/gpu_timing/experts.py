"""Times experts on a GPU, at a model's sizes: the whole operation and its launches.

    PYTHONPATH=src python benchmarks/gpu_timing/experts.py [--shape qwen3-30b] [--kinds plain
        channel] [--sweep] [--tokens 1 16 128 1000] [--warm I/N]

A time is the median of replays of a graph that holds the call several times. "share": the time that
the weights of all used experts need at copy speed, over the measured time. "dense": a product by
one matrix of the same numbers, with the experts stacked, and as many rows as an expert has on
average: the same operations, the same bytes. --sweep times other plans; --warm compiles the I-th of
N parts of them and measures nothing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import rows as timing

from penstock.kernels.expert_matrix import ExpertMatrix, Experts
from penstock.kernels.fixed_row import to_fixed
from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.routing import Routing
from penstock.kernels.triton.experts import moe, moe_four, moe_one, moe_route
from penstock.kernels.triton.linear.fp8 import quantize_rows
from penstock.kernels.triton.linear.linear import linear, prepare_linear
from penstock.kernels.triton.linear.linear_four import Band
from penstock.kernels.triton.linear.linear_fp4 import linear_fp4
from penstock.kernels.triton.linear.linear_fp8 import linear_fp8, prepare_linear_fp8
from penstock.kernels.triton.linear.linear_groups import (
    linear_int,
    prepare_linear_fp8_groups,
    prepare_linear_int,
)
from penstock.kernels.triton.linear.stream_fp4 import fp4_weight

B, GPU = torch.bfloat16, torch.device("cuda")
Cuts = tuple[moe_one.OneCut, moe_one.OneCut] | tuple[Band, Band]


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    inner: int
    corrected: bool = False  # sigmoids, and a correction for the choice
    groups: int = 1
    kept: int = 1


SHAPES = {
    "qwen3-30b": Shape(128, 8, 2048, 768),
    "qwen3-30b-tp2": Shape(128, 8, 2048, 384),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "olmoe": Shape(64, 8, 2048, 1024),
    "glm-4.5-air": Shape(128, 8, 4096, 1408, corrected=True),
    "glm-4.7-flash": Shape(64, 4, 2048, 1536, corrected=True),
    "moonlight": Shape(64, 6, 2048, 1408, corrected=True),
    "ernie-4.5-21b": Shape(64, 6, 2560, 1536, corrected=True),
    "qwen3.5-35b": Shape(256, 8, 2048, 512),
    "gemma-4-26b": Shape(128, 8, 2816, 704),
    "deepseek-v3-tp8": Shape(256, 8, 7168, 256, corrected=True, groups=8, kept=4),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),  # and -120b's with 128 experts
}


def made(shape: Shape, kind: str) -> Experts:
    routing = Routing(
        top_k=shape.top_k,
        renormalise=True,
        sigmoid=shape.corrected,
        groups=shape.groups,
        kept_groups=shape.kept,
    )
    return Experts(
        _matrix(shape.experts, 2 * shape.inner, shape.hidden, kind),
        _matrix(shape.experts, shape.hidden, shape.inner, kind),
        routing,
        B,
        clamp=(1.702, 7.0) if kind == "mxfp4" else None,
        # small beside the sigmoids, so that tokens choose different experts
        correction=0.01 * torch.randn(shape.experts, device=GPU) if shape.corrected else None,
    )


def _matrix(experts: int, n: int, k: int, kind: str) -> ExpertMatrix:
    if kind == "mxfp4":
        bits = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=GPU)
        powers = torch.randint(116, 122, (experts, n, k // 32), dtype=torch.uint8, device=GPU)
        return ExpertMatrix(bits, powers, torch.zeros((experts, n), dtype=B, device=GPU))
    if kind == "nvfp4":
        bits = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=GPU)
        scales = torch.randint(60, 110, (experts, n, k // 16), dtype=torch.uint8, device=GPU).view(
            E4M3
        )
        return ExpertMatrix(
            bits, scales, whole=torch.full((experts, n), 1e-4, dtype=torch.float64, device=GPU)
        )
    numbers = torch.empty((experts, n, k), dtype=B, device=GPU).normal_(0, 0.02)
    if kind == "plain":
        return ExpertMatrix(numbers)
    if kind in ("int4", "int8"):
        groups, shape = (k // 128, (experts, n, k // 2)) if kind == "int4" else (1, (experts, n, k))
        bits = torch.randint(0, 256, shape, dtype=torch.uint8, device=GPU)
        scales = torch.full((experts, n, groups), 1e-3, dtype=B, device=GPU)
        return ExpertMatrix(bits if kind == "int4" else bits.view(torch.int8), scales)
    groups = () if kind == "channel" else (-(-k // 128),)
    scale = torch.full((experts, n, *groups), 1e-4, device=GPU)
    return ExpertMatrix((numbers * 1e4).clamp(-448, 448).to(E4M3), scale)


def variants(own: moe.Plan, four: bool) -> list[moe.Plan]:
    """Returns the default plan and others: first with another cut of the first product, then of the
    second. four: four-bit weights, of which a program takes at most 128 neighbours."""
    found, gate, down, less = [own], own.gate_up, own.down, 4 if four else 1
    heights = (
        {16, 32, 64, 128} & {gate.rows // 2, gate.rows, gate.rows * 2}
        if own.sorted
        else {gate.rows}
    )
    inputs_of = (64, 128) if four else (64, 128, 256)
    cuts = list(itertools.product(sorted(heights), (32, 64, 128), inputs_of, (3, 4, 6), (4, 8)))
    for rows, outputs, inputs, stages, warps in cuts:
        scaled = down.form != "wide" and not own.scaled_by_row and outputs % down.inputs
        if shared(rows, 2 * outputs // less, inputs, stages, gate.form) and not scaled:
            cut = moe.Cut(rows, outputs, inputs, stages, warps, gate.form)
            found.append(replace(own, gate_up=cut, down=replace(down, rows=rows)))
    for rows, outputs, inputs, stages, warps in cuts:
        scaled = down.form != "wide" and not own.scaled_by_row and gate.outputs % inputs
        if (
            rows == gate.rows
            and shared(rows, outputs // less, inputs, stages, down.form)
            and not scaled
        ):
            found.append(
                replace(own, down=moe.Cut(rows, outputs, inputs, stages, warps, down.form))
            )
    return found


def shared(rows: int, outputs: int, inputs: int, stages: int, form: str) -> bool:
    """Returns True if the tiles of all stages fit a program's shared memory, roughly."""
    size = 2 if form == "wide" else 1
    held = (outputs + rows * (2 if form == "pair" else 1)) * inputs * size * stages
    return 16_000 <= held <= 220_000


def least_ms(of: Experts, tokens: int) -> float:
    """Returns the milliseconds that the used experts' weights take at copy speed, for evenly drawn
    routes."""
    count = of.shape[0]
    used = count * (1 - (1 - of.top_k / count) ** tokens)
    each = sum(m.numbers[0].numel() * m.numbers.element_size() for m in (of.gate_up, of.down))
    return used * each / timing.COPY[0] * 1e3


def measure(name: str, kind: str, tokens: int, sweep: bool, part: tuple[int, int] | None) -> None:
    shape = SHAPES[name]
    many = (
        1 if part else max(1, min(8, int(6e9 // (shape.experts * shape.inner * shape.hidden * 6))))
    )
    layers = [moe.prepare_experts(made(shape, kind)) for _ in range(many)]
    of = layers[0].of
    x = torch.randn(tokens, shape.hidden, dtype=B, device=GPU)
    scores = [torch.randn(tokens, shape.experts, dtype=B, device=GPU) for _ in layers]
    own = moe.plan_of(tokens, of)
    plans: list[moe.Plan | Cuts | None] = (
        [*variants(own, of.gate_up.in_four_bits)] if sweep else [own]
    )
    if tokens == 1 and (moe_one.takes_one(of) or moe_four.takes_four(of)):
        plans = [None, *plans, *(cuts_of_one(of) if sweep else [])]
    for number, plan in enumerate(plans):
        if part and number % part[1] != part[0]:
            continue
        calls = [
            lambda at=at, s=s, plan=plan: run(x, s, at, plan)
            for at, s in zip(layers, scores, strict=True)
        ]
        try:
            if part:
                calls[0]()
                continue
            ms = timing.timed(calls)
        except triton.runtime.errors.OutOfResources:
            for at in layers:
                at.counts.zero_()  # what would have left them so was not launched
            continue
        share = least_ms(of, tokens) / ms
        print(
            f"{name} {kind} {tokens:5d} {ms * 1e3:9.1f} us {share:6.1%}  {told(plan)}", flush=True
        )
    if not part and not sweep:
        parts_of(layers, scores, x, own)


def run(x: Tensor, scores: Tensor, at: moe.PreparedExperts, plan: moe.Plan | Cuts | None) -> Tensor:
    """Runs the experts with a plan; None: the model's choice."""
    if isinstance(plan, tuple):
        routes = moe_route.route(scores, at.of.routing, at.counts, 0, at.of.correction)
        if isinstance(plan[0], Band):
            row = quantize_rows(x, "fixed")
            return moe_four.one_token_of_four(row, routes, at.of, plan)
        return moe_one.one_token(x, routes, at.of, plan)
    return moe.experts(x, scores, at, plan=plan)


def cuts_of_one(of: Experts) -> list[Cuts]:
    """Returns other cuts of one token's products: first of gate and up, then of down."""
    if moe_four.takes_four(of):
        gate_up, down = moe_four.bands_of(of)
        sizes = itertools.product((8, 16, 32), (8, 16, 32, 64), (2, 4, 8))
        bands = [Band(*each, 1) for each in sizes if 64 <= each[0] * each[1] // each[2] <= 256]
        return [(b, down) for b in bands if b.outputs > 8] + [(gate_up, b) for b in bands]
    first, second = moe_one.cuts_of(of)
    most = 128 if of.gate_up.by_group or of.down.by_group else 2048
    every = [
        moe_one.OneCut(*cut)
        for cut in itertools.product((1, 2, 4, 8), (128, 256, 512, 1024, 2048), (1, 2, 4, 8))
    ]
    some = [
        cut
        for cut in every
        if cut.inputs <= most and 8 <= cut.outputs * cut.inputs // (32 * cut.warps) <= 64
    ]
    return [(cut, second) for cut in some] + [(first, cut) for cut in some if cut.inputs <= 1024]


def told(plan: moe.Plan | Cuts | None) -> str:
    if plan is None:
        return "as it runs"
    if isinstance(plan, tuple):
        return " | ".join(
            f"{c.outputs}x{c.chunks if isinstance(c, Band) else c.inputs} w{c.warps}" for c in plan
        )
    cuts = (
        f"{c.rows}x{c.outputs}x{c.inputs} s{c.stages} w{c.warps} {c.form}"
        for c in (plan.gate_up, plan.down)
    )
    return " | ".join(cuts)


def parts_of(
    layers: list[moe.PreparedExperts], scores: list[Tensor], x: Tensor, plan: moe.Plan
) -> None:
    """Times each launch by itself, and the two products beside dense ones."""
    of, tokens = layers[0].of, x.shape[0]
    rows = plan.gate_up.rows if plan.sorted else 0
    routes = [
        moe_route.route(s, of.routing, torch.zeros_like(at.counts), rows)
        for at, s in zip(layers, scores, strict=True)
    ]

    def routed(at: moe.PreparedExperts, s: Tensor) -> None:
        at.counts.zero_()
        moe_route.route(s, of.routing, at.counts, rows)

    pairs = list(zip(layers, routes, strict=True))
    ms = timing.timed(
        [lambda at=at, s=s: routed(at, s) for at, s in zip(layers, scores, strict=True)]
    )
    for at in layers:
        at.counts.zero_()
    ready = moe._in_form(x, plan.gate_up.form)
    first = timing.timed(
        [lambda at=at, r=r: moe._gate_up(ready, at.of, r, plan) for at, r in pairs]
    )
    middle = moe._gate_up(ready, of, routes[0], plan)
    out = torch.empty((tokens * of.top_k, x.shape[1]), dtype=B, device=GPU)
    second = timing.timed(
        [
            lambda at=at, r=r: moe._launch(
                middle, at.of.down, out, None, of, r, plan.down, plan.gate_up.outputs, plan.sorted
            )
            for at, r in pairs
        ]
    )
    print(
        f"    routes and a memset {ms * 1e3:.1f}, gate and up {first * 1e3:.1f}, down"
        f" {second * 1e3:.1f} us",
        flush=True,
    )
    dense = [
        dense_ms(matrix, -(-tokens * of.top_k // of.shape[0])) for matrix in (of.gate_up, of.down)
    ]
    share = sum(dense) / (first + second)
    print(
        f"    dense {dense[0] * 1e3:.1f} and {dense[1] * 1e3:.1f} us: {share:.0%} of their pace",
        flush=True,
    )


def dense_ms(experts: ExpertMatrix, rows: int) -> float:
    """Returns the milliseconds of rows @ the stacked experts,
    by the dense product of their kind."""
    numbers = experts.numbers.flatten(0, 1)
    x = torch.randn(
        rows, numbers.shape[1] * (2 if experts.in_four_bits else 1), dtype=B, device=GPU
    )
    if experts.scale is None:
        wide = prepare_linear(numbers)
        return timing.timed([lambda: linear(x, wide)])
    if experts.in_fp4:
        scale = torch.full(
            (len(numbers), numbers.shape[1] // 8), 60, device=GPU, dtype=torch.uint8
        ).view(E4M3)
        floats = fp4_weight(
            numbers, scale, torch.ones(len(numbers), dtype=torch.float64, device=GPU), B
        )
        return timing.timed([lambda: linear_fp4(to_fixed(x) if rows == 1 else x, floats)])
    scale = experts.scale.flatten(0, 1)
    if experts.in_eight_bits and not experts.by_group:
        eight = prepare_linear_fp8(numbers, scale, B)
        ready = moe._in_form(x, eight.form(rows))
        return timing.timed([lambda: linear_fp8(ready, eight)])
    if experts.in_eight_bits:
        matrix = prepare_linear_fp8_groups(numbers, scale, B)
    else:
        matrix = prepare_linear_int(numbers, scale, None, B)
    return timing.timed([lambda: linear_int(x, matrix)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b")
    kinds = ["plain", "channel", "blocks", "int4", "int8", "mxfp4", "nvfp4"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds[:2])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 1000, 4096]
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--warm", help="I/N")
    asked = parser.parse_args()
    part = tuple(int(number) for number in asked.warm.split("/")) if asked.warm else None
    for kind, tokens in itertools.product(asked.kinds, asked.tokens):
        measure(asked.shape, kind, tokens, asked.sweep, part)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

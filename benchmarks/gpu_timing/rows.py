"""Times the Triton kernels on a GPU, except attention, beside torch's and the copy speed.

    PYTHONPATH=src python benchmarks/gpu_timing/rows.py [--sweep] [--warm I/N]
        [--only small,elementwise,sampler,linear,fp8,int,fp4,chain,rotary] [--rows 1,16 ...]

A time is the median of replays of a CUDA graph that holds the call several times, over buffers that
together exceed the L2 (so weights and rows come from memory, as in a step). "share" is of the copy
speed measured first: bytes that must move / time. --sweep times other cuts of the kernels; --warm
compiles the I-th of N parts of them and measures nothing.
"""

# ruff: noqa: B023  (closures are called before their loop goes on)

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from kernels_naive import rotate

from penstock.kernels.fixed_row import FixedRow, to_fixed
from penstock.kernels.fp8_rows import Rows
from penstock.kernels.inputs import AttentionKind, Queries
from penstock.kernels.int_matrix import pack_four
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton import pdl
from penstock.kernels.triton.attention import blocks, one_row_attention
from penstock.kernels.triton.attention import rotary_and_store as rotary
from penstock.kernels.triton.elementwise import activation, embedding, norm
from penstock.kernels.triton.linear import (
    fp8,
    linear_fp4,
    linear_fp8,
    linear_groups,
    one_row,
    stream_fp4,
    stream_groups,
)
from penstock.kernels.triton.linear.linear import linear as linear_op
from penstock.kernels.triton.linear.linear import prepare_linear
from penstock.kernels.triton.linear.linear_four import Band, lone_product
from penstock.kernels.triton.linear.linear_small import (
    Cut,
    SmallWeight,
    linear_small,
    prepare_small,
)
from penstock.kernels.triton.sampling import advance, logprobs, penalties
from penstock.kernels.triton.sampling import row_state as step_rows
from penstock.kernels.triton.sampling import sample as sampler
from penstock.quant.fp8 import to_fp8

B, GPU = torch.bfloat16, torch.device("cuda")
COPY = [4.2e12]  # bytes/s, measured by main
SHAPES = {
    "1b": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)],
    "8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
}
CUTS = [
    Cut(16, 256, 1, 4, 4),
    Cut(16, 256, 2, 4, 4),
    Cut(16, 256, 4, 4, 4),
    Cut(16, 128, 1, 4, 6),
    Cut(16, 512, 1, 4, 3),
    Cut(16, 512, 2, 4, 3),
    Cut(16, 512, 1, 8, 4),
    Cut(32, 128, 1, 4, 5),
    Cut(32, 256, 1, 4, 4),
    Cut(32, 256, 2, 4, 4),
    Cut(32, 256, 4, 4, 4),
    Cut(64, 128, 1, 4, 4),
    Cut(64, 128, 4, 4, 4),
    Cut(64, 128, 8, 4, 4),
    Cut(64, 256, 4, 8, 3),
    Cut(128, 128, 4, 8, 4),
]
BANDS = [
    Band(16, 64, 8, 2),
    Band(16, 32, 8, 4),
    Band(16, 32, 8, 2),
    Band(16, 32, 4, 2),
    Band(16, 32, 4, 4),
    Band(32, 32, 8, 2),
    Band(16, 64, 16, 2),
]
SHORT_BANDS = [
    Band(16, 64, 8, 2),
    Band(16, 32, 8, 2),
    Band(16, 32, 8, 4),
    Band(16, 16, 8, 4),
    Band(16, 32, 16, 2),
    Band(16, 64, 16, 2),
    Band(16, 32, 4, 2),
    Band(32, 32, 8, 2),
]
CUTS_OF_GROUPS = [
    (32, 2, 4),
    (64, 1, 4),
    (64, 2, 3),
    (64, 2, 4),
    (64, 2, 6),
    (64, 4, 4),
    (128, 4, 4),
]


def timed(calls: list[Callable[[], object]], rounds: int = 7, least: int = 20) -> float:
    """Returns the milliseconds of one call; the calls take turns in a graph."""
    many = max(1, -(-least // len(calls))) * len(calls)
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(many):
            calls[i % len(calls)]()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / many)
    return statistics.median(times[1:])


def tell(name: str, ms: float, size: float | None = None, plain: float | None = None) -> None:
    share = f"{size / ms * 1e3 / COPY[0]:6.1%}" if size else "      "
    beside = f"{plain:9.4f}" if plain else ""
    print(f"{name:52s} {ms:9.4f} ms  share {share}  torch {beside}", flush=True)


def copies_of(size: int) -> int:
    return max(2, min(48, -(-200_000_000 // size)))


def elementwise() -> None:
    for rows in (1, 64, 1024, 8192):
        for d, inner, heads, kv_heads, width in (
            (2048, 8192, 32, 8, 64),
            (4096, 14336, 32, 8, 128),
        ):
            n = copies_of(rows * d * 2)
            xs = [torch.randn(rows, d, device=GPU, dtype=B) for _ in range(n)]
            rs = [torch.randn(rows, d, device=GPU, dtype=B) for _ in range(n)]
            w = torch.ones(d, device=GPU, dtype=B)
            ms = timed(
                [
                    lambda x=x, r=r: norm.add_rms_norm(x, r, w, 1e-5)
                    for x, r in zip(xs, rs, strict=True)
                ]
            )
            plain = timed([lambda x=x: F.rms_norm(x, (d,), w, 1e-5) for x in xs])
            tell(f"add_rms_norm {rows} x {d} (torch: norm alone)", ms, rows * d * 8, plain)
            gs = [
                torch.randn(rows, 2 * inner, device=GPU, dtype=B)
                for _ in range(copies_of(rows * inner * 4))
            ]
            tell(
                f"silu_mul {rows} x {inner}",
                timed([lambda g=g: activation.silu_mul(g) for g in gs]),
                rows * inner * 6,
            )
            parts = heads + 2 * kv_heads
            qs = [
                torch.randn(rows, parts * width, device=GPU, dtype=B)
                for _ in range(copies_of(rows * parts * width * 2))
            ]
            kv = torch.zeros(8192 * 4, kv_heads, 2, 16, width, device=GPU, dtype=B)
            slots = torch.randperm(8192 * 4 * 16, device=GPU)[:rows]
            where = SimpleNamespace(positions=torch.arange(rows, device=GPU), slots=slots)
            table = torch.randn(8192, 2, width // 2, device=GPU)
            calls = [
                lambda q=q: rotate(rotary, q, table, where, kv, heads, kv_heads, width) for q in qs
            ]
            tell(
                f"rotary_and_store {rows} x {heads}+2*{kv_heads} x {width}",
                timed(calls),
                rows * parts * width * 4,
            )
            ids = torch.randint(128256, (rows,), device=GPU)
            big = torch.randn(128256, d, device=GPU, dtype=B)
            tell(
                f"embed {rows} x {d}",
                timed([lambda: embedding.embed(ids, big)]),
                rows * d * 4,
                timed([lambda: big.index_select(0, ids)]),
            )
    layers = [torch.zeros(4096, 8, 2, 16, 64, device=GPU, dtype=B) for _ in range(16)]
    copier = blocks.BlockCopier(layers)
    for count in (1, 1000):
        src, dst = torch.arange(count, device=GPU), torch.arange(count, device=GPU) + 2000
        tell(
            f"copy_blocks {count} x 16 layers of 32 KB",
            timed([lambda: copier.copy(src, dst)]),
            count * 16 * 65536,
        )


def small() -> None:
    from triton_kernel_cases import columns

    for rows in (64, 8192):
        cols = columns(rows, 128256, 64, "cuda")
        ids = torch.arange(rows, device=GPU, dtype=torch.int32)
        slot_token = torch.zeros((rows + 1) * 64 + 2, 16, dtype=torch.int32, device=GPU)
        out = [torch.zeros(rows, dtype=torch.int64, device=GPU) for _ in range(3)]
        queries = Queries(torch.zeros_like(ids), torch.zeros_like(ids))
        tell(
            f"prepare {rows}",
            timed([lambda: step_rows.prepare(ids, queries, cols, slot_token, 0, *out)]),
        )
        tell(f"advance {rows}", timed([lambda: advance.advance(ids, queries, ids, cols)]))
    packed = torch.full((256, step_rows.JOIN_WORDS + 64), -1, dtype=torch.int32, device=GPU)
    packed[:, 0] = torch.arange(256, device=GPU)
    tell("join 256", timed([lambda: step_rows.join(packed, cols)]))


def asking(n: int, vocabulary: int, **asks: float) -> SimpleNamespace:
    from triton_kernel_cases import columns

    cols = columns(n, vocabulary, 64, "cuda")
    told = {
        "temperature": 0.6,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "wants": 0,
        "logprobs": -1,
    } | asks
    for name, value in told.items():
        getattr(cols, name).fill_(value)
    cols.done[:n] = False
    return cols


def sampling(sweep: bool, vocabulary: int = 128256) -> None:
    for n, slices in ((1024, 8), (64, 8), (1, 40)):
        size = n * vocabulary * 2
        ids = torch.arange(n, device=GPU, dtype=torch.int32)
        scratch = sampler.SampleScratch.allocate(n, vocabulary, GPU, adjusts=True)
        out = (
            torch.empty(n, device=GPU),
            ids.clone(),
            torch.zeros(n, 0, dtype=torch.int32, device=GPU),
            torch.empty(n, 0, device=GPU),
        )
        for kind, by in (("flat", 0.02), ("peaked", 3.0)):
            many = [torch.randn(n, vocabulary, device=GPU, dtype=B).mul_(by) for _ in range(slices)]

            def run(
                name: str,
                cols: SimpleNamespace,
                filters: bool,
                of: int | None = None,
                **kinds: bool,
            ) -> None:
                calls = [
                    lambda x=x: sampler.sample_rows(
                        x, ids, ids, cols, scratch, filters=filters, adjusts=True
                    )
                    for x in many
                ]
                tell(f"sample {n} {kind} {name}", timed(calls, least=8), of)

            plain = timed([lambda x=x: x.argmax(-1) for x in many], least=8)
            tell(f"argmax {n} {kind}", plain, size)
            run("plain", asking(n, vocabulary), False, size)
            run("plain, filter launch", asking(n, vocabulary), True, size)
            run("greedy", asking(n, vocabulary, temperature=0.0), False, size)
            for told in (
                {"top_p": 0.95},
                {"top_p": 0.5},
                {"top_p": 0.1},
                {"top_k": 40},
                {"min_p": 0.05},
                {"top_k": 40, "top_p": 0.9},
            ):
                run(str(told), asking(n, vocabulary, **told), True, size)
            cols = asking(n, vocabulary, logprobs=0)
            calls = [
                lambda x=x: logprobs.logprobs_rows(x, ids, cols, ids, 0, scratch, out) for x in many
            ]
            tell(f"logprobs {n} {kind}", timed(calls, least=8), size)
            none = asking(n, vocabulary)
            calls = [
                lambda x=x: logprobs.logprobs_rows(x, ids, none, ids, 0, scratch, out) for x in many
            ]
            tell(f"logprobs {n} {kind}, nobody asks", timed(calls, least=8))
            if kind == "peaked":
                pool = torch.zeros(9, dtype=torch.int32, device=GPU)
                slot_token = torch.randint(
                    vocabulary, ((n + 1) * 64 + 2, 16), dtype=torch.int32, device=GPU
                )
                masks = torch.full((8, -(-vocabulary // 32)), -1, dtype=torch.int32, device=GPU)
                for wants in (0, 2, 32):
                    cols = asking(n, vocabulary, wants=wants, mask_slot=0)
                    calls = [
                        lambda x=x, c=cols: penalties.adjust(
                            x, ids, ids, c, slot_token, pool, pool.float(), masks, scratch
                        )
                        for x in many
                    ]
                    tell(
                        f"adjust {n} wants {wants}",
                        timed(calls, least=8),
                        size * 7 if wants else None,
                    )
            if sweep and n == 1024:
                sweep_sampler(many, ids, scratch, kind)


SUMS = [
    (16, 4, 16),
    (8, 4, 16),
    (32, 4, 16),
    (32, 8, 16),
    (16, 2, 16),
    (16, 8, 16),
    (64, 8, 16),
    (16, 4, 64),
    (32, 8, 64),
]
LISTS = [(32, 8), (16, 4), (32, 4), (16, 8), (64, 8)]


def sweep_sampler(
    many: list[torch.Tensor], ids: torch.Tensor, scratch: sampler.SampleScratch, kind: str
) -> None:
    n, vocabulary = many[0].shape
    was = sampler.TILES, sampler.SUM_WARPS, sampler.PROGRAMS
    for tiles, warps, programs in SUMS:
        sampler.TILES, sampler.SUM_WARPS, sampler.PROGRAMS = tiles, warps, programs * 132
        cols = asking(n, vocabulary)
        calls = [
            lambda x=x, c=cols: sampler.sample_rows(x, ids, ids, c, scratch, filters=False)
            for x in many
        ]
        ms = timed(calls, least=8)
        tell(
            f"  {kind} plain: {tiles} tiles, {warps} warps, {programs} programs/SM",
            ms,
            n * vocabulary * 2,
        )
    sampler.TILES, sampler.SUM_WARPS, sampler.PROGRAMS = was
    before = sampler.SOME, sampler.FILTER_WARPS
    for some, warps in LISTS:
        sampler.SOME, sampler.FILTER_WARPS = some, warps
        for told in ({"top_p": 0.95}, {"top_k": 40}):
            cols = asking(n, vocabulary, **told)
            ms = timed(
                [lambda x=x, c=cols: sampler.sample_rows(x, ids, ids, c, scratch) for x in many],
                least=8,
            )
            tell(f"  {kind} {told}: {some} tiles, {warps} warps", ms)
    sampler.SOME, sampler.FILTER_WARPS = before


def linear(sweep: bool) -> None:
    for model, shapes in SHAPES.items():
        for n, k in shapes:
            weights = [torch.randn(n, k, device=GPU, dtype=B) for _ in range(copies_of(n * k * 2))]
            for m in (1, 4, 16):
                x = torch.randn(m, k, device=GPU, dtype=B)
                plain = timed([lambda w=w, x=x: F.linear(x, w) for w in weights])
                found = []
                for cut in [None, *(CUTS if sweep and m != 4 else [])]:
                    if cut and cut.split > 1 and n > 30000:
                        continue
                    ready = [prepare_small(w, cut) for w in weights]
                    product = linear_small if cut else linear_op
                    ms = timed([lambda w=w, x=x: product(x, w) for w in ready])
                    found.append((ms, cut))
                tell(f"linear {model} {m} x {n} x {k}", found[0][0], n * k * 2, plain)
                for ms, cut in sorted(found[1:], key=lambda f: f[0])[:4]:
                    tell(f"    {cut}".replace("outputs=", "").replace("inputs=", ""), ms, n * k * 2)
            del weights
            torch.cuda.empty_cache()


def tiles_swept(m: int, n: int) -> list[linear_fp8.Tiles]:
    """Returns other cuts of a product of m rows that fit a program's memory and fill the chip."""
    cuts = itertools.product(
        (64, 128), (32, 64, 128, 256), (128, 256), (1, 2, 4), (3, 4, 6), (4, 8)
    )
    every = [linear_fp8.Tiles(*cut) for cut in cuts]
    return [
        each
        for each in every
        if 60_000 <= (each.rows + each.outputs) * each.inputs * each.stages <= 220_000
        and 60 <= triton.cdiv(n, each.outputs) * triton.cdiv(m, each.rows) * each.split <= 1200
        and each.rows * each.outputs <= 128 * 32 * each.warps
    ]


def in_tiles(
    m: int, ready: list[linear_fp8.Fp8Matrix]
) -> Callable[[linear_fp8.Tiles], list[Callable[[], object]]]:
    """Returns a function from tiles to the product's calls for m rows."""
    n, k = ready[0].streamed.weight.shape
    x = fp8.quantize_rows(torch.randn(m, k, device=GPU, dtype=B))
    parts = torch.empty(4 * triton.cdiv(m, 64) * 64 * (n + 256), device=GPU)
    arrived = torch.zeros(2 * n, dtype=torch.int32, device=GPU)
    roomy = [replace(each, parts=parts, arrived=arrived) for each in ready]
    return lambda tiles: [lambda w=w: linear_fp8.streamed_fp8(x, w, None, tiles) for w in roomy]


def sweep_float8(m: int, n: int, k: int, ready: list[linear_fp8.Fp8Matrix]) -> None:
    """Times other cuts at m rows and prints the fastest."""
    found, calls = [], in_tiles(m, ready)
    for tiles in tiles_swept(m, n):
        try:
            found.append((timed(calls(tiles)), tiles))
        except triton.runtime.errors.OutOfResources:
            continue
    for ms, tiles in sorted(found, key=lambda each: each[0])[:6]:
        tell(f"    {tiles}".replace("Tiles", ""), ms, n * k)


def float8(sweep: bool) -> None:
    """Times an 8B's products with eight-bit rows, in the form chosen for each row count, beside the
    library's."""
    for n, k in SHAPES["8b"]:
        made = [to_fp8(torch.randn(n, k, device=GPU)) for _ in range(copies_of(n * k))]
        ready = [linear_fp8.prepare_linear_fp8(numbers, scale[:, 0], B) for numbers, scale in made]
        for m in (1, 16, 17, 64, 128, 256, 1024):
            x = torch.randn(m, k, device=GPU, dtype=B)
            form, eight = ready[0].form(m), fp8.quantize_rows(x)
            rows = x if form == "wide" else fp8.quantize_rows(x, form)
            plain = timed([lambda w=w: linear_fp8.by_library(eight, w, None) for w in ready])
            ms = timed([lambda w=w: linear_fp8.linear_fp8(rows, w) for w in ready])
            tell(f"linear_fp8 8b {m} ({form}) x {n} x {k}", ms, n * k, plain)
            if sweep and m == 128:
                sweep_float8(m, n, k, ready)
        del made, ready
        torch.cuda.empty_cache()
    d, inner, w = 4096, 14336, torch.ones(4096, device=GPU, dtype=B)
    for count in (16, 128, 1024, 8192):
        form = "pair" if count <= linear_fp8.MOST_PAIRED else "eight"
        xs = [torch.randn(count, d, device=GPU, dtype=B) for _ in range(copies_of(count * d * 2))]
        gs = [
            torch.randn(count, 2 * inner, device=GPU, dtype=B)
            for _ in range(copies_of(count * inner * 4))
        ]
        size = 2 if form == "pair" else 1
        tell(
            f"quantize_rows {count} x {d}, {form}",
            timed([lambda x=x: fp8.quantize_rows(x, form) for x in xs]),
            count * d * (2 + size),
        )
        norms = [lambda x=x: norm.add_rms_norm(x, x, w, 1e-5, form) for x in xs]
        tell(f"add_rms_norm {count} x {d}, {form}", timed(norms), count * d * (6 + size))
        gates = [lambda g=g: activation.silu_mul(g, form) for g in gs]
        tell(f"silu_mul {count} x {inner}, {form}", timed(gates), count * inner * (4 + size))


def group_matrix(kind: str, n: int, k: int) -> Any:
    """Returns a prepared matrix of an 8B's layer, by the name of its number format."""
    if kind == "bf16":
        return prepare_linear(torch.randn(n, k, device=GPU, dtype=B).mul_(k**-0.5))
    octets = torch.randint(0, 255, (n, k), device=GPU, dtype=torch.uint8)
    if kind.startswith("fp8"):
        numbers = octets.clamp_(0, 120).view(torch.float8_e4m3fn)
        if kind == "fp8":
            return linear_fp8.prepare_linear_fp8(numbers, torch.full((n,), 1e-4, device=GPU), B)
        return linear_groups.prepare_linear_fp8_groups(
            numbers, torch.full((n, k // 128), 1e-4, device=GPU), B
        )
    if kind == "nvfp4":
        scale = torch.randint(60, 120, (n, k // 16), device=GPU, dtype=torch.uint8).view(
            torch.float8_e4m3fn
        )
        whole = torch.full((n,), k**-0.5 / 64, device=GPU, dtype=torch.float64)
        return linear_fp4.prepare_linear_fp4(octets[:, : k // 2], scale, whole, B)
    scale = torch.full((n, 1 if kind == "int8" else k // 128), 1e-3, device=GPU, dtype=B)
    zero = torch.full_like(scale, 7) if "zeros" in kind else None
    numbers = pack_four(octets & 15) if "int4" in kind else octets.view(torch.int8)
    return linear_groups.prepare_linear_int(numbers, scale, zero, B)


def multiplied(x: Rows, matrix: Any) -> torch.Tensor:
    if isinstance(matrix, stream_fp4.Fp4Weight):
        return linear_fp4.linear_fp4(x, matrix)
    if isinstance(x, FixedRow):
        return linear_groups.linear_int(x, matrix)
    if not isinstance(matrix, (linear_fp8.Fp8Matrix, stream_groups.GroupMatrix)):
        return linear_op(x, matrix)
    form = matrix.form(len(x))
    rows = x if form == "wide" else fp8.quantize_rows(x, form)
    return (
        linear_fp8.linear_fp8
        if isinstance(matrix, linear_fp8.Fp8Matrix)
        else linear_groups.linear_int
    )(rows, matrix)


def groups(sweep: bool) -> None:
    """Times the products of an 8B model's 32 layers. Rows that need conversion are converted by a
    launch before each product."""
    shapes = SHAPES["8b"][:-1]
    for kind, share in (
        ("bf16", 2),
        ("fp8", 1),
        ("int4", 0.53),
        ("int4 zeros", 0.56),
        ("int8", 1),
        ("fp8 blocks", 1.03),
    ):
        layers = [[group_matrix(kind, n, k) for n, k in shapes] for _ in range(32)]
        size = 32 * sum(n * k for n, k in shapes) * share
        for m in (1, 2, 8, 16, 32, 64, 128, 512):
            xs = [torch.randn(m, k, device=GPU, dtype=B) for _, k in shapes]
            calls = [
                lambda layer=layer: [multiplied(x, w) for x, w in zip(xs, layer, strict=True)]
                for layer in layers
            ]
            tell(f"8b {kind}, {m} rows x 32 layers", 32 * timed(calls, least=32), size)
        for at, (n, k) in enumerate(shapes if sweep and kind == "int4" else ()):
            sweep_lone(kind, n, k, at == 2, [layer[at] for layer in layers], BANDS)
            for m in (16, 64):
                sweep_groups(kind, m, n, k, [layer[at] for layer in layers])
        one_row_layers(kind, layers, size)
        del layers
        torch.cuda.empty_cache()


def four_bit_floats(sweep: bool, counts: list[int]) -> None:
    """Times each product of an 8B model's layer, beside the library's bf16; a single row comes in
    fixed point. Then times 32 layers of one row. sweep: also other cuts, and weights widened for
    the library.
    """
    shapes = SHAPES["8b"][:-1]
    for at, (n, k) in enumerate(shapes):
        wide = [
            torch.randn(n, k, device=GPU, dtype=B).mul_(k**-0.5)
            for _ in range(copies_of(2 * n * k))
        ]
        ready = [group_matrix("nvfp4", n, k) for _ in range(copies_of(n * k // 2))]
        for m in counts:
            x = torch.randn(m, k, device=GPU, dtype=B)
            plain, size = timed([lambda w=w: F.linear(x, w) for w in wide]), ready[0].nbytes
            rows = to_fixed(x) if m == 1 else x
            if m == 1 and at == 2:
                ms = timed(
                    [lambda w=w: lone_product(rows, w, gated=True, form="fixed") for w in ready]
                )
            else:
                ms = timed([lambda w=w: linear_fp4.linear_fp4(rows, w) for w in ready])
            gained = f"{plain / ms:5.2f} times bf16, {size / ms / 1e6:6.0f} GB/s"
            tell(f"nvfp4 8b {m} x {n} x {k}: {gained}", ms, size, plain)
            if not sweep:
                continue
            if m == 1:
                sweep_lone("nvfp4", n, k, at == 2, ready, SHORT_BANDS)
                continue
            if m <= 1024:
                sweep_floats(m, n, k, ready)
            ms = timed([lambda w=w: linear_fp4.linear_fp4(x, w, streamed_rows=0) for w in ready])
            tell(f"  nvfp4 {m} x {n} x {k} widened for the library", ms, size, plain)
        del wide, ready
        torch.cuda.empty_cache()
    layers = [[group_matrix("nvfp4", n, k) for n, k in shapes] for _ in range(32)]
    one_row_layers("nvfp4", layers, 32 * sum(n * k for n, k in shapes) * 0.5625)


def slices_swept(m: int, n: int) -> list[stream_fp4.Slices]:
    """Returns other cuts of a product of m rows that fit a program's memory and registers and fill
    the chip."""
    heights = {max(8, min(128, triton.next_power_of_2(m)))} | ({64} if m >= 128 else set())
    cuts = itertools.product(
        sorted(heights), (32, 64, 128, 256), (32, 64, 128), (1, 2, 4, 8), (3, 4), (1, 2, 4, 8)
    )
    every = [stream_fp4.Slices(*cut) for cut in cuts]
    return [
        each
        for each in every
        if (each.outputs + 4 * each.rows) * each.octets * each.stages <= 220_000
        and 100 <= triton.cdiv(n, each.outputs) * triton.cdiv(m, each.rows) * each.split <= 2000
        and 512 * each.warps <= each.outputs * max(each.rows, each.octets) <= 5120 * each.warps
        and (each.rows <= 16 or each.warps >= 4)
    ]


def sweep_floats(m: int, n: int, k: int, matrices: list[Any]) -> None:
    x, found = torch.randn(m, k, device=GPU, dtype=B), []
    for cut in slices_swept(m, n):
        if cut.split > max(1, k // 512):
            continue
        with suppress(triton.runtime.errors.OutOfResources):
            found.append(
                (
                    timed([lambda w=w: stream_fp4.streamed_fp4(x, w, None, cut) for w in matrices]),
                    cut,
                )
            )
    for ms, cut in sorted(found, key=lambda each: each[0])[:5]:
        told = f"{cut.rows} x {cut.outputs} x {cut.octets} by {cut.split}, {cut.stages} {cut.warps}"
        tell(f"  nvfp4 {m} x {n} x {k}: {told}", ms, matrices[0].nbytes)


def one_row_layers(kind: str, layers: list[list[Any]], size: float) -> None:
    """Times 32 layers of one row behind 300 tokens, with all launches; grouped weights also with
    other early starts."""
    d, (heads, kv_heads, width) = 4096, (32, 8, 128)
    weight, start = torch.ones(d, device=GPU, dtype=B), torch.randn(1, d, device=GPU, dtype=B)
    cos_sin = torch.randn(512, 2, width // 2, device=GPU)
    pools = [
        LayerKv.plain(torch.randn(64, kv_heads, 2, 16, width, device=GPU, dtype=B)) for _ in layers
    ]
    length, table = (
        torch.full((1,), 300, dtype=torch.int32, device=GPU),
        torch.randperm(63, device=GPU).int()[None],
    )
    decode = SimpleNamespace(
        rows=torch.zeros(1, dtype=torch.int32, device=GPU), table=table, length=length, groups=None
    )
    at = torch.full((1,), 300, device=GPU)
    inputs = SimpleNamespace(
        positions=at, slots=table[0, 300 // 16].long().view(1) * 16 + 300 % 16, decode=decode
    )

    one_kind = AttentionKind(heads, kv_heads, width, 0, None, width**-0.5)
    in_groups = isinstance(layers[0][0], (stream_groups.GroupMatrix, stream_fp4.Fp4Weight))
    wanted = layers[0][3].form(1) if in_groups else "wide"

    def run() -> torch.Tensor:
        x, residual = start, None
        for (qkv, out, up, down), kv in zip(layers, pools, strict=True):
            if isinstance(qkv, SmallWeight):
                q, residual = one_row.norm_qkv(
                    x,
                    residual,
                    weight,
                    1e-5,
                    qkv,
                    None,
                    cos_sin,
                    inputs,
                    kv,
                    heads,
                    kv_heads,
                    width,
                )
                seen = one_row_attention.attend_one(q, kv, inputs, width**-0.5, None).view(1, -1)
            else:
                first = residual is None
                add = (x,) if first else (x, residual)
                normed = (norm.rms_norm if first else norm.add_rms_norm)(
                    *add, weight, 1e-5, qkv.form(1)
                )
                normed, residual = (normed, x) if first else normed
                seen = one_row_attention.rotate_and_attend_one(
                    multiplied(normed, qkv), cos_sin, kv, inputs, one_kind, None, out.form(1)
                )
            x = multiplied(seen, out)
            gate = up.streamed if isinstance(up, linear_fp8.Fp8Matrix) else up
            x, residual = one_row.norm_gate(x, residual, weight, 1e-5, gate, wanted)
            x = multiplied(x, down)
        return x

    tell(f"8b {kind}, one row, 32 layers with attention", timed([run], least=1), size)
    if not in_groups or wanted == "fixed":
        return
    plain, few = stream_groups.pieces_of, pdl.FEW
    for ahead, early in ((0, few), (2, 0), (2, few), (4, few), (8, few)):
        stream_groups.pieces_of = lambda *sizes: replace(plain(*sizes), ahead=ahead)
        pdl.FEW = early
        tell(
            f"  {ahead} turns ahead, kernels of {early} programs let the next in",
            timed([run], least=1),
            size,
        )
    stream_groups.pieces_of, pdl.FEW = plain, few


def sweep_lone(
    kind: str, n: int, k: int, gated: bool, matrices: list[Any], bands: list[Band]
) -> None:
    """Times one row of four-bit weights by other cuts,
    in the forms that a layer takes and gives."""
    row, form = to_fixed(torch.randn(1, k, device=GPU, dtype=B)), "fixed" if gated else "wide"
    for band in bands:
        calls = [
            lambda w=w: lone_product(row, w, None, band, gated=gated, form=form) for w in matrices
        ]
        tell(f"  {kind} 1 x {n} x {k}, {band}".replace("=", " "), timed(calls), matrices[0].nbytes)


def sweep_groups(kind: str, m: int, n: int, k: int, matrices: list[Any]) -> None:
    x, found = torch.randn(m, k, device=GPU, dtype=B), []
    rows = max(8, triton.next_power_of_2(m))
    for outputs, warps, stages in CUTS_OF_GROUPS:
        for split in (1, 2, 4, 8, 16) if n < 16384 else (1, 2, 4):
            cut = stream_groups.Pieces(rows, outputs, split, stages, warps)
            ms = timed(
                [lambda w=w: stream_groups.streamed_groups(x, w, None, cut) for w in matrices]
            )
            found.append((ms, cut))
    for ms, cut in sorted(found, key=lambda f: f[0])[:4]:
        tell(
            f"  {kind} {m} x {n} x {k} {cut.outputs} by {cut.split}, {cut.stages} {cut.warps}",
            ms,
            matrices[0].nbytes,
        )


def chain() -> None:
    """Times 16 layers of a 1B model without attention, and its head, for few rows: the parts of a
    small step."""
    d, inner, heads, kv_heads, width = 2048, 8192, 32, 8, 64
    shapes = ((3072, d), (d, d), (2 * inner, d), (d, inner))
    layers = [
        [torch.randn(n, k, device=GPU, dtype=B).mul_(k**-0.5) for n, k in shapes] for _ in range(16)
    ]
    head = torch.randn(128256, d, device=GPU, dtype=B)
    scale, table = torch.ones(d, device=GPU, dtype=B), torch.randn(64, 2, width // 2, device=GPU)
    kv = torch.zeros(64, kv_heads, 2, 16, width, device=GPU, dtype=B)
    size = sum(w.numel() for layer in layers for w in layer) * 2 + head.numel() * 2

    def run(
        m: int, weights: list[list[Any]], last: Any, product: Callable[..., torch.Tensor]
    ) -> Callable[[], object]:
        start = torch.randn(m, d, device=GPU, dtype=B)
        where = SimpleNamespace(
            positions=torch.arange(m, device=GPU), slots=torch.arange(m, device=GPU)
        )

        def step() -> torch.Tensor:
            x, residual = start, start.clone()
            for qkv, out, up, down in weights:
                x, residual = norm.add_rms_norm(x, residual, scale, 1e-5)
                q = rotate(rotary, product(x, qkv), table, where, kv, heads, kv_heads, width)
                x, residual = norm.add_rms_norm(
                    product(q.reshape(m, d), out), residual, scale, 1e-5
                )
                x = product(activation.silu_mul(product(x, up)), down)
            return product(norm.rms_norm(x, scale, 1e-5), last)

        return step

    ready = [[prepare_linear(w) for w in layer] for layer in layers]
    for m in (1, 2, 4, 16):
        plain = timed([run(m, layers, head, F.linear)], least=1)
        tell(
            f"chain {m} (torch: with cuBLAS)",
            timed([run(m, ready, prepare_linear(head), linear_op)], least=1),
            size,
            plain,
        )


def rotary_sweep() -> None:
    for heads, kv_heads, width in ((32, 8, 64), (32, 8, 128)):
        parts, rows = heads + 2 * kv_heads, 8192
        qs = [torch.randn(rows, parts * width, device=GPU, dtype=B) for _ in range(4)]
        kv = torch.zeros(8192 * 4, kv_heads, 2, 16, width, device=GPU, dtype=B)
        where = SimpleNamespace(
            positions=torch.arange(rows, device=GPU),
            slots=torch.randperm(8192 * 64, device=GPU)[:rows],
        )
        table = torch.randn(8192, 2, width // 2, device=GPU)
        for piece, warps in ((16, 4), (16, 2), (16, 1), (32, 4), (64, 4), (64, 8), (8, 1), (8, 2)):
            rotary._HEADS, rotary._WARPS = piece, warps
            calls = [
                lambda q=q: rotate(rotary, q, table, where, kv, heads, kv_heads, width) for q in qs
            ]
            tell(
                f"  rotary {width}: {piece} heads, {warps} warps",
                timed(calls),
                rows * parts * width * 4,
            )
        rotary._HEADS, rotary._WARPS = 16, 4


def warm(part: int, parts: int) -> None:
    """Compiles the kernels of the timings, in one of several processes."""
    jobs: list[Callable[[], object]] = []
    x, w = torch.zeros(1, 4096, device=GPU, dtype=B), torch.zeros(4096, 4096, device=GPU, dtype=B)
    jobs += [lambda c=c: linear_small(x, prepare_small(w, c)) for c in CUTS]
    logits = torch.zeros(16, 128256, device=GPU, dtype=B)
    ids = torch.arange(16, device=GPU, dtype=torch.int32)
    scratch = sampler.SampleScratch.allocate(16, 128256, GPU, adjusts=True)

    def sums(tiles: int, warps: int) -> None:
        sampler.TILES, sampler.SUM_WARPS = tiles, warps
        sampler.sample_rows(logits, ids, ids, asking(16, 128256), scratch, filters=False)

    def lists(some: int, warps: int) -> None:
        sampler.SOME, sampler.FILTER_WARPS = some, warps
        sampler.sample_rows(logits, ids, ids, asking(16, 128256), scratch)

    eight = linear_fp8.prepare_linear_fp8(
        w.to(torch.float8_e4m3fn), torch.ones(4096, device=GPU), B
    )
    calls = in_tiles(128, [eight])
    every = {tiles: None for n, _ in SHAPES["8b"] for tiles in tiles_swept(128, n)}
    jobs += [lambda t=t: calls(t)[0]() for t in every]
    jobs += [lambda f=f: lists(*f) for f in LISTS]
    jobs += [lambda s=s: sums(*s) for s in sorted({s[:2] for s in SUMS})]
    for job in jobs[part::parts]:
        with suppress(triton.runtime.errors.OutOfResources):  # the sweep passes over them too
            job()


def copy_speed() -> float:
    source, target = (
        torch.empty(1 << 31, dtype=torch.uint8, device=GPU).random_() for _ in range(2)
    )
    return (
        2
        * source.numel()
        / triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
        * 1e3
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="small,elementwise,sampler,linear")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rows", default="1,4,16,64,128,512,4096", help="of fp4")
    parser.add_argument("--warm")
    args = parser.parse_args()
    if args.warm:
        return warm(*map(int, args.warm.split("/")))
    COPY[0] = copy_speed()
    print(f"copy {COPY[0] / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}")
    for name in args.only.split(","):
        {
            "small": small,
            "elementwise": elementwise,
            "sampler": lambda: sampling(args.sweep),
            "linear": lambda: linear(args.sweep),
            "fp8": lambda: float8(args.sweep),
            "int": lambda: groups(args.sweep),
            "fp4": lambda: four_bit_floats(
                args.sweep, [int(each) for each in args.rows.split(",")]
            ),
            "chain": chain,
            "rotary": rotary_sweep,
        }[name]()


if __name__ == "__main__":
    main()

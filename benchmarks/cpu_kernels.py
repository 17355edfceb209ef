"""Times each kernel of this machine beside a plain form, with its share of what is possible.

    python benchmarks/cpu_kernels.py [--shape demo|qwen|both] [--dtype bfloat16] [--rounds 9]
                                     [--threads N] [--json]

Two steps are measured: the demo model's decode (1,024 rows, 16 groups of 64, prompts of 240 to 330
tokens, about 32 own tokens) and Qwen2.5-0.5B's (32 rows alone, 64 to 320 tokens; and one chunk of
256). An operation and its plain form take turns, and the median of each counts. "share" is of the
copy speed (bytes that must move) or of the products' rate (the best that a large product reaches
here). There are as many copies of the weights as a model has layers, up to 200 MB, so that caches
behave as in a forward. Measures no sampler and asserts no speed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.choose import choose
from penstock.kernels.ops import Ops

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from kernels_naive import Case, attend, make_case, rotate

WEIGHT_BYTES = 200_000_000


@dataclass(slots=True)
class Shape:
    name: str
    rows: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    width: int
    vocabulary: int
    layers: int


@dataclass(slots=True)
class Row:
    op: str
    shape: str
    ms: float
    plain_ms: float
    ratio: float
    share: float
    of: str  # "copy" or "products"


SHAPES = {
    "demo": Shape("demo", 1024, 256, 896, 4, 2, 64, 2048, 8),
    "qwen": Shape("qwen", 32, 896, 4864, 14, 2, 64, 151936, 24),
}


@dataclass(slots=True)
class Bench:
    dtype: torch.dtype
    rounds: int
    ops: Ops
    copy_rate: float = 0.0  # bytes a second, read and written together
    product_rate: float = 0.0  # floating-point operations a second

    def calibrate(self) -> None:
        source = torch.ones(64 << 20, dtype=torch.int32)
        target = torch.empty_like(source)
        seconds = self._median([lambda: target.copy_(source)])[0]
        self.copy_rate = 2 * source.numel() * 4 / seconds
        weight, x = torch.randn(4096, 1024).to(self.dtype), torch.randn(1024, 1024).to(self.dtype)
        ready = self.ops.prepare_linear(weight)
        self.product_rate = (
            2 * 4096 * 1024 * 1024 / self._median([lambda: self.ops.linear(x, ready, None)])[0]
        )

    def row(
        self,
        op: str,
        shape: str,
        work: Callable[[], Any],
        plain: Callable[[], Any],
        *,
        flops: float = 0,
        size: float = 0,
    ) -> Row:
        seconds, plain_seconds = self._median([work, plain])
        share = flops / seconds / self.product_rate if flops else size / seconds / self.copy_rate
        of = "products" if flops else "copy"
        return Row(
            op, shape, seconds * 1e3, plain_seconds * 1e3, plain_seconds / seconds, share, of
        )

    def _median(self, works: list[Callable[[], Any]]) -> list[float]:
        times: list[list[float]] = [[] for _ in works]
        with torch.inference_mode():
            for turn in range(self.rounds + 1):
                for work, kept in zip(works, times, strict=True):
                    begin = time.perf_counter()
                    work()
                    if turn:
                        kept.append(time.perf_counter() - begin)
        return [statistics.median(kept) for kept in times]


def linear_rows(bench: Bench, shape: Shape) -> list[Row]:
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.width
    products = {
        "qkv": (qkv, shape.hidden),
        "o": (shape.hidden, shape.heads * shape.width),
        "gate_up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
        "head": (shape.vocabulary, shape.hidden),
    }
    out = []
    for name, (n, k) in products.items():
        copies = 1 if name == "head" else max(1, min(shape.layers, WEIGHT_BYTES // (n * k * 2)))
        weights = [torch.randn(n, k).to(bench.dtype) for _ in range(copies)]
        ready = [bench.ops.prepare_linear(weight) for weight in weights]
        x = torch.randn(shape.rows, k).to(bench.dtype)
        label = f"{name} {shape.rows} x {k} -> {n}"
        row = bench.row(
            "linear",
            label,
            lambda ready=ready, x=x: [bench.ops.linear(x, weight, None) for weight in ready],
            lambda weights=weights, x=x: [F.linear(x, weight) for weight in weights],
            flops=2.0 * shape.rows * n * k * copies,
        )
        row.ms, row.plain_ms = row.ms / copies, row.plain_ms / copies
        out.append(row)
    return out


def elementwise_rows(bench: Bench, shape: Shape, case: Case) -> list[Row]:
    ops, dtype, rows, d = bench.ops, bench.dtype, shape.rows, shape.hidden
    x, residual = torch.randn(rows, d).to(dtype), torch.randn(rows, d).to(dtype)
    weight, item = torch.randn(d).to(dtype), x.element_size()
    gate_up = torch.randn(rows, 2 * shape.inner).to(dtype)
    ids, table = (
        torch.randint(0, shape.vocabulary, (rows,)),
        torch.randn(shape.vocabulary, d).to(dtype),
    )

    def plain_norm(value: Tensor) -> Tensor:
        wide = value.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)

    def plain_gate() -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    label = f"{rows} x {d}"
    return [
        bench.row(
            "embed",
            label,
            lambda: ops.embed(ids, table),
            lambda: table[ids],
            size=2 * rows * d * item,
        ),
        bench.row(
            "rms_norm",
            label,
            lambda: ops.rms_norm(x, weight, 1e-6),
            lambda: plain_norm(x),
            size=2 * rows * d * item,
        ),
        bench.row(
            "add_rms_norm",
            label,
            lambda: ops.add_rms_norm(x, residual, weight, 1e-6),
            lambda: plain_norm(x + residual),
            size=4 * rows * d * item,
        ),
        bench.row(
            "silu_mul",
            f"{rows} x {2 * shape.inner}",
            lambda: ops.silu_mul(gate_up),
            plain_gate,
            size=3 * rows * shape.inner * item,
        ),
        rotary_row(bench, shape, case),
    ]


def rotary_row(bench: Bench, shape: Shape, case: Case) -> Row:
    heads, kv_heads, width = shape.heads, shape.kv_heads, shape.width
    qkv = torch.randn(shape.rows, (heads + 2 * kv_heads) * width).to(bench.dtype)
    table = torch.randn(2048, 2, width // 2)
    inputs, kv = case.inputs, case.kv.clone()
    block, offset = inputs.slots // 16, inputs.slots % 16

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    def plain() -> Tensor:
        q, k, v = qkv.view(shape.rows, -1, width).split([heads, kv_heads, kv_heads], 1)
        cos, sin = table[inputs.positions].unsqueeze(2).unbind(1)
        kv[block, :, 0, offset] = turn(k, cos, sin)
        kv[block, :, 1, offset] = v
        return turn(q, cos, sin)

    return bench.row(
        "rotary_and_store",
        f"{shape.rows} x {qkv.shape[1]}",
        lambda: rotate(bench.ops, qkv, table, inputs, kv, heads, kv_heads, width),
        plain,
        size=2 * qkv.numel() * qkv.element_size(),
    )


def attention_row(bench: Bench, case: Case, label: str, tokens: int) -> Row:
    """Times attention. tokens: number of tokens whose K and V must be read once."""
    kv_heads, width = case.kv.shape[1], case.kv.shape[-1]
    return bench.row(
        "attention",
        label,
        lambda: attend(bench.ops, case.q, case.kv, case.inputs, case.scale, None),
        lambda: plain_attention(case),
        size=2 * tokens * kv_heads * width * case.kv.element_size(),
    )


def plain_attention(case: Case) -> Tensor:
    """Computes attention row by row: gathers its blocks and calls torch's own attention."""
    out = torch.empty_like(case.q)
    for token, (table, position) in enumerate(zip(case.tables, case.positions, strict=True)):
        blocks = case.kv[table[: position // 16 + 1].long()].permute(2, 1, 0, 3, 4).flatten(2, 3)
        keys, values = blocks[:, None, :, : position + 1]
        out[token] = F.scaled_dot_product_attention(
            case.q[None, token, :, None], keys, values, scale=case.scale, enable_gqa=True
        )[0, :, 0]
    return out


def demo_case(dtype: torch.dtype) -> tuple[Case, int]:
    rng = random.Random(0)
    prompts = [rng.randint(240, 330) for _ in range(16)]
    groups = [(64, prompt // 16 * 16) for prompt in prompts]
    lengths = [prompt + 24 for prompt in prompts for _ in range(64)]
    tokens = sum(lengths) - 63 * sum(prefix for _, prefix in groups)
    return make_case(lengths, groups, dtype=dtype), tokens


def qwen_case(dtype: torch.dtype) -> tuple[Case, int]:
    rng = random.Random(0)
    lengths = [rng.randint(64, 320) for _ in range(32)]
    return make_case(lengths, heads=14, kv_heads=2, dtype=dtype), sum(lengths)


def measure(bench: Bench, shape: Shape) -> list[Row]:
    case, tokens = demo_case(bench.dtype) if shape.name == "demo" else qwen_case(bench.dtype)
    label = f"{shape.rows} rows" + (", 16 groups" if shape.name == "demo" else " alone")
    chunk = make_case(
        [], chunks=[(0, 256)], heads=shape.heads, kv_heads=shape.kv_heads, dtype=bench.dtype
    )
    later = make_case(
        [], chunks=[(256, 256)], heads=shape.heads, kv_heads=shape.kv_heads, dtype=bench.dtype
    )
    return [
        *linear_rows(bench, shape),
        *elementwise_rows(bench, shape, case),
        attention_row(bench, case, label, tokens),
        attention_row(bench, chunk, "a chunk of 256", 256),
        attention_row(bench, later, "a chunk of 256 after 256", 512),
    ]


def main() -> None:
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    bench = Bench(dtype, args.rounds, choose(torch.device("cpu"), dtype, "auto"))
    bench.calibrate()
    shapes = list(SHAPES.values()) if args.shape == "both" else [SHAPES[args.shape]]
    tables = {shape.name: measure(bench, shape) for shape in shapes}
    if args.json:
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in tables.items()}))
        return
    print(
        f"{args.dtype}, {torch.get_num_threads()} threads; copy {bench.copy_rate / 1e9:.0f} GB/s, "
        f"products {bench.product_rate / 1e9:.0f} GFLOP/s"
    )
    for name, rows in tables.items():
        print(f"\n{name:18}{'':34}{'ms':>9}{'plain ms':>10}{'ratio':>7}  share")
        for row in rows:
            times = f"{row.ms:9.3f}{row.plain_ms:10.3f}{row.ratio:7.1f}"
            print(f"{row.op:18}{row.shape:34}{times}  {row.share:.0%} of {row.of}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own number")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()

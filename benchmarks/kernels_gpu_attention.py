"""Times the Triton attention of a layer on a GPU, beside the limit of its bytes or products.

    python benchmarks/kernels_gpu_attention.py [--eight 0|1|2] [--json]

Random data, scattered blocks, lengths and tables on the device. Small steps are captured ten times
in one CUDA graph, so that the gaps between launches count as in a step. --eight: 1 V in eight bits,
2 K and V. "copy" is the time to read the K and V once at this machine's copy speed; "TFLOP/s"
counts the products of queries with visible keys and values. Asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from kernels_naive import attend, in_form

from penstock.kernels.inputs import DecodeInputs, GroupInputs, PrefillInputs, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton.attention import attention as column


@dataclass(slots=True)
class Row:
    what: str
    ms: float
    copy_ms: float | None = None
    tflops: float | None = None
    plain_ms: float | None = (
        None  # torch's own attention, K and V contiguous and repeated for each query head
    )


def median(work: Callable[[], Any]) -> float:
    return float(do_bench(work, warmup=5, rep=25, return_mode="median"))


def copy_rate() -> float:
    """Returns the copy speed in bytes a millisecond, read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median(lambda: target.copy_(source))


EIGHT = 0  # what is in eight bits: --eight


def pool(blocks: int, kv_heads: int, width: int) -> LayerKv:
    kv = in_form(
        torch.empty(blocks, kv_heads, 2, 16, width, device="meta"), EIGHT, torch.bfloat16, "cuda"
    )
    for part in (kv.keys, kv.values):
        for piece in part.split(65536):
            piece.copy_(torch.randn(piece.shape, device="cuda"))
    return kv


def token_bytes(kv: LayerKv) -> int:
    """Returns the bytes of a token's K and V."""
    return kv.storage[0].numel() // 16


def tables(rows: int, lengths: Tensor, wide: int, first: int = 1) -> Tensor:
    """Returns scattered blocks for each row's tokens, followed by the scratch block."""
    order = (torch.randperm(rows * wide, device="cuda", dtype=torch.int32) + first).view(rows, wide)
    return order.masked_fill_(torch.arange(wide, device="cuda") * 16 >= lengths[:, None], 0)


def queries(tokens: int, heads: int, kv_heads: int, width: int) -> Tensor:
    """Returns queries as a view of a fused product, as in a layer."""
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * width, device="cuda", dtype=torch.bfloat16)
    return fused[:, : heads * width].view(tokens, heads, width)


def decode_step(
    lengths: Tensor,
    kv_table: Tensor,
    bound: int,
    groups: GroupInputs | None = None,
    skip: Tensor | None = None,
) -> StepInputs:
    rows = lengths.shape[0]
    order = torch.randperm(rows, device="cuda", dtype=torch.int32)
    nothing = torch.zeros(rows, dtype=torch.int32, device="cuda")
    decode = DecodeInputs(
        rows=order,
        position=lengths[order.long()] - 1,
        table=kv_table,
        length=lengths - 1,
        skip=nothing if skip is None else skip,
        max_own=bound,
        groups=groups,
    )
    return StepInputs(nothing, nothing, rows, decode, None)


def decode_row(
    what: str,
    lengths: Tensor,
    shape: tuple[int, int, int],
    bound: int,
    rate: float,
    graph: bool = False,
) -> Row:
    heads, kv_heads, width = shape
    wide = -(-bound // 16)
    used = -(-int(lengths.max()) // 16)
    table = F.pad(tables(len(lengths), lengths, used), (0, wide - used))
    kv = pool(len(lengths) * used + 1, kv_heads, width)
    q = queries(len(lengths), heads, kv_heads, width)
    inputs = decode_step(lengths, table, bound)
    ms = step_ms(lambda: attend(column, q, kv, inputs, width**-0.5), graph)
    return Row(what, ms, copy_ms=int(lengths.sum()) * token_bytes(kv) / rate)


def step_ms(work: Callable[[], Any], graph: bool) -> float:
    if not graph:
        return median(work)
    work()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(10):
            work()
    return median(captured.replay) / 10


def monkeys_row(rate: float, grouped: bool) -> Row:
    """Times 8 groups of 1,024 rows that share 656 tokens, 96 own tokens a row; Llama-3.2-1B's
    heads."""
    rows, heads, kv_heads, width, members, prefix = 8192, 32, 8, 64, 1024, 656
    lengths = torch.full((rows,), 752, dtype=torch.int32, device="cuda")
    table = tables(rows, lengths, 47)
    kv = pool(rows * 47 + 1, kv_heads, width)
    q = queries(rows, heads, kv_heads, width)
    if not grouped:
        inputs = decode_step(lengths, table, 752)
        ms = median(lambda: attend(column, q, kv, inputs, 0.125))
        return Row("8,192 rows x 752, alone", ms, copy_ms=rows * 752 * token_bytes(kv) / rate)
    start = torch.full((65,), rows, dtype=torch.int32, device="cuda")
    start[:9] = torch.arange(9) * members
    length = torch.zeros(64, dtype=torch.int32, device="cuda")
    length[:8] = prefix
    groups = GroupInputs(start, table[:64].contiguous(), length)
    skip = torch.full((rows,), prefix, dtype=torch.int32, device="cuda")
    inputs = decode_step(lengths, table, 752, groups, skip)
    ms = median(lambda: attend(column, q, kv, inputs, 0.125))
    return Row(
        "8,192 rows, 656 shared by 1,024 + 96 own", ms, copy_ms=rows * 96 * token_bytes(kv) / rate
    )


def prefill_row(
    prompts: int, tokens: int, heads: int, kv_heads: int, width: int, window: int | None = None
) -> Row:
    lengths = torch.full((prompts,), tokens, dtype=torch.int32, device="cuda")
    table = tables(prompts, lengths, tokens // 16)
    kv = pool(prompts * tokens // 16 + 1, kv_heads, width)
    q = queries(prompts * tokens, heads, kv_heads, width)
    start = (torch.arange(prompts + 1, device="cuda") * tokens).to(torch.int32)
    prefill = PrefillInputs(start, torch.zeros_like(lengths), table)
    inputs = StepInputs(start, start, 0, None, prefill)
    ms = median(lambda: attend(column, q, kv, inputs, width**-0.5, window))
    seen = tokens * tokens / 2 if window is None else window * (tokens - window / 2)
    what = f"prefill {prompts} x {tokens}, width {width}" + (f", window {window}" if window else "")
    plain = None
    if window is None:
        shaped = q.reshape(prompts, tokens, heads, width).transpose(1, 2).contiguous()
        keys = torch.randn_like(shaped)
        plain = median(lambda: F.scaled_dot_product_attention(shaped, keys, keys, is_causal=True))
    return Row(what, ms, tflops=prompts * seen * heads * width * 4 / ms / 1e9, plain_ms=plain)


def measure() -> list[Row]:
    rate = copy_rate()

    def same(rows: int, length: int) -> Tensor:
        return torch.full((rows,), length, dtype=torch.int32, device="cuda")

    small, large, qwen = (32, 8, 64), (32, 8, 128), (14, 2, 64)
    mixed = torch.randint(128, 1153, (1000,), device="cuda", dtype=torch.int32)
    uneven = same(128, 256)
    uneven[0] = 8000
    return [
        monkeys_row(rate, grouped=True),
        monkeys_row(rate, grouped=False),
        decode_row("1,000 rows x 128..1152", mixed, small, 1152, rate),
        decode_row("1,000 rows x 128..1152, up to 8192 possible", mixed, small, 8192, rate),
        decode_row("128 rows x 384, width 128", same(128, 384), large, 512, rate, graph=True),
        decode_row("the same, up to 8192 possible", same(128, 384), large, 8192, rate, graph=True),
        decode_row("127 rows x 256 and one x 8000", uneven, small, 8192, rate, graph=True),
        decode_row("64 rows x 512", same(64, 512), small, 512, rate, graph=True),
        decode_row("64 rows x 256, 14 heads over 2", same(64, 256), qwen, 256, rate, graph=True),
        decode_row("16 rows x 1024", same(16, 1024), small, 8192, rate, graph=True),
        decode_row("1 row x 256", same(1, 256), small, 512, rate, graph=True),
        decode_row("1 row x 256, up to 8192 possible", same(1, 256), small, 8192, rate, graph=True),
        decode_row("1 row x 8192", same(1, 8192), small, 8192, rate, graph=True),
        decode_row("1 row x 384, width 128", same(1, 384), large, 8192, rate, graph=True),
        prefill_row(16, 1024, *small),
        prefill_row(8, 1024, *large),
        prefill_row(4, 4096, *large),
        prefill_row(4, 4096, *large, window=1024),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--eight", type=int, choices=(0, 1, 2), default=0)
    asked = parser.parse_args()
    global EIGHT
    EIGHT = asked.eight
    torch.manual_seed(0)
    rows = measure()
    if asked.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    for row in rows:
        copy = f"copy {row.copy_ms:.4f} ms" if row.copy_ms else f"{row.tflops:.0f} TFLOP/s"
        plain = f", torch's own {row.plain_ms:.3f} ms" if row.plain_ms else ""
        print(f"{row.what:46s} {row.ms:8.4f} ms   {copy}{plain}")


if __name__ == "__main__":
    main()

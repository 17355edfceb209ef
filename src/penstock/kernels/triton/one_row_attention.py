"""Attention of one row and the product behind it, in two launches: its tokens in parts, then the parts joined.

`_parts` asks for what earlier steps stored (the row's length, its blocks, K and V) before the kernel ahead has ended;
only the query and the new token's K and V wait for it. `_join_out`'s programs each join all the parts, which is a few
KB from the second-level cache while their weights are on the way. With weights in groups they are joined in a launch of
their own, for tensor cores. It knows a row, its blocks and a matrix; no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton.flash_loop import LOG2_E, at_head, cells, scales_of, walk_row
from penstock.kernels.triton.linear_small import SmallWeight
from penstock.kernels.triton.pdl import has_pdl, release, wait
from penstock.kernels.triton.stream_groups import GroupMatrix, streamed_groups

PARTS = 16  # programs that share a row and KV head, at most
TOKENS = 64  # of a tile; a part has at least one
AT_ONCE = 8  # parts whose loads are under way together
PARTS_EARLY, OUT_EARLY = 2, 2  # ms of a step's forward: 0.670; 1 and 2: 0.698, 2 and 1: 0.678, 1 and 1: 0.703
OUT_BYTES = 64 * 1024  # of weights of a program behind attention


@triton.jit
def _extent(rows, length, capacity, window, WINDOWED: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr):
    """The row, its first visible token, one past its last, where its first part begins, and the tokens of a part."""
    row = tl.load(rows).to(tl.int64)
    end = tl.minimum(tl.load(length + row) + 1, capacity)
    first = end * 0
    if WINDOWED:
        first = tl.maximum(end - window, 0)
    begin = first // 16 * 16
    used = tl.minimum(tl.cdiv(end - begin, TOKENS), PARTS)
    return row, first, end, begin, tl.cdiv(tl.cdiv(end - begin, used), TOKENS) * TOKENS


@triton.jit(
    do_not_specialize=["capacity", "window", "stride_blocks"],
    do_not_specialize_on_alignment=["rows", "blocks", "length"],
)
def _parts(
    q, keys, values, scales, part, part_lse, blocks, rows, length, capacity, window, scale, stride_block, stride_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    RATIO_PAD: tl.constexpr, WINDOWED: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    EIGHT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    RATIO: tl.constexpr = HEADS // KV_HEADS
    head, place = tl.program_id(0), tl.program_id(1)
    row, first, end, begin, span = _extent(rows, length, capacity, window, WINDOWED, TOKENS, PARTS)
    begin += place * span
    last = tl.minimum(begin + span, end)
    lane = tl.arange(0, WIDTH_PAD)
    inside = lane < WIDTH
    token = tl.arange(0, TOKENS)
    at_keys, at_values, stride_values = at_head(keys, values, head, stride_block, WIDTH, EIGHT)
    scale, of_values = scales_of(scale, scales, head, KV_HEADS, EIGHT)
    table = blocks + row * stride_blocks
    where = begin + token
    stored = where < last
    block = tl.load(table + where // 16, mask=stored, other=0)
    cell, beside = cells(at_keys, at_values, block, where, stride_block, stride_values, lane, WIDTH, EIGHT)
    if WINDOWED:
        stored &= where >= first
    old = (stored & (where < end - 1))[:, None] & inside[None, :]
    new = (stored & (where == end - 1))[:, None] & inside[None, :]
    old_k = tl.load(cell, mask=old, other=0.0)
    old_v = tl.load(beside, mask=old, other=0.0)
    wait(EARLY)
    if begin < end:
        query = tl.arange(0, RATIO_PAD)
        query_head = head * RATIO + query
        mask = (query < RATIO)[:, None] & inside[None, :]
        queries = tl.load(q + query_head[:, None] * WIDTH + lane[None, :], mask=mask, other=0.0)
        k = tl.where(new, tl.load(cell, mask=new, other=0.0), old_k).to(queries.dtype)
        v = tl.where(new, tl.load(beside, mask=new, other=0.0), old_v).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(stored[None, :], scores, -1e30)
        state_max = tl.max(scores, 1)
        weights = tl.exp2(scores - state_max[:, None])
        state_sum = tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        state_max, state_sum, mixed = walk_row(
            queries, state_max, state_sum, mixed, at_keys, at_values, table, begin + TOKENS, last, first, scale,
            stride_block, stride_values, WINDOWED, TOKENS, WIDTH, WIDTH_PAD, EIGHT, PRECISION,
        )  # fmt: skip
        mixed = mixed / state_sum[:, None]
        if EIGHT > 0:
            mixed *= of_values
        to = query_head * PARTS + place
        tl.store(part + to[:, None] * WIDTH + lane[None, :], mixed, mask=mask)
        tl.store(part_lse + to, state_max + tl.log2(state_sum), mask=query < RATIO)


@triton.jit
def _joined(
    part, part_lse, k, inside, used, WIDTH: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Returns numbers k of the row's answer before their last division, and what they are to be divided by."""
    place = k // WIDTH * PARTS
    largest = tl.full(k.shape, -1e30, tl.float32)
    total = tl.zeros(k.shape, tl.float32)
    mixed = tl.zeros(k.shape, tl.float32)
    for at in range(0, used, AT_ONCE):
        before = largest
        for j in tl.static_range(AT_ONCE):
            seen = tl.load(part_lse + place + at + j, mask=inside & (at + j < used), other=-1e30)
            largest = tl.maximum(largest, seen)
        shrink = tl.exp2(before - largest)
        total *= shrink
        mixed *= shrink
        for j in tl.static_range(AT_ONCE):
            there = inside & (at + j < used)
            share = tl.exp2(tl.load(part_lse + place + at + j, mask=there, other=-1e30) - largest)
            total += share
            mixed += share * tl.load(part + (place + at + j) * WIDTH + k % WIDTH, mask=there, other=0.0)
    return mixed, total


@triton.jit(do_not_specialize=["capacity", "window"], do_not_specialize_on_alignment=["rows", "length"])
def _join(
    part, part_lse, rows, length, capacity, window, out,
    WIDTH: tl.constexpr, BW: tl.constexpr, WINDOWED: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A query head a program."""
    _, _, end, begin, span = _extent(rows, length, capacity, window, WINDOWED, TOKENS, PARTS)
    used = tl.cdiv(end - begin, span)
    wait(EARLY)
    lane = tl.arange(0, BW)
    k, inside = tl.program_id(0) * WIDTH + lane, lane < WIDTH
    mixed, total = _joined(part, part_lse, k, inside, used, WIDTH, PARTS, AT_ONCE)
    tl.store(out + k, (mixed / total).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["capacity", "window"], do_not_specialize_on_alignment=["rows", "length"])
def _join_out(
    part, part_lse, rows, length, capacity, window, weight, weight_scale, bias, out, N,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, WINDOWED: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    inside = k < K
    w_row = weight + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K
    w = tl.load(w_row + k[None, :], mask=inside[None, :], other=0.0)
    _, _, end, begin, span = _extent(rows, length, capacity, window, WINDOWED, TOKENS, PARTS)
    used = tl.cdiv(end - begin, span)
    wait(EARLY)
    mixed, total = _joined(part, part_lse, k, inside, used, WIDTH, PARTS, AT_ONCE)
    kind = out.dtype.element_ty
    x = tl.where(inside, mixed / total, 0.0).to(kind).to(tl.float32)
    sums = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    if SCALED:
        sums *= tl.load(weight_scale + n, mask=n < N, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, sums.to(kind), mask=n < N)


def attention_out(
    q: Tensor,
    kv: LayerKv,
    inputs: StepInputs,
    scale: float,
    window: int | None,
    weight: SmallWeight | GroupMatrix,
    bias: Tensor | None,
) -> Tensor:
    """q [1, H, D] over a layer's KV, times weight [N, H * D] prepared -> [1, N]. inputs.decode: the row,
    which stands alone; it sees length + 1 tokens (its new one is stored), with a window the last `window` of them."""
    decode = inputs.decode
    assert decode is not None and decode.groups is None and q.is_contiguous()
    _, heads, width = q.shape
    kv_heads, device = kv.kv_heads, q.device
    part = torch.empty((heads, PARTS, width), dtype=torch.float32, device=device)
    lse = torch.empty((heads, PARTS), dtype=torch.float32, device=device)
    can = has_pdl(device)
    capacity, windowed = decode.table.shape[1] * 16, window is not None
    tokens = TOKENS if width <= 128 else TOKENS // 2
    _parts[(kv_heads, PARTS)](
        q, kv.keys, kv.values, lse if kv.scales is None else kv.scales, part, lse, decode.table, decode.rows,
        decode.length, capacity, window or 0, scale * LOG2_E, kv.keys.stride(0), decode.table.stride(0), HEADS=heads,
        KV_HEADS=kv_heads, WIDTH=width, WIDTH_PAD=max(16, triton.next_power_of_2(width)),
        RATIO_PAD=max(16, triton.next_power_of_2(heads // kv_heads)), WINDOWED=windowed, TOKENS=tokens, PARTS=PARTS,
        EIGHT=kv.eight, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", EARLY=PARTS_EARLY * can, num_warps=4,
        num_stages=2, launch_pdl=bool(can),
    )  # fmt: skip
    if isinstance(weight, GroupMatrix):
        row = torch.empty((1, heads * width), dtype=q.dtype, device=device)
        _join[(heads,)](
            part, lse, decode.rows, decode.length, capacity, window or 0, row, WIDTH=width,
            BW=triton.next_power_of_2(width), WINDOWED=windowed, TOKENS=tokens, PARTS=PARTS, AT_ONCE=AT_ONCE,
            EARLY=can, num_warps=1, launch_pdl=bool(can),
        )  # fmt: skip
        return streamed_groups(row, weight, bias)
    n, k = weight.weight.shape
    out = torch.empty((1, n), dtype=q.dtype, device=device)
    wide = triton.next_power_of_2(k)
    each = max(1, min(32, OUT_BYTES // weight.weight.element_size() // wide))
    _join_out[(triton.cdiv(n, each),)](
        part, lse, decode.rows, decode.length, capacity, window or 0, weight.weight,
        q if weight.scale is None else weight.scale, q if bias is None else bias, out, n, K=k, BK=wide, BN=each,
        WIDTH=width, WINDOWED=windowed, TOKENS=tokens, PARTS=PARTS, AT_ONCE=AT_ONCE, SCALED=weight.scale is not None,
        HAS_BIAS=bias is not None, EARLY=OUT_EARLY * can, num_warps=max(1, min(16, wide * each // 2048)),
        launch_pdl=bool(can),
    )  # fmt: skip
    return out

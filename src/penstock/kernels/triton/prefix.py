"""Shared prefixes: the queries of a prefix group against the group's blocks, once, on the tensor cores.

A program takes a tile of rows of one group x the query heads of one KV head, walks the group's blocks and leaves the
answer over the prefix alone with its log-sum-exp; `decode` carries on from there. (Hydragen, arXiv:2402.05099, has the
idea; here it is one launch for all groups, and the groups lie on the device.) Rows that stand alone are left unwritten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.walk import LOG2_E, owner, walk


@triton.jit(do_not_specialize=["groups", "stride_blocks"], do_not_specialize_on_alignment=["start", "blocks", "length"])
def _prefix(
    q,  # [S, H, D]
    kv,  # [blocks, Hkv, 2, 16, D]
    answer,  # [S, H, D]
    lse,  # [S, H] float32, powers of two
    start,  # [G + 1]
    blocks,  # [G, W]
    length,  # [G]
    groups,
    scale,
    stride_q,
    stride_block,
    stride_blocks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    QUERIES: tl.constexpr,  # query rows of a tile
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    RATIO: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = QUERIES // RATIO
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    group, row = owner(start, groups, tile, ROWS)
    row_end = tl.load(start + group + 1)
    tokens = tl.load(length + group)
    if row < row_end and tokens > 0:
        at = tl.arange(0, QUERIES)
        lane = tl.arange(0, WIDTH_PAD)
        member = row + at // RATIO
        query_head = head * RATIO + at % RATIO
        valid = (member < row_end) & (at < ROWS * RATIO)
        cell = member.to(tl.int64)[:, None] * stride_q + query_head[:, None] * WIDTH + lane[None, :]
        mask = valid[:, None] & (lane < WIDTH)[None, :]
        queries = tl.load(q + cell, mask=mask, other=0.0)
        state_max = tl.full([QUERIES], -1e30, tl.float32)
        state_sum = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, WIDTH_PAD], tl.float32)
        here = kv + head * (32 * WIDTH)
        table = blocks + group.to(tl.int64) * stride_blocks
        last = tl.full([QUERIES], 2**30, tl.int32)
        whole = tokens // TOKENS * TOKENS
        state_max, state_sum, mixed = walk(
            queries, state_max, state_sum, mixed, here, table, 0, whole, last, 0, scale, stride_block,
            False, False, TOKENS, WIDTH, WIDTH_PAD, PRECISION,
        )  # fmt: skip
        state_max, state_sum, mixed = walk(
            queries, state_max, state_sum, mixed, here, table, whole, tokens, last, 0, scale, stride_block,
            True, False, TOKENS, WIDTH, WIDTH_PAD, PRECISION,
        )  # fmt: skip
        cell = (member.to(tl.int64) * HEADS + query_head)[:, None] * WIDTH + lane[None, :]
        mixed = mixed / state_sum[:, None]
        tl.store(answer + cell, mixed.to(answer.dtype.element_ty), mask=mask)
        tl.store(lse + member.to(tl.int64) * HEADS + query_head, state_max + tl.log2(state_sum), mask=valid)


def attend_prefixes(
    q: Tensor, kv: Tensor, start: Tensor, blocks: Tensor, length: Tensor, scale: float, answer: Tensor, lse: Tensor
) -> None:
    """q [S, H, D] over kv [blocks, Hkv, 2, 16, D] -> answer [S, H, D], lse [S, H] float32 (of scores in powers of two).

    start [G + 1], blocks [G, W], length [G] int32: rows start[g] : start[g + 1] see the first length[g] tokens of
    blocks[g]; length is a multiple of 16. The launch depends on S and G alone: a group may be empty or of length 0.
    """
    rows, heads, width = q.shape
    kv_heads, groups = kv.shape[1], start.shape[0] - 1
    ratio = heads // kv_heads
    queries, tokens, warps, stages = _shape(ratio, width, q.dtype)
    tiles = rows // (queries // ratio) + groups
    _prefix[(tiles * kv_heads,)](
        q, kv, answer, lse, start, blocks, length, groups, scale * LOG2_E,
        q.stride(0), kv.stride(0), blocks.stride(0), heads, kv_heads, width,
        max(16, triton.next_power_of_2(width)),
        queries, tokens, "ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _shape(ratio: int, width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Query rows of a tile, tokens of a tile, warps, stages."""
    if dtype == torch.float32:
        return max(16, triton.next_power_of_2(ratio)), 32, 4, 1
    if width > 128:
        return 64, 64, 4, 2
    return max(64, triton.next_power_of_2(ratio)), 64, 4, 2

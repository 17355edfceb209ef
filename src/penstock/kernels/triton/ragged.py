"""Attention of long chunks by the library: K and V that they see are gathered out of their blocks, one after the other,
and torch's variable-length flash attention (FlashAttention 2, arXiv:2307.08691) does the rest.

The library's kernel is 1.3 to 1.7 times as fast as `prefill.py`'s once it has K and V in rows; gathering costs their
bytes three times over at the copy speed, which is little beside a product of hundreds of queries. How much a step's
chunks see must be known to the host, so steps in graphs keep our kernel. It knows chunks and blocks; no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import AttentionKind, PrefillInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton.flash_loop import at_head, eight_cells, load_blocks, owner, plain_cells

RAGGED_FROM = 512  # tokens that the longest chunk must see
MOST_SEEN = 4  # times the chunks' tokens: what is gathered is in memory twice
_TOKENS = 64  # of a program


@dataclass(slots=True)
class Ragged:
    """What layers of one kind share: where each chunk's K and V lie, and room for them."""

    start: Tensor  # [chunks + 1] int32
    keys: Tensor  # [tokens, Hkv, D]
    values: Tensor
    longest: int  # chunk, in queries
    most_seen: int  # tokens by one chunk


def plan_ragged(
    chunks: PrefillInputs, kind: AttentionKind, kv_heads: int, dtype: torch.dtype, ragged_from: int
) -> Ragged | None:
    """Returns None where our own kernel is to take the chunks."""
    sizes = chunks.sizes
    if sizes is None or sizes.most_seen < ragged_from or sizes.seen > MOST_SEEN * chunks.tokens:
        return None
    if dtype == torch.float32 or kind.width % 8 or kind.width > 256:
        return None
    seen = chunks.context + chunks.start.diff()
    start = torch.zeros(len(seen) + 1, dtype=torch.int32, device=seen.device)
    torch.cumsum(seen, 0, dtype=torch.int32, out=start[1:])
    both = torch.empty((2, sizes.seen, kv_heads, kind.width), dtype=dtype, device=seen.device)
    return Ragged(start, both[0], both[1], sizes.longest, sizes.most_seen)


@triton.jit(do_not_specialize=["chunks", "stride_blocks"], do_not_specialize_on_alignment=["start", "blocks"])
def _gather(
    keys, values, scales, blocks, start, out_k, out_v, chunks, stride_block, stride_blocks,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, TOKENS: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % KV_HEADS
    chunk, row = owner(start, chunks, tl.program_id(0) // KV_HEADS, TOKENS)
    first, end = tl.load(start + chunk), tl.load(start + chunk + 1)
    if row < end:
        token, lane = tl.arange(0, TOKENS), tl.arange(0, WIDTH_PAD)
        at, last = row - first, end - first
        inside = (lane < WIDTH)[None, :]
        there = (at + token < last)[:, None] & inside
        at_keys, at_values, stride_values = at_head(keys, values, head, stride_block, WIDTH, EIGHT)
        block = load_blocks(blocks + chunk.to(tl.int64) * stride_blocks, at, last, token)
        if EIGHT > 0:
            cell, beside = eight_cells(at_keys, at_values, block, token, stride_block, stride_values, lane, WIDTH)
            held = (at + token // 16 * 16 < last)[None, :] & (lane < WIDTH)[:, None]
            v = tl.trans(tl.load(beside, mask=held, other=0.0)).to(tl.float32) * tl.load(scales + KV_HEADS + head)
        else:
            cell, beside = plain_cells(at_keys, block, at + token, stride_block, lane, WIDTH)
            v = tl.load(beside, mask=there, other=0.0)
        k = tl.load(cell, mask=there, other=0.0)
        if EIGHT == 2:
            k = k.to(tl.float32) * tl.load(scales + head)
        to = ((row + token).to(tl.int64) * KV_HEADS + head)[:, None] * WIDTH + lane[None, :]
        tl.store(out_k + to, k.to(out_k.dtype.element_ty), mask=there)
        tl.store(out_v + to, v.to(out_v.dtype.element_ty), mask=there)


def gather(kv: LayerKv, chunks: PrefillInputs, ragged: Ragged) -> None:
    """Writes what the chunks see of a layer's KV, scaled, to `ragged`."""
    count, (seen, kv_heads, width) = chunks.context.shape[0], ragged.keys.shape
    _gather[((seen // _TOKENS + count) * kv_heads,)](
        kv.keys, kv.values, ragged.start if kv.scales is None else kv.scales, chunks.block_table, ragged.start,
        ragged.keys, ragged.values, count, kv.keys.stride(0), chunks.block_table.stride(0), KV_HEADS=kv_heads,
        WIDTH=width, WIDTH_PAD=max(16, triton.next_power_of_2(width)), TOKENS=_TOKENS, EIGHT=kv.eight, num_warps=4,
    )  # fmt: skip


def attend_ragged(
    q: Tensor, kv: LayerKv, chunks: PrefillInputs, ragged: Ragged, scale: float, window: int | None
) -> Tensor:
    """q [T, H, D], chunks.tokens of them real, over a layer's KV -> [T, H, D]: `attend_chunks`'s contract."""
    gather(kv, chunks, ragged)
    bound = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        ragged.keys,
        ragged.values,
        chunks.start,
        ragged.start,
        ragged.longest,
        ragged.most_seen,
        0.0,
        True,
        False,
        scale=scale,
        **bound,
    )[0]
    return out

"""Attention of chunks: causal, over a prompt's stored tokens and the chunk's own, which are stored already."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.inputs import PrefillInputs


def attend_chunks(q: Tensor, kv: Tensor, prefill: PrefillInputs, scale: float, window: int | None, out: Tensor) -> None:
    """q [tokens, H, D] of all chunks over kv [blocks, Hkv, 2, 16, D] into out [tokens, H, D]."""
    for chunk, context in enumerate(prefill.context_list):
        first, last = prefill.start_list[chunk : chunk + 2]
        if first < last:
            out[first:last] = _attend(q[first:last], kv, prefill.block_table[chunk], context, scale, window)


def _attend(q: Tensor, kv: Tensor, table: Tensor, context: int, scale: float, window: int | None) -> Tensor:
    count, _, width = q.shape
    length = context + count
    blocks = kv.index_select(0, table[: -(-length // BLOCK_SIZE)])
    keys, values = blocks.permute(2, 1, 0, 3, 4).reshape(2, kv.shape[1], -1, width)[:, :, :length]
    at = torch.arange(context, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)
    seen = key <= at
    if window is not None:
        seen &= key > at - window
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, scale=scale, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)

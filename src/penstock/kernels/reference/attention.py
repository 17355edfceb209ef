"""Attention over the paged cache in plain torch: decode rows with prefix groups, then chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.inputs import AttentionInputs, DecodeInputs, GroupInputs, PrefillInputs

BLOCK = 16


def attention(q: Tensor, kv: Tensor, inputs: AttentionInputs, scale: float, window: int | None = None) -> Tensor:
    """q [T, H, D] over kv [blocks, Hkv, 2, 16, D] -> [T, H, D]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = inputs.rows
    if inputs.decode is not None and rows:
        out[:rows] = _decode(q[:rows], kv, inputs.decode, scale, window)
    if inputs.prefill is not None:
        _chunks(q[rows:], kv, inputs.prefill, scale, window, out[rows:])
    return out


def _decode(q: Tensor, kv: Tensor, decode: DecodeInputs, scale: float, window: int | None) -> Tensor:
    if decode.groups is not None and window is not None:
        raise ValueError("prefix groups cannot be attended with a sliding window: send the rows alone")
    rows, heads, width = q.shape
    kv_heads = kv.shape[1]
    queries = q.float().view(rows, kv_heads, heads // kv_heads, width) * scale
    top, total, acc = _own(queries, kv, decode, window)
    if decode.groups is not None:
        _merge_prefixes(queries, kv, decode.groups, top, total, acc)
    return (acc / total).view(rows, heads, width).to(q.dtype)


def _own(queries: Tensor, kv: Tensor, decode: DecodeInputs, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """(max, sum, accumulator) over each row's own tokens, from `skip` on."""
    rows, kv_heads, _, width = queries.shape
    count = max(1, -(-decode.max_own // BLOCK))
    columns = (decode.skip.long() // BLOCK)[:, None] + torch.arange(count, device=kv.device)
    table = decode.block_table.gather(1, columns.clamp_(max=decode.block_table.shape[1] - 1))
    gathered = kv.index_select(0, table.flatten()).float().view(rows, count, kv_heads, 2, BLOCK, width)
    keys, values = gathered.permute(3, 0, 2, 1, 4, 5).reshape(2, rows, kv_heads, count * BLOCK, width)
    position = torch.arange(count * BLOCK, device=kv.device) + decode.skip[:, None]
    hidden = position >= decode.lengths[:, None]
    if window is not None:
        hidden |= position < decode.lengths[:, None] - window
    scores = (queries @ keys.mT).masked_fill_(hidden[:, None, None], -torch.inf)
    return _state(scores, values)


def _state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp_()
    return top, weights.sum(-1, keepdim=True), weights @ values


def _merge_prefixes(queries: Tensor, kv: Tensor, groups: GroupInputs, top: Tensor, total: Tensor, acc: Tensor) -> None:
    _, kv_heads, share, width = queries.shape
    for group, length in enumerate(groups.length_list):
        first, last = groups.start_list[group : group + 2]
        if not length or first == last:
            continue
        blocks = kv.index_select(0, groups.blocks[group, : length // BLOCK]).float()
        keys, values = blocks.permute(2, 1, 0, 3, 4).reshape(2, kv_heads, length, width)
        members = queries[first:last].transpose(0, 1).reshape(kv_heads, -1, width)
        state = _state(members @ keys.mT, values)
        shaped = [part.view(kv_heads, last - first, share, -1).transpose(0, 1) for part in state]
        _merge(top[first:last], total[first:last], acc[first:last], *shaped)


def _merge(top: Tensor, total: Tensor, acc: Tensor, top2: Tensor, total2: Tensor, acc2: Tensor) -> None:
    """Merges the second state into the first, in place."""
    high = torch.maximum(top, top2)
    mine, other = (top - high).exp_(), (top2 - high).exp_()
    total.mul_(mine).addcmul_(total2, other)
    acc.mul_(mine).addcmul_(acc2, other)
    top.copy_(high)


def _chunks(q: Tensor, kv: Tensor, prefill: PrefillInputs, scale: float, window: int | None, out: Tensor) -> None:
    for chunk, context in enumerate(prefill.context_list):
        first, last = prefill.start_list[chunk : chunk + 2]
        if first == last:
            continue
        out[first:last] = _chunk(q[first:last], kv, prefill.block_table[chunk], context, scale, window)


def _chunk(q: Tensor, kv: Tensor, table: Tensor, context: int, scale: float, window: int | None) -> Tensor:
    count, _, width = q.shape
    length = context + count
    blocks = kv.index_select(0, table[: -(-length // BLOCK)])
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

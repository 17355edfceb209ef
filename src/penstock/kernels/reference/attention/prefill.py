"""Attention of chunks in plain torch. A chunk is some consecutive tokens of a prompt. Each attends
to its prompt's tokens up to itself; the chunk's own K and V are already in the cache.

Queries are computed in pieces of at most 64. A piece takes only the keys up to its last query, so
about half of the products above the diagonal are saved. Scores and softmax are float32; weights and
values are bf16 in a bf16 model, as in `decode`. On one thread of a Zen 5, with 14 heads of 64, 256
tokens take 1.5 ms, and 2.9 ms with torch's fused attention and a mask; 1,024 tokens take 21 and 42
ms.

n: tokens of a chunk, H: query heads, Hkv: KV heads, D: numbers of a head, V: numbers of a value."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.inputs import AttentionKind, PrefillInputs
from penstock.kernels.layer_kv import LayerKv, take_blocks
from penstock.kernels.reference.attention.decode import left_of
from penstock.kernels.state_forms import LatentKv

PIECE = 64  # most queries of a piece
PIECE_SCORES = 1 << 19  # most scores of a piece; pieces have fewer queries if the context is long


def attend_chunks(
    q: Tensor,
    kv: LayerKv | LatentKv,
    prefill: PrefillInputs,
    kind: AttentionKind,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Computes attention of all chunks' q [tokens, H, D] over a layer's KV into out [tokens, H, V].
    sinks: see `ops.Attention`."""
    start = prefill.start.tolist()
    for chunk, context in enumerate(prefill.context.tolist()):
        first, last = start[chunk : chunk + 2]
        if first < last:
            _chunk(
                q[first:last], kv, prefill.block_table[chunk], context, kind, out[first:last], sinks
            )


def _chunk(
    q: Tensor,
    kv: LayerKv | LatentKv,
    table: Tensor,
    context: int,
    kind: AttentionKind,
    out: Tensor,
    sinks: Tensor | None,
) -> None:
    """Computes attention of one chunk's q [n, H, D], at positions from `context` on, into out [n,
    H, V]. table: the prompt's block table."""
    length, window = context + q.shape[0], kind.window
    begin = 0 if window is None else max(0, context - window + 1) // BLOCK_SIZE
    table = table[begin : -(-length // BLOCK_SIZE)]
    if isinstance(kv, LatentKv):
        keys = kv.worth(table).flatten(0, 1)[None]
        values = keys[..., : kv.value_width]
    else:
        keys, values = (
            take_blocks(part, table).transpose(0, 1).flatten(1, 2) for part in (kv.keys, kv.values)
        )
    attend_keys(q, keys, values, context, kind, out, begin * BLOCK_SIZE, kv.scales, sinks)


def attend_keys(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    context: int,
    kind: AttentionKind,
    out: Tensor,
    held: int = 0,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Computes attention of a chunk's q [n, H, D], whose first token is at position `context`, into
    out [n, H, V]. keys: [Hkv, tokens, D] and values: [Hkv, tokens, V] are of whole blocks; their
    first token is at position `held`. scales: see LayerKv."""
    count, heads, width = q.shape
    kv_heads, window = keys.shape[0], kind.window
    keys = keys.float()
    values = values.to(torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32)
    wide = (q.float() * kind.scale).view(count, kv_heads, -1, width).permute(1, 2, 0, 3)
    if scales is not None:
        wide = wide * scales[0, :, None, None, None]
    piece = max(1, min(PIECE, PIECE_SCORES // (heads * keys.shape[1])))
    for first in range(0, count, piece):
        last = min(first + piece, count)
        low = (
            0
            if window is None
            else (max(held, context + first - window + 1) - held) // BLOCK_SIZE * BLOCK_SIZE
        )
        high = -(-(context + last - held) // BLOCK_SIZE) * BLOCK_SIZE
        queries = wide[:, :, first:last].reshape(kv_heads, -1, width)
        scores = torch.bmm(queries, keys[:, low:high].mT)
        if kind.softcap is not None:
            scores = scores.div_(kind.softcap).tanh_().mul_(kind.softcap)
        _hide(scores.view(heads, last - first, -1), context + first, held + low, window)
        weights = torch.softmax(scores, -1)
        if sinks is not None:
            by_head = scores.view(heads, last - first, -1)
            weights.view(by_head.shape).mul_(left_of(by_head, sinks[:, None])[..., None])
        weights = weights.to(values.dtype)
        mixed = torch.bmm(weights, values[:, low:high])
        if scales is not None:
            mixed = mixed * scales[1, :, None, None]
        out[first:last] = mixed.view(heads, last - first, -1).transpose(0, 1)


def _hide(scores: Tensor, first: int, key: int, window: int | None) -> None:
    """Sets scores [H, n, keys] of keys that a query doesn't see to -inf. first, key: positions of
    the first query and of the first key."""
    _, count, keys = scores.shape
    clear = max(0, first - key + 1) if window is None else 0  # leading keys that every query sees
    at = torch.arange(first, first + count, device=scores.device)[:, None]
    position = torch.arange(key + clear, key + keys, device=scores.device)
    hidden = position > at
    if window is not None:
        hidden |= position <= at - window
    scores[..., clear:].masked_fill_(hidden, -torch.inf)

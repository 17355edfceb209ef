"""Attention of decode rows, tile by tile: one query a row, over its group's prefix and its own
tokens.

A tile's scores over prefix and own tokens are adjacent in one buffer, so one float32 softmax covers
both, without merging (max, sum, accumulator). Queries and keys are multiplied in float32: a bf16
product gives bf16 scores here, which doubles the output's error (scores of size 1) or makes it 8
times larger (size 12). Weights and values are multiplied in bf16 in a bf16 model, since their sums
are float32 inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.inputs import AttentionKind, DecodeInputs
from penstock.kernels.layer_kv import TURNED, LayerKv, in_rows, over_gaps
from penstock.kernels.reference.attention.tiles import Tile, cut
from penstock.kernels.reference.sampling.row_calls import batches_keep
from penstock.kernels.state_forms import LatentKv, widened

# Tokens whose weighted values are summed at once. MKL sums up to 192 terms in one piece on AMD, 240
# with AVX2 and 384 with AVX-512 on Intel; longer sums are cut by their length.
RUN = 192


@dataclass(frozen=True, slots=True)
class Flat:
    """A layer's storage as rows [rows, 16 * D], views. Plain KV: one array, K and V alternating by
    head. V in eight bits: K's rows and V's rows, one a head. Latents: one array, whose values are
    the first `value_width` numbers of each. Latents in eight bits: rows of values, and rows of the
    rotated part. Eight bits are stored as bytes, which torch can move.

    own: rows of a block. apart: rows from a block to the next. scale: of latents in eight bits."""

    parts: tuple[Tensor, ...]
    own: int
    apart: int
    value_width: int | None = None
    scale: Tensor | None = None


@dataclass(slots=True)
class DecodePlan:
    """Tiles and reused buffers of a step's layers. Fresh buffers would cost page faults (a copy of
    33 MB into a new tensor took 9.6 ms, into an old one 1.2 ms)."""

    tiles: list[Tile]
    order: Tensor | None = (
        None  # [S'] rows of the step in tile order, padding repeated; None: already in order
    )
    back: Tensor | None = None  # [S] index of each row in that order
    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the buffer of this name and dtype, kept at its largest size so far; its content
        is undefined."""
        size = prod(shape)
        held = self.buffers.get((name, dtype))
        if held is None or held.numel() < size:
            held = self.buffers[name, dtype] = torch.empty(size, dtype=dtype, device=like.device)
        return held[:size].view(shape)


def plan_decode(decode: DecodeInputs, kind: AttentionKind) -> DecodePlan:
    """Cuts a step's rows into tiles. Returns the plan."""
    plan = DecodePlan(cut(decode, kind.heads, kind.kv_heads, kind.window))
    order = np.concatenate([tile.rows for tile in plan.tiles])
    rows = decode.rows.shape[0]
    if not np.array_equal(order, np.arange(rows)):
        back = np.empty(rows, np.int64)
        back[order] = np.arange(len(order))
        plan.order, plan.back = (
            torch.from_numpy(index).to(decode.table.device) for index in (order, back)
        )
    return plan


def attend_rows(
    q: Tensor,
    kv: LayerKv | LatentKv,
    plan: DecodePlan,
    kind: AttentionKind,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Attends q [S, H, D] over a layer's KV into out [S, H, V]. sinks: see `ops.Attention`."""
    by_kv_head = None if sinks is None else sinks.view(kv.kv_heads, 1, -1)
    kv_heads = kv.kv_heads
    flat = _flat(kv)
    key_scale, value_scale = (
        (None, None) if kv.scales is None else kv.scales[:, :, None, None, None]
    )
    ordered = q if plan.order is None else q.index_select(0, plan.order)
    mixed = (
        out
        if plan.order is None
        else plan.take("mixed", (*ordered.shape[:2], out.shape[2]), q, q.dtype)
    )
    first = 0
    for tile in plan.tiles:
        last = first + len(tile.rows)
        by_head = ordered[first:last].unflatten(1, (kv_heads, -1)).transpose(0, 1)
        queries = (
            plan.take("queries", tuple(by_head.shape), q, torch.float32)
            .copy_(by_head)
            .mul_(kind.scale)
        )
        if key_scale is not None:
            queries.mul_(key_scale)
        answer = _attend(tile, queries, flat, plan, kind.softcap, q.dtype, by_kv_head)
        answer = answer.view(*by_head.shape[:-1], -1)
        if value_scale is not None:
            answer = answer * value_scale
        mixed[first:last].unflatten(1, (kv_heads, -1)).transpose(0, 1).copy_(answer)
        first = last
    if plan.back is not None:
        torch.index_select(mixed, 0, plan.back, out=out)


def _flat(kv: LayerKv | LatentKv) -> Flat:
    if isinstance(kv, LatentKv):
        if kv.beside is None:
            return Flat((kv.latent.flatten(1),), 1, 1, kv.value_width)
        return Flat(
            (kv.latent.view(torch.uint8).flatten(1), kv.beside.flatten(1)),
            1,
            1,
            kv.value_width,
            kv.scale,
        )
    _, heads, size, width = kv.keys.shape
    numbers = size * width
    if kv.scales is None:
        rows, apart = in_rows(kv.storage.view(kv.keys.dtype), numbers, numbers)
        return Flat((rows,), 2 * heads, apart)
    keys = kv.keys.view(torch.uint8) if kv.eight == 2 else kv.keys
    head = kv.storage[0].numel() // heads  # bytes; strides of a dimension of one head are arbitrary
    both = [
        in_rows(part, numbers, head // part.itemsize)
        for part in (keys, kv.values.view(torch.uint8))
    ]
    return Flat((both[0][0], both[1][0]), heads, both[0][1])


def _attend(
    tile: Tile,
    queries: Tensor,
    flat: Flat,
    plan: DecodePlan,
    softcap: float | None,
    dtype: torch.dtype,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the tile's output [Hkv * R, G, D], float32 or bfloat16 as from `_weighted`."""
    kv_heads, rows, share, width = queries.shape
    own_k, own_v = _gather("own", tile.own_index, (kv_heads * rows, tile.own, width), flat, plan)
    own = _scores("own", queries.view(-1, share, width), own_k, plan, softcap).view(
        kv_heads, rows, share, tile.own
    )
    if tile.own_bias is not None:
        own[..., tile.own_clear :] += tile.own_bias
    if tile.prefix_index is None:
        return _weighted("own", _softmax(own, plan, sinks), own_v, plan, dtype, in_runs=True)
    batch = kv_heads * tile.groups
    fore_k, fore_v = _gather("fore", tile.prefix_index, (batch, tile.prefix, width), flat, plan)
    fore = _scores("fore", queries.view(batch, -1, width), fore_k, plan, softcap)
    fore = fore.view(kv_heads, rows, share, tile.prefix)
    if tile.prefix_bias is not None:
        fore.view(kv_heads, tile.groups, -1, tile.prefix).add_(tile.prefix_bias)
    joined = plan.take(
        "joined", (kv_heads, rows, share, tile.prefix + tile.own), queries, torch.float32
    )
    weights = _softmax(torch.cat((fore, own), -1, out=joined), plan, sinks)
    mixed = _weighted("own", weights[..., tile.prefix :], own_v, plan, dtype, in_runs=True)
    return mixed.add_(
        _weighted("fore", weights[..., : tile.prefix], fore_v, plan, dtype).view(mixed.shape)
    )


def _gather(
    name: str, index: Tensor, shape: tuple[int, int, int], flat: Flat, plan: DecodePlan
) -> tuple[Tensor, Tensor]:
    """Returns K and V of `shape`; V in eight bits is transposed, [batch, n, 8, D]. index: the
    tile's index of both."""
    by_turns = len(flat.parts) == 1 and flat.value_width is None
    index = over_gaps(index if by_turns else index.view(2, -1)[0] // 2, flat.own, flat.apart)
    taken = [
        torch.index_select(
            part,
            0,
            index,
            out=plan.take(f"{name}{at}", (index.numel(), part.shape[1]), part, part.dtype),
        )
        for at, part in enumerate(flat.parts)
    ]
    if flat.value_width is not None:
        whole = taken[0]
        if flat.scale is not None:
            eight, beside = (part.unflatten(1, (BLOCK_SIZE, -1)) for part in taken)
            whole = widened(eight.view(E4M3), beside, flat.scale)
        vectors = whole.view(shape)
        return vectors, vectors[..., : flat.value_width]
    if by_turns:
        keys, values = taken[0].view(2, *shape).unbind(0)
        return keys, values
    keys, values = taken
    keys = keys.view(E4M3) if keys.dtype == torch.uint8 else keys
    return keys.view(shape), values.view(E4M3).view(shape[0], -1, shape[2], TURNED).mT


def _scores(
    name: str, queries: Tensor, keys: Tensor, plan: DecodePlan, softcap: float | None
) -> Tensor:
    """Returns scores [batch, m, tokens] float32 of queries [batch, m, D] and keys [batch, tokens,
    D]."""
    wide = _as(torch.float32, name + "_k", keys, plan)
    out = plan.take(
        name + "_scores",
        (queries.shape[0], queries.shape[1], keys.shape[1]),
        queries,
        torch.float32,
    )
    scores = _product(queries, wide.mT, out)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _softmax(scores: Tensor, plan: DecodePlan, sinks: Tensor | None) -> Tensor:
    """Returns softmax weights of scores [Hkv, R, G, tokens]. sinks: [Hkv, 1, G] or None."""
    weights = torch.softmax(
        scores, -1, out=plan.take("weights", tuple(scores.shape), scores, torch.float32)
    )
    return weights if sinks is None else weights.mul_(left_of(scores, sinks)[..., None])


def left_of(scores: Tensor, sinks: Tensor) -> Tensor:
    """Returns the share of the softmax of scores [..., tokens] that a sink leaves to them [...]."""
    return torch.sigmoid(torch.logsumexp(scores, -1) - sinks)


def _weighted(
    name: str,
    weights: Tensor,
    values: Tensor,
    plan: DecodePlan,
    dtype: torch.dtype,
    *,
    in_runs: bool = False,
) -> Tensor:
    """Returns weights [..., tokens] float32 times the values of `_gather`: [batch, m, D], bf16 in a
    bf16 model if this processor's bf16 products keep a row's bits, else float32.

    torch multiplies strided batches one matrix at a time, so weights are made contiguous first.
    in_runs: sum float32 in runs of RUN tokens. MKL cuts longer sums by their length, and so by the
    padding of a row's own tokens; within runs, and by whole runs, padding only adds zeros."""
    in_bf16 = dtype == torch.bfloat16 and batches_keep(dtype, torch.get_num_threads())
    kind = torch.bfloat16 if in_bf16 else torch.float32
    flat = _as(kind, name + "_w", weights, plan).view(values.shape[0], -1, weights.shape[-1])
    values = _as(kind, name + "_v", values, plan)
    values = values if values.dim() == 3 else values.flatten(1, 2)
    if kind != torch.float32 or not in_runs:
        return torch.bmm(flat, values)
    mixed = _product(flat[..., :RUN], values[:, :RUN])
    for first in range(RUN, values.shape[1], RUN):
        mixed += _product(flat[..., first : first + RUN], values[:, first : first + RUN])
    return mixed


def _as(dtype: torch.dtype, name: str, part: Tensor, plan: DecodePlan) -> Tensor:
    """Returns `part`, contiguous and of this dtype."""
    if part.dtype == dtype and part.is_contiguous():
        return part
    return plan.take(name, tuple(part.shape), part, dtype).copy_(part)


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns a [batch, m, k] @ b [batch, k, n], float32. A batch of one is doubled: MKL splits a
    single product over threads by m and k, which changes last bits."""
    if a.shape[0] == 1:
        done = torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
        return done if out is None else out.copy_(done)
    return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)

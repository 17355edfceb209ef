"""Attention of decode queries in plain torch, tile by tile. A query attends to its group's prefix,
if it has one, and to its row's own tokens. A tile is a rectangle of queries for one matrix product
(tiles.py).

A tile's scores over prefix and own tokens are adjacent in one buffer, so one float32 softmax covers
both, and no partial results have to be joined. Queries and keys are multiplied in float32, since
torch's bf16 product would round scores to bf16. That would make the output's error 2 times larger
for scores of magnitude 1, and 8 times for 12. In a bf16 model, softmax weights and values are
multiplied in bf16, with sums in float32.

In a bf16 model on a processor whose products change a row's bits with its company anyway, small
tiles take torch's fused attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.inputs import AttentionKind, DecodeInputs
from penstock.kernels.layer_kv import TURNED, LayerKv, RowIndex, in_rows
from penstock.kernels.reference.attention.tiles import Tile, cut
from penstock.kernels.reference.linear.linear import moves_rows
from penstock.kernels.reference.sampling.row_calls import batches_keep
from penstock.kernels.state_forms import LatentKv, widened

# Tokens whose weighted values are summed in one product. MKL sums up to 192 terms in one piece on
# AMD, 240 with AVX2 and 384 with AVX-512 on Intel. It splits longer sums in a way that depends on
# their length.
RUN = 192
# The most KV heads x blocks of a tile that torch's fused attention computes. SmolLM2-135M's row of
# 160 tokens takes 26 us by it and 71 by products, 16 rows (480) as long; more are slower.
FUSED_BLOCKS = 400


@dataclass(frozen=True, slots=True)
class Flat:
    """Views of a layer's KV storage as rows of 16 tokens, [rows, 16 * numbers of a token].

    parts: for plain KV one array, in which K and V alternate by head. With V in eight bits K's
    array and V's array, with a row a head. For latents one array, of which the first `value_width`
    numbers of a token are the value. For latents in eight bits an array of values and one of
    rotated parts. Eight-bit numbers are viewed as bytes, which torch can gather.

    own: rows of a block. apart: rows from a block to the next. scale: of latents in eight bits."""

    parts: tuple[Tensor, ...]
    own: int
    apart: int
    value_width: int | None = None
    scale: Tensor | None = None

    @property
    def by_turns(self) -> bool:
        """True: K and V alternate in one array."""
        return len(self.parts) == 1 and self.value_width is None


@dataclass(slots=True)
class DecodePlan:
    """A step's tiles, and buffers that its layers reuse. New buffers would cause page faults: a
    copy of 33 MB took 9.6 ms into a new tensor, and 1.2 ms into an old one."""

    tiles: list[Tile]
    order: Tensor | None = (
        # [queries of all tiles, with padding]: index of each query in the step; None: they are in
        # order
        None
    )
    # [S]: position of each of the step's S queries in the tiles' order; None: they are in order
    back: Tensor | None = None
    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    # views of the buffers by name, dtype and shape: all layers take the same ones
    views: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a view of the reused buffer with this name and dtype, which grows to its largest
        size. Its content is undefined. like: a tensor on the buffer's device."""
        found = self.views.get((name, dtype, shape))
        if found is None:
            size = prod(shape)
            held = self.buffers.get((name, dtype))
            if held is None or held.numel() < size:
                held = torch.empty(size, dtype=dtype, device=like.device)
                self.buffers[name, dtype] = held
                self.views = {k: v for k, v in self.views.items() if k[:2] != (name, dtype)}
            found = self.views[name, dtype, shape] = held[:size].view(shape)
        return found


def plan_decode(decode: DecodeInputs, kind: AttentionKind) -> DecodePlan:
    """Divides a step's decode queries into tiles; returns the plan for all layers of a kind."""
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
    """Computes attention of q [S, H, D] over a layer's KV into out [S, H, V]. S: decode queries, H:
    query heads, D: numbers of a head, V: numbers of a value. sinks: see `ops.Attention`."""
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
    ordered, made = (part.unflatten(1, (kv_heads, -1)).transpose(0, 1) for part in (ordered, mixed))
    first, several = 0, len(plan.tiles) > 1
    for tile in plan.tiles:
        last = first + len(tile.rows)
        by_head = ordered[:, first:last] if several else ordered
        if sinks is None and _fuses(tile, by_head, flat, kind):
            answer = _attend_fused(tile, by_head, flat, plan, kind)
        else:
            answer = _attend(tile, by_head, flat, plan, kind, key_scale, by_kv_head)
            answer = answer.view(*by_head.shape[:-1], -1)
        if value_scale is not None:
            answer = answer * value_scale
        (made[:, first:last] if several else made).copy_(answer)
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
    # bytes of a head; not taken from strides, which are arbitrary if there is only one head
    head = kv.storage[0].numel() // heads
    both = [
        in_rows(part, numbers, head // part.itemsize)
        for part in (keys, kv.values.view(torch.uint8))
    ]
    return Flat((both[0][0], both[1][0]), heads, both[0][1])


def _fuses(tile: Tile, queries: Tensor, flat: Flat, kind: AttentionKind) -> bool:
    """Returns True if `_attend_fused` computes this tile."""
    return (
        queries.dtype == torch.bfloat16
        and queries.device.type == "cpu"
        and flat.by_turns
        and tile.prefix_index is None
        and kind.softcap is None
        and queries.shape[0] * queries.shape[1] * tile.own <= FUSED_BLOCKS * BLOCK_SIZE
        and moves_rows(torch.bfloat16)
    )


def _attend_fused(
    tile: Tile, queries: Tensor, flat: Flat, plan: DecodePlan, kind: AttentionKind
) -> Tensor:
    """Returns the output of a tile without a prefix, [Hkv, R, G, D], by torch's fused attention.
    queries: [Hkv, R, G, D], not scaled."""
    kv_heads, rows, _, width = queries.shape
    keys, values = _gather("own", tile.own_index, (kv_heads * rows, tile.own, width), flat, plan)
    shape = (kv_heads, rows, tile.own, width)
    return F.scaled_dot_product_attention(
        queries, keys.view(shape), values.view(shape), tile.mask(), scale=kind.scale
    )


def _attend(
    tile: Tile,
    queries: Tensor,
    flat: Flat,
    plan: DecodePlan,
    kind: AttentionKind,
    key_scale: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the tile's output [Hkv * R, G, V], of the dtype that `_weighted` returns. queries:
    [Hkv, R, G, D], not scaled. key_scale: of K in eight bits. Hkv: KV heads, R: queries of the
    tile, G: query heads per KV head, V: numbers of a value."""
    (kv_heads, rows, share, width), dtype, softcap = queries.shape, queries.dtype, kind.softcap
    wide = plan.take("queries", tuple(queries.shape), queries, torch.float32)
    queries = wide.copy_(queries).mul_(kind.scale)
    if key_scale is not None:
        queries.mul_(key_scale)
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
    name: str, index: RowIndex, shape: tuple[int, int, int], flat: Flat, plan: DecodePlan
) -> tuple[Tensor, Tensor]:
    """Gathers K and V of a tile, each of `shape`; V in eight bits is transposed, [batch, n, 8, D].
    name: of the buffers. index: indices of K's rows, then V's, in `flat`."""
    if not flat.by_turns:
        index = RowIndex(index.index.view(2, -1)[0] // 2)
    where = index.over_gaps(flat.own, flat.apart)
    taken = [
        torch.index_select(
            part,
            0,
            where,
            out=plan.take(f"{name}{at}", (where.numel(), part.shape[1]), part, part.dtype),
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
    if flat.by_turns:
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
    """Returns the softmax of scores [Hkv, R, G, tokens]. Hkv: KV heads, R: queries, G: query heads
    per KV head. sinks: [Hkv, 1, G] or None."""
    weights = torch.softmax(
        scores, -1, out=plan.take("weights", tuple(scores.shape), scores, torch.float32)
    )
    return weights if sinks is None else weights.mul_(left_of(scores, sinks)[..., None])


def left_of(scores: Tensor, sinks: Tensor) -> Tensor:
    """Returns the factor [...] by which sinks reduce the softmax of scores [..., tokens]: the
    tokens' share of the softmax's denominator."""
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
    """Returns softmax weights [..., tokens] float32 times values from `_gather`: [batch, m, D]. In
    a bf16 model the result is bf16 if on this processor the bits of a bf16 product's row don't
    depend on other rows; else it is float32.

    Weights are made contiguous first, since torch multiplies strided batches one matrix at a time.
    in_runs: True sums float32 in runs of RUN tokens. Otherwise a row's bits would depend on its
    padding, as MKL splits longer sums by their length. In runs, padding only adds zeros."""
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
    """Returns `part` as a contiguous tensor of `dtype`, if necessary in the plan's buffer
    `name`."""
    if part.dtype == dtype and part.is_contiguous():
        return part
    return plan.take(name, tuple(part.shape), part, dtype).copy_(part)


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns a [batch, m, k] @ b [batch, k, n] in float32. A batch of one is computed twice, as a
    batch of two: MKL would divide a single product among threads by m and k, so its last bits would
    depend on m."""
    if a.shape[0] == 1:
        done = torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
        return done if out is None else out.copy_(done)
    return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)

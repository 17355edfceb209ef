"""Multi-head latent attention (arXiv:2405.04434). All heads read one vector a token: the whole
vector is the key, its first part is the value. A program loads it once for both.

A program handles a tile of queries (tokens x some of their heads) and loops over the vectors of a
range of a decode row's own tokens (`_own`), a group's prefix (`_prefix`) or a chunk's prompt
(`_prefill`). Programs share rows, and continue from prefixes, as in `decode`, `prefix` and
`prefill`. T: a step's tokens, H: heads; rank, turning, still, value: see LatentSizes."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import AttentionKind, DecodeInputs, StepInputs
from penstock.kernels.latent import EXPAND_TOKENS, LatentSizes
from penstock.kernels.state_forms import LatentKv
from penstock.kernels.triton.attention.attention import KindPlan
from penstock.kernels.triton.attention.flash_loop import LOG2_E
from penstock.kernels.triton.attention.latent_chunks import (
    LEAST,
    Room,
    Seen,
    SequenceEnds,
    attend_expanded,
    heads_at_once,
)
from penstock.kernels.triton.attention.latent_kernels import _own, _prefill, _prefix
from penstock.kernels.triton.attention.latent_maps import (
    Parts,
    absorbed_queries,
    joins_parts,
    values_of,
)
from penstock.kernels.triton.attention.prefix import EACH, MOST_PARTS, PART_TILE, PART_TOKENS
from penstock.kernels.triton.attention.row_parts import (
    FEW_PROGRAMS,
    MOST_SPLITS,
    join_parts,
    splits_of,
)
from penstock.kernels.triton.grid import cdiv, next_power_of_2, shared_of
from penstock.kernels.triton.pdl import early_of

Shape = tuple[int, int, int, int]  # (least queries of a program, tokens of a tile, warps, stages)
# Rows from which on the GPU has programs enough if one holds up to 32 heads. At most PREFIX_ROWS,
# since the start compiles rows beside expanded prefixes for the largest step alone.
MANY = 64


def latent_attention(
    q: Tensor,
    up: Tensor,
    kv: LatentKv,
    inputs: StepInputs,
    kind: AttentionKind,
    plan: KindPlan,
    asked: Tensor | None = None,
    *,
    expand_tokens: int = EXPAND_TOKENS,
) -> Tensor:
    """Computes attention of q [T, H, still + turning] over a layer's latents; returns [T, H,
    value]. up: [H, still + value, rank]. asked: what `latent_store` returned. The contract is
    `ops.AttentionOverLatents`. expand_tokens: see kernels/tunables.py."""
    sizes, rows, chunks = kind.latent, inputs.rows, inputs.prefill
    assert sizes is not None, "the kind is of latent attention"
    groups = None if plan.decode is None else plan.decode.groups
    shared = None if groups is None else groups.expanded
    # counts of the chunks, if they are attended in the expanded form
    seen = chunks.seen if chunks is not None and chunks.expands(sizes, expand_tokens) else None
    if seen is not None and not heads_at_once(seen.stored, sizes, kind.heads, q.dtype):
        seen = None
    out = torch.empty((*q.shape[:2], sizes.value), dtype=q.dtype, device=q.device)
    if seen is None and shared is None:
        return _absorbed(q, up, kv, inputs, kind, plan, sizes, out, asked)
    if plan.room is None:
        plan.room = Room.of(sizes, q.dtype, q.device)
    absorbed, lse = q.shape[0] if seen is None else rows, None
    if shared is not None:
        lse = torch.empty((rows, kind.heads), dtype=torch.float32, device=q.device)
    if absorbed:
        some = None if asked is None else asked[:absorbed]
        _absorbed(q[:absorbed], up, kv, inputs, kind, plan, sizes, out[:absorbed], some, lse)
    if groups is not None and shared is not None:
        if plan.prefixes is None:
            each = groups.length.to(torch.int64)
            plan.prefixes = Seen.of(each, groups.blocks, shared.stored, sizes, q.dtype)
        ends = SequenceEnds(groups.start, groups.length, lse)
        attend_expanded(q[:rows], up, kv, plan.prefixes, ends, kind, plan.room, out[:rows])
    if chunks is not None and seen is not None:
        if plan.chunks is None:
            own = (chunks.start[1:] - chunks.start[:-1]).to(torch.int64)
            each = torch.where(own > 0, own + chunks.context, 0)
            plan.chunks = Seen.of(each, chunks.block_table, seen.stored, sizes, q.dtype)
        ends = SequenceEnds(chunks.start, chunks.context)
        attend_expanded(q[rows:], up, kv, plan.chunks, ends, kind, plan.room, out[rows:])
    return out


def _absorbed(
    q: Tensor,
    up: Tensor,
    kv: LatentKv,
    inputs: StepInputs,
    kind: AttentionKind,
    plan: KindPlan,
    sizes: LatentSizes,
    out: Tensor,
    asked: Tensor | None,
    lse: Tensor | None = None,
) -> Tensor:
    """Computes attention by queries that are multiplied by `up`; writes it to `out` and returns
    that. asked: these queries, if they are made. lse: None, or as in `attend_vectors`."""
    if asked is None:
        asked = absorbed_queries(q, up, sizes)
    seen = attend_vectors(asked, q[..., sizes.still :], kv, inputs, kind, plan, lse)
    return values_of(seen, up, sizes, out)


def attend_vectors(
    q: Tensor,
    rotated: Tensor,
    kv: LatentKv,
    inputs: StepInputs,
    kind: AttentionKind,
    plan: KindPlan,
    lse: Tensor | None = None,
) -> Tensor | Parts:
    """Computes attention in the absorbed form. q: [T, H, rank] without gaps, queries multiplied by
    the keys' part of `up`: the decode queries, and the chunks' tokens if q has them. rotated: their
    rotated parts, [T, H, turning], whose last dimension has no gaps. Returns weighted sums of
    latents, [T, H, rank], or parts of them for one query whose tokens are shared among programs.
    lse: [S, H] float32; None: decode queries see their group's prefix. Else they see only their own
    tokens, and their log-sum-exp is written to lse."""
    rows, out = inputs.rows, torch.empty_like(q)
    if (decode := plan.decode) is not None:
        if lse is None:
            _attend_prefixes(q[:rows], rotated, kv, decode, kind, plan)
        parts = _attend_rows(
            q[:rows], rotated, kv, decode, kind, plan, out[:rows], lse, len(q) == 1
        )
        if parts is not None:
            return parts
    if inputs.prefill is not None and q.shape[0] > rows:
        chunks = inputs.prefill
        count, shape = chunks.context.shape[0], _tall_shape(q.dtype, kv, shared_of(q.device))
        held, queries = _tile(kind.heads, shape)
        tiles = (q.shape[0] - rows) // (queries // held) + count
        parts = cdiv(kind.heads, held)
        _prefill[(tiles * parts,)](
            q[rows:],
            rotated[rows:],
            *_stored(kv, out),
            out[rows:],
            chunks.start,
            chunks.context,
            chunks.block_table,
            count,
            tiles,
            kind.scale * LOG2_E,
            *rotated.stride()[:2],
            *_strides(kv),
            chunks.block_table.stride(0),
            HEADS=kind.heads,
            HELD=held,
            QUERIES=queries,
            **_widths(kv),
            PARTS=parts,
            **_how(q, shape),
        )
    return out


def _attend_prefixes(
    q: Tensor,
    rotated: Tensor,
    kv: LatentKv,
    decode: DecodeInputs,
    kind: AttentionKind,
    plan: KindPlan,
) -> None:
    groups, state = decode.groups, plan.prefix
    if groups is None or state is None:
        return
    count, shape = groups.length.shape[0], _tall_shape(q.dtype, kv, shared_of(q.device))
    held, queries = _tile(kind.heads, shape)
    tiles, parts = q.shape[0] // (queries // held) + count, cdiv(kind.heads, held)
    _prefix[(tiles * parts, state.splits)](
        q,
        rotated,
        *_stored(kv, state.lse),
        state.answer,
        state.lse,
        groups.start,
        groups.blocks,
        groups.length,
        count,
        state.splits,
        kind.scale * LOG2_E,
        *rotated.stride()[:2],
        *_strides(kv),
        groups.blocks.stride(0),
        HEADS=kind.heads,
        HELD=held,
        QUERIES=queries,
        **_widths(kv),
        PARTS=parts,
        PART_TOKENS=PART_TOKENS,
        PART_TILE=PART_TILE,
        EACH=EACH,
        **_how(q, shape),
    )


def _attend_rows(
    q: Tensor,
    rotated: Tensor,
    kv: LatentKv,
    decode: DecodeInputs,
    kind: AttentionKind,
    plan: KindPlan,
    out: Tensor,
    own_lse: Tensor | None,
    alone: bool,
) -> Parts | None:
    """Computes attention of decode queries. alone: the step has one query; its parts are returned
    unless one program computes all of it, or latents are too wide."""
    alone = alone and joins_parts(kv.value_width)
    count, heads, rank, state = q.shape[0], kind.heads, kv.value_width, plan.prefix
    shape = _rows_shape(count, heads, q.dtype, kv)
    held = min(shape[0], next_power_of_2(heads))
    parts = cdiv(heads, held)
    # Parts of one tile, if they are joined where they are used: a layer of Moonlight takes 71.6 us
    # on an H200 at 330 tokens, 73.2 with parts of two.
    few_tokens = shape[1] if alone else 64
    splits, split_tokens = splits_of(count * parts, decode.max_own, FEW_PROGRAMS, few_tokens)
    if own_lse is not None:
        splits = 1
    part, part_lse = out, out
    if splits > 1:
        part = torch.empty((count, heads, splits, rank), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((count, heads, splits), dtype=torch.float32, device=q.device)
    answer, lse, prefix_splits = (
        (out, own_lse if own_lse is not None else out, 1)
        if state is None
        else (state.answer, state.lse, state.splits)
    )
    skips = state is not None or own_lse is not None
    step = (decode.position, decode.skip if skips else decode.rows)
    capacity = decode.table.shape[1] * 16
    early = early_of(q.device, count * parts * splits)
    _own[(count * parts, splits)](
        q,
        rotated,
        *_stored(kv, out),
        out,
        answer,
        lse,
        part,
        part_lse,
        decode.table,
        decode.rows,
        *step,
        capacity,
        kind.scale * LOG2_E,
        splits,
        split_tokens,
        prefix_splits,
        *rotated.stride()[:2],
        *_strides(kv),
        decode.table.stride(0),
        HEADS=heads,
        HELD=held,
        QUERIES=shape[0],
        **_widths(kv),
        PARTS=parts,
        SKIPS=skips,
        CONTINUES=state is not None,
        PREFIX_PARTS=1 if prefix_splits == 1 else MOST_PARTS,
        PART_TOKENS=PART_TOKENS,
        PART_TILE=PART_TILE,
        SPLIT=(splits > 1) * (2 if alone else 1),
        EARLY=early,
        launch_pdl=bool(early),
        **_how(q, shape),
    )
    if alone and splits > 1:
        skip = decode.skip if skips else None
        return Parts(
            part, part_lse, decode.position, skip, capacity, splits, split_tokens, shape[1]
        )
    if splits > 1:
        early = early_of(q.device, count * heads)
        join_parts[(count * heads,)](
            out,
            part,
            part_lse,
            *step,
            capacity,
            0,
            splits,
            split_tokens,
            out.stride(0),
            heads,
            rank,
            next_power_of_2(rank),
            skips,
            False,
            shape[1],
            MOST_SPLITS,
            8,
            early,
            num_warps=4,
            launch_pdl=bool(early),
        )
    return None


def _tile(heads: int, shape: Shape) -> tuple[int, int]:
    """Returns the shape of a tile for a prefix or chunk: how many heads of each token it has, and
    how many queries (tokens x heads)."""
    tall = shape[0]
    held = heads if heads <= tall else tall // 2 if heads % tall else tall
    return held, max(tall, next_power_of_2(held))


def _rows_shape(count: int, heads: int, dtype: torch.dtype, kv: LatentKv) -> Shape:
    """Returns the shape of a program for a decode query, of `count`; the queries of its tile are
    heads of one token. More than 16 heads take a tile of 32 unless rows are few: GLM-4.7-Flash has
    20, and 1,000 rows with 640 tokens each take 303 us on an H200, 420 by two tiles of 16 that each
    read all vectors; in eight bits 462 and 627 us; one row takes 14.3 and 12.6 us. Moonlight's 16
    heads take 236 us, 77 % of copy speed."""
    if dtype == torch.float32:
        return 16, 16, 8, 1
    if heads <= 16 or count < MANY:
        return 16, 32, 4, 3
    return (32, 32, 4, 2) if kv.scale is None else (32, 64, 8, 2)


def _tall_shape(dtype: torch.dtype, kv: LatentKv, shared: int) -> Shape:
    """Returns the shape of a program for a prefix or a chunk. shared: bytes of shared memory.
    Hopper's warp group products need 64 queries, and 64 tokens if latents are in eight bits, as
    these are converted in registers (delta_chunks.LEAST). Moonlight takes on an H200, with tiles of
    64 and of 32 tokens: 1,486 and 1,889 us for 4,096 rows in 16 groups with prefixes of 2,000
    tokens. Eight bits are not timed yet."""
    if dtype == torch.float32:
        return (64, 16, 8, 1) if shared >= 190_000 else (16, 16, 8, 1)
    if kv.scale is None:
        if shared >= 225_000:
            return 64, 64, 8, 2
        return (64, 32, 8, 2) if shared >= 150_000 else (32, 32, 8, 1)
    return (64, 64, 8, 2) if shared >= 190_000 else (32, 32, 8, 2)


def _stored(kv: LatentKv, nothing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a layer's latents as kernels take them: the vectors, their rotated parts, and the
    scale of eight bits. nothing: any tensor, returned instead of the scale if there is none."""
    return kv.latent, kv.turned, nothing if kv.scale is None else kv.scale


def _strides(kv: LatentKv) -> tuple[int, int]:
    return kv.latent.stride(0), kv.turned.stride(0)


def _widths(kv: LatentKv) -> dict[str, int]:
    rank, turning = kv.value_width, kv.turned.shape[2]
    pads = {
        "RANK_PAD": max(2 * LEAST, next_power_of_2(rank)),
        "TURNING_PAD": max(16, next_power_of_2(turning)),
    }
    return {"EIGHT": kv.scale is not None, "RANK": rank, "TURNING": turning, **pads}


def _how(q: Tensor, shape: Shape) -> dict[str, object]:
    _, tokens, warps, stages = shape
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    return {"TOKENS": tokens, "PRECISION": precision, "num_warps": warps, "num_stages": stages}

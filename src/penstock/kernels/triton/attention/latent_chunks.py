"""Latent attention of chunks, or of prefix groups, in the expanded form. Each head's keys and values
are made from all latents that a step's chunks, or groups, see, by one product.

Steps: `_gather` copies these latents to consecutive memory and widens them, as well as their
rotated keys, which heads share. torch multiplies the latents by `up`, which gives keys and values
of as many heads as fit in the buffer. `_expanded` computes attention, with a program per head and
tile of a chunk's queries (FlashAttention-2's loop, arXiv:2307.08691).

If keys and values of all heads don't fit, a few heads are computed at a time, since heads are
independent. The buffer (room) is allocated in its full size, so that the first step takes as much
memory as the largest. H: heads; rank, turning, still, value: see LatentSizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import AttentionKind
from penstock.kernels.latent import ROOM, LatentSizes
from penstock.kernels.state_forms import LatentKv
from penstock.kernels.triton.attention.flash_loop import LOG2_E, nothing_seen, owner
from penstock.kernels.triton.grid import cdiv, next_power_of_2, shared_of

AT_ONCE = 2**14  # latents that are gathered and multiplied by `up` at once
LEAST = 64  # least columns of the right matrix of a product: see delta_chunks.py
_GATHERED = 16  # latents that a program of _gather copies
Tile = tuple[int, int, int, int]  # queries and tokens of a tile, warps, stages
TILES: tuple[Tile, ...] = ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1))


@dataclass(slots=True)
class Room:
    """Buffers in which all layers of a step make keys and values."""

    vectors: Tensor  # [AT_ONCE, rank]: gathered latents
    made: Tensor  # [ROOM bytes]: keys and values

    @classmethod
    def of(cls, sizes: LatentSizes, dtype: torch.dtype, device: torch.device) -> Room:
        return cls(
            torch.empty((AT_ONCE, sizes.rank), dtype=dtype, device=device),
            torch.empty(ROOM // dtype.itemsize, dtype=dtype, device=device),
        )


@dataclass(slots=True)
class Seen:
    """The latents that a step's chunks, or its prefix groups, see. n: their number."""

    slots: Tensor  # [n] int64: cache slots, one sequence (chunk or group) after the other
    first: Tensor  # [sequences] int64: index of each sequence's first token in slots
    turned: Tensor  # [n, turning]: gathered rotated keys

    @classmethod
    def of(
        cls, each: Tensor, table: Tensor, count: int, sizes: LatentSizes, dtype: torch.dtype
    ) -> Seen:
        """each: [sequences] int64, tokens that a sequence sees. table: [sequences, width], their
        blocks. count: the sum of `each`."""
        device, end = each.device, each.cumsum(0)
        first = end - each
        sequence = torch.repeat_interleave(
            torch.arange(each.shape[0], device=device), each, output_size=count
        )
        at = torch.arange(count, device=device) - first.index_select(0, sequence)
        slots = table[sequence, at // 16].to(torch.int64) * 16 + at % 16
        turned = torch.empty((count, sizes.turning), dtype=dtype, device=device)
        return cls(slots, first, turned)


@dataclass(slots=True)
class SequenceEnds:
    """Where the sequences' queries lie, and how far they see. start: [sequences + 1], as in
    PrefillInputs and GroupInputs. seen: [sequences] int32: position of a chunk's first query, or
    tokens of a group's prefix. lse: None: chunks. Else groups, whose queries have seen other tokens
    before, with this log-sum-exp [queries, H]."""

    start: Tensor
    seen: Tensor
    lse: Tensor | None = None


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots", "turned"])
def _gather(
    stored,
    beside,
    of_eight,
    slots,
    vectors,
    turned,
    count,
    stride_block,
    stride_beside,
    EIGHT: tl.constexpr,
    RANK: tl.constexpr,
    TURNING: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TURNING_PAD: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Copies `count` latents from their cache slots to vectors [count, RANK], and their rotated
    keys to turned [count, TURNING]. Latents in eight bits (EIGHT) are converted to the dtype of
    `vectors`. stored, beside: pointers to latents and rotated keys in the cache (LatentKv).
    of_eight: pointer to the scale of eight bits."""
    at = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    slot = tl.load(slots + at, mask=at < count, other=0)
    lane, turn = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, TURNING_PAD)[None, :]
    FROM: tl.constexpr = RANK if EIGHT else RANK + TURNING  # stride of tokens, in numbers
    cell = (stored + slot // 16 * stride_block + slot % 16 * FROM)[:, None]
    keys = (beside + slot // 16 * stride_beside + slot % 16 * (TURNING if EIGHT else FROM))[:, None]
    there, to = (at < count)[:, None], at.to(tl.int64)[:, None]
    vector = tl.load(cell + lane, mask=there & (lane < RANK))
    if EIGHT:
        vector = (vector.to(tl.float32) * tl.load(of_eight)).to(vectors.dtype.element_ty)
    tl.store(vectors + to * RANK + lane, vector, mask=there & (lane < RANK))
    key = tl.load(keys + turn, mask=there & (turn < TURNING))
    tl.store(turned + to * TURNING + turn, key, mask=there & (turn < TURNING))


@triton.jit
def _walk(
    low,
    high,
    turned,
    state_max,
    state_sum,
    mixed,
    made,
    keys,
    begin,
    end,
    position,
    scale,
    stride_made,
    MASKED: tl.constexpr,
    TOKENS: tl.constexpr,
    STILL: tl.constexpr,
    TURNING: tl.constexpr,
    VALUE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TURNING_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes the same as `flash_loop.walk` for one head, with keys in two or three parts: the
    first LOW numbers of the unrotated part, its other HIGH numbers if any, and the rotated part.
    low, high, turned: the queries in the same parts. made: pointer to keys and values, keys:
    pointer to rotated parts, both of the chunk's first token. MASKED: True if some queries don't
    see all tokens, or the last tile is not full."""
    token, lane, turn, value = (
        tl.arange(0, TOKENS),
        tl.arange(0, LOW)[None, :],
        tl.arange(0, TURNING_PAD)[None, :],
        tl.arange(0, VALUE_PAD)[None, :],
    )
    for at in range(begin, end, TOKENS):
        where = at + token
        stored = (where < end)[:, None]
        cell, beside = made + where[:, None] * stride_made, keys + where[:, None] * TURNING
        if MASKED:
            key = tl.load(beside + turn, mask=stored & (turn < TURNING), other=0.0)
            first = tl.load(cell + lane, mask=stored & (lane < STILL), other=0.0)
            answer = tl.load(cell + STILL + value, mask=stored & (value < VALUE), other=0.0)
        else:
            key = tl.load(beside + turn, mask=turn < TURNING, other=0.0)
            first = tl.load(cell + lane, mask=lane < STILL, other=0.0)
            answer = tl.load(cell + STILL + value, mask=value < VALUE, other=0.0)
        scores = tl.dot(turned, tl.trans(key), input_precision=PRECISION)
        scores = tl.dot(low, tl.trans(first), scores, input_precision=PRECISION)
        if HIGH > 0:
            beyond = LOW + tl.arange(0, HIGH)[None, :]
            if MASKED:
                second = tl.load(cell + beyond, mask=stored & (beyond < STILL), other=0.0)
            else:
                second = tl.load(cell + beyond, mask=beyond < STILL, other=0.0)
            scores = tl.dot(high, tl.trans(second), scores, input_precision=PRECISION)
        if MASKED:
            scores = tl.where(
                (where < end)[None, :] & (where[None, :] <= position[:, None]), scores, -1e30
            )
        larger = tl.maximum(state_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - larger[:, None])
        shrink = tl.exp2(state_max - larger)
        state_sum = state_sum * shrink + tl.sum(weights, 1)
        mixed = tl.dot(
            weights.to(answer.dtype), answer, mixed * shrink[:, None], input_precision=PRECISION
        )
        state_max = larger
    return state_max, state_sum, mixed


@triton.jit(
    do_not_specialize=["chunks", "tiles"],
    do_not_specialize_on_alignment=["start", "context", "chunk_first", "lse"],
)
def _expanded(
    q,  # [tokens, H, STILL + TURNING], from the first head of `made` on
    made,  # [seen, some heads, STILL + VALUE]
    keys,  # [seen, TURNING]
    out,  # [tokens, H, VALUE], from the first head of `made` on
    lse,  # [tokens, H] float32, from the first head of `made` on
    start,  # [chunks + 1]
    context,  # [chunks]
    chunk_first,  # [chunks]
    chunks,
    tiles,
    scale,
    stride_q,
    stride_made,
    stride_out,
    stride_lse,
    SHARED: tl.constexpr,
    STILL: tl.constexpr,
    TURNING: tl.constexpr,
    VALUE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TURNING_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes attention of a tile of a chunk's queries of one head. Each query sees its prompt up
    to itself. SHARED: chunks are prefix groups, whose queries all see `context` tokens and continue
    from `out`, their output over other tokens, and its lse."""
    head = tl.program_id(1)
    # the last tiles of a chunk see most tokens and take longest, so they go first
    chunk, row = owner(start, chunks, tiles - 1 - tl.program_id(0), QUERIES)
    chunk_start, chunk_end = tl.load(start + chunk), tl.load(start + chunk + 1)
    if row < chunk_end:
        member = row + tl.arange(0, QUERIES)
        valid = (member < chunk_end)[:, None]
        lane, turn, value = (
            tl.arange(0, LOW)[None, :],
            tl.arange(0, TURNING_PAD),
            tl.arange(0, VALUE_PAD)[None, :],
        )
        cell = q + member.to(tl.int64)[:, None] * stride_q + head * (STILL + TURNING)
        low = tl.load(cell + lane, mask=valid & (lane < STILL), other=0.0)
        turned = tl.load(
            cell + STILL + turn[None, :], mask=valid & (turn < TURNING)[None, :], other=0.0
        )
        high = turned
        if HIGH > 0:
            beyond = LOW + tl.arange(0, HIGH)[None, :]
            high = tl.load(cell + beyond, mask=valid & (beyond < STILL), other=0.0)
        first = tl.load(chunk_first + chunk).to(tl.int64)
        to = out + member.to(tl.int64)[:, None] * stride_out + head * VALUE + value
        there = valid & (value < VALUE)
        state_max, state_sum, mixed = nothing_seen(QUERIES, VALUE_PAD)
        if SHARED:
            end = tl.load(context + chunk)
            whole, position = end // TOKENS * TOKENS, tl.full([QUERIES], 2**30, tl.int32)
            mixed = tl.load(to, mask=there, other=0.0).to(tl.float32)
            place = lse + member.to(tl.int64) * stride_lse + head
            state_max = tl.load(place, mask=member < chunk_end, other=0.0)
            state_sum += 1.0
        else:
            lowest = tl.load(context + chunk) + row - chunk_start
            end = tl.minimum(lowest + QUERIES, lowest + chunk_end - row)
            whole = (lowest + 1) // TOKENS * TOKENS
            position = tl.minimum(lowest + member - row, end - 1)
        made += first * stride_made + head * (STILL + VALUE)
        keys += first * TURNING
        state_max, state_sum, mixed = _walk(
            low,
            high,
            turned,
            state_max,
            state_sum,
            mixed,
            made,
            keys,
            0,
            whole,
            position,
            scale,
            stride_made,
            False,
            TOKENS,
            STILL,
            TURNING,
            VALUE,
            LOW,
            HIGH,
            TURNING_PAD,
            VALUE_PAD,
            PRECISION,
        )
        state_max, state_sum, mixed = _walk(
            low,
            high,
            turned,
            state_max,
            state_sum,
            mixed,
            made,
            keys,
            whole,
            end,
            position,
            scale,
            stride_made,
            True,
            TOKENS,
            STILL,
            TURNING,
            VALUE,
            LOW,
            HIGH,
            TURNING_PAD,
            VALUE_PAD,
            PRECISION,
        )
        tl.store(to, (mixed / state_sum[:, None]).to(out.dtype.element_ty), mask=there)


def heads_at_once(stored: int, sizes: LatentSizes, heads: int, dtype: torch.dtype) -> int:
    """Returns for how many heads keys and values of `stored` latents fit in the buffer at once; 0:
    not even for one."""
    return min(heads, ROOM // (stored * (sizes.still + sizes.value) * dtype.itemsize))


def attend_expanded(
    q: Tensor,
    up: Tensor,
    kv: LatentKv,
    sequences: Seen,
    ends: SequenceEnds,
    kind: AttentionKind,
    room: Room,
    out: Tensor,
) -> None:
    """Computes attention of all sequences' q [n, H, still + turning] into out [n, H, value]. up:
    [H, still + value, rank]."""
    sizes, (count, heads, width), number = kind.latent, q.shape, ends.seen.shape[0]
    assert sizes is not None and q.stride()[1:] == (width, 1) and out.is_contiguous()
    seen, each = sequences.slots.shape[0], sizes.still + sizes.value
    at_once = heads_at_once(seen, sizes, heads, q.dtype)
    queries, tokens, warps, stages = _shape(sizes, q.dtype, shared_of(q.device))
    tiles = count // queries + number
    low, high = parts_of(sizes.still)
    for first in range(0, heads, at_once):
        some = up[first : first + at_once]
        made = room.made[: seen * some.shape[0] * each].view(seen, -1)
        for begin in range(0, seen, AT_ONCE):
            last = min(begin + AT_ONCE, seen)
            _gather[(cdiv(last - begin, _GATHERED),)](
                kv.latent,
                kv.turned,
                room.vectors if kv.scale is None else kv.scale,
                sequences.slots[begin:last],
                room.vectors,
                sequences.turned[begin:last],
                last - begin,
                kv.latent.stride(0),
                kv.turned.stride(0),
                EIGHT=kv.scale is not None,
                RANK=sizes.rank,
                TURNING=sizes.turning,
                RANK_PAD=next_power_of_2(sizes.rank),
                TURNING_PAD=next_power_of_2(sizes.turning),
                VECTORS=_GATHERED,
                num_warps=4,
            )
            torch.mm(room.vectors[: last - begin], some.flatten(0, 1).T, out=made[begin:last])
        _expanded[(tiles, some.shape[0])](
            q[:, first:],
            made,
            sequences.turned,
            out[:, first:],
            out if ends.lse is None else ends.lse[:, first:],
            ends.start,
            ends.seen,
            sequences.first,
            number,
            tiles,
            kind.scale * LOG2_E,
            q.stride(0),
            made.stride(0),
            out.stride(0),
            heads,
            ends.lse is not None,
            STILL=sizes.still,
            TURNING=sizes.turning,
            VALUE=sizes.value,
            LOW=low,
            HIGH=high,
            TURNING_PAD=max(16, next_power_of_2(sizes.turning)),
            VALUE_PAD=max(LEAST, next_power_of_2(sizes.value)),
            QUERIES=queries,
            TOKENS=tokens,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=warps,
            num_stages=stages,
        )


def parts_of(width: int) -> tuple[int, int]:
    """Splits a key's unrotated part, of `width` numbers, into two powers of two for products (the
    second may be 0): (128, 0) for 128, (128, 64) for 192."""
    low = max(16, next_power_of_2(width))
    if low == width or low <= LEAST:
        return low, 0
    return low // 2, max(16, next_power_of_2(width - low // 2))


def _shape(sizes: LatentSizes, dtype: torch.dtype, shared: int) -> Tile:
    """Returns the first of TILES that fits in a program's shared memory. None of them spills
    registers: on sm90 they use 168 registers a thread for DeepSeek's sizes, and 240 for keys and
    values of 256 numbers. A prompt of 8,192 tokens of Moonlight takes 836 us on an H200 with 3
    stages (452 TFLOP/s), 1,019 us with 2 stages, and 4,603 us in the absorbed form."""
    if dtype == torch.float32:
        return 16, 32, 4, 1
    key = sum(parts_of(sizes.still)) + max(16, next_power_of_2(sizes.turning))
    both = key + max(LEAST, next_power_of_2(sizes.value))
    fits = (tile for tile in TILES if 2 * (tile[0] * key + tile[3] * tile[1] * both) <= shared)
    return next(fits, TILES[-1])

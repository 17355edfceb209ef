"""Rows that several programs share: how many, of which tokens, and their joined results.

A program writes a part: its output and its log-sum-exp. `join_parts` is a launch that joins parts
for each query and head; `joined` does so inside another kernel. S: queries, H: heads, D: numbers of
a head's output. Knows rows; no KV."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.attention.flash_loop import span
from penstock.kernels.triton.pdl import release, wait

MOST_SPLITS = 64  # the most programs that share a row
# if there are few rows, they are shared until there are about so many programs, which keep an H200
# busy
FEW_PROGRAMS = 512


@triton.jit
def extent(position, skip, item, capacity, window, SKIPS: tl.constexpr, WINDOWED: tl.constexpr):
    """Returns the range of tokens that a decode query has to read: the first one after its group's
    prefix, or of its window, and one past the last. item: index of the query. position, skip:
    pointers, [S]. capacity: the most tokens of a row."""
    end = tl.minimum(tl.load(position + item).to(tl.int32) + 1, capacity)
    first = 0
    if SKIPS:
        first = tl.load(skip + item)
    if WINDOWED:
        first = tl.maximum(end - window, 0)
    return first, end


@triton.jit
def parts_used(
    position,
    skip,
    item,
    capacity,
    window,
    splits,
    split_tokens,
    SKIPS: tl.constexpr,
    WINDOWED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Returns the number of programs that share the row of query `item`. TOKENS: of a tile."""
    first, end = extent(position, skip, item, capacity, window, SKIPS, WINDOWED)
    tokens = end - first // 16 * 16
    return tl.cdiv(tokens, span(tokens, splits, split_tokens, TOKENS))


@triton.jit
def joined(
    part,
    part_lse,
    place,
    used,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    MOST: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Returns the joined result [WIDTH_PAD] of the first `used` parts from index `place` on. part:
    [.., WIDTH], weighted by their log-sum-exps part_lse. MOST: the most parts. JOINED: parts that
    are loaded at once."""
    every = tl.arange(0, MOST)
    largest = tl.max(tl.load(part_lse + place + every, mask=every < used, other=-1e30), 0)
    split = tl.arange(0, JOINED)
    lane = tl.arange(0, WIDTH_PAD)
    inside = lane < WIDTH
    total = tl.zeros([JOINED], tl.float32)
    mixed = tl.zeros([JOINED, WIDTH_PAD], tl.float32)
    for at in range(0, used, JOINED):
        here = place + at + split
        held = at + split < used
        # the weight of a part that doesn't exist is 0
        share = tl.exp2(tl.load(part_lse + here, mask=held, other=-1e30) - largest)
        each = tl.load(
            part + here[:, None] * WIDTH + lane[None, :],
            mask=held[:, None] & inside[None, :],
            other=0.0,
        )
        total += share
        mixed += each * share[:, None]
    return tl.sum(mixed, 0) / tl.sum(total, 0)


@triton.jit(
    do_not_specialize=["capacity", "window", "splits", "split_tokens"],
    do_not_specialize_on_alignment=["position", "skip"],
)
def join_parts(
    out,  # [S, H, D]
    part,  # [S, H, splits, D] float32
    part_lse,  # [S, H, splits] float32
    position,
    skip,
    capacity,
    window,
    splits,
    split_tokens,
    stride_out,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    SKIPS: tl.constexpr,
    WINDOWED: tl.constexpr,
    TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    JOINED: tl.constexpr,
    EARLY: tl.constexpr,  # see pdl.py
):
    """Joins the results of the programs that share a row, for one query and head. MOST, JOINED: see
    `joined`."""
    wait(EARLY)
    release(EARLY)
    item = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    used = parts_used(
        position, skip, item, capacity, window, splits, split_tokens, SKIPS, WINDOWED, TOKENS
    )
    if used > 1:
        place = (item * HEADS + head) * splits
        made = joined(part, part_lse, place, used, WIDTH, WIDTH_PAD, MOST, JOINED)
        lane = tl.arange(0, WIDTH_PAD)
        tl.store(
            out + item * stride_out + head * WIDTH + lane,
            made.to(out.dtype.element_ty),
            mask=lane < WIDTH,
        )


def splits_of(
    count: int, max_tokens: int, few_programs: int, few_tokens: int = 64
) -> tuple[int, int]:
    """Returns the most programs that share a row, a power of two, and the least tokens of such a
    program. count: number of programs if none share a row. few_tokens: the least tokens if rows
    are few.

    Few rows are shared among as many programs as keep the GPU busy. More rows are faster with one
    program each: 128 rows of 384 tokens at width 128 take 52 us with one program each, and 64 us
    with two. But long rows are always shared, as one program takes 36 us for 2,000 tokens. The
    second launch costs 3.4 us a layer, even if no row is shared."""
    if count <= 128:
        least = few_tokens if count <= 32 else 128
        return min(MOST_SPLITS, _power(few_programs // count), _power(max_tokens // least)), least
    return min(MOST_SPLITS, _power(4096 // count), _power(max_tokens // 4096)), 1024


def _power(number: int) -> int:
    """Returns the largest power of two not above `number`; 1 for 0."""
    return 1 << max(number, 1).bit_length() - 1

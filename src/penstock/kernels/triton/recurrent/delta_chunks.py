"""The gated delta rule over chunks of prompts. kernels/delta_rule.py has the formulas. A chunk is
computed in blocks of 64 tokens, by the WY representation (arXiv:2412.06464, section 3.3).

There are six launches: (1) the convolution; (2) the update of its windows; (3) rates and decays;
(4) all work that needs a single block only, for all blocks at once (`_blocks`, which inverts a
triangular matrix); (5) the states from block to block, and the outputs (`_carry`); (6) norm and
gate of the outputs. Which tokens a block has is computed on the device (`short_conv.block_of`). T:
a step's tokens. A chunk's states are matrices [KEY, VALUE] per value head. KEYS, VALUES: KEY and
VALUE (or a part of it), padded to powers of two."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.delta_rule import NORM_EPS, DeltaHeads, DeltaWeights
from penstock.kernels.inputs import StepInputs
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.recurrent.short_conv import block_of, convolve_chunks, silu

BLOCK = tl.constexpr(64)  # tokens of a block
SMALL = tl.constexpr(16)  # size of the diagonal blocks that are inverted row by row
# Kinds of a token's factors: see `_blocks`.
DECAY, RATE, OF_QUERY, OF_KEY = (tl.constexpr(kind) for kind in range(4))
# The least columns (N) of the second operand of tl.dot. If it has fewer and is computed in
# registers rather than loaded, the warp group products of Triton 3.6 on Hopper read wrong data if
# no load is in progress. With 16 and 32 columns of bfloat16, errors were as large as the outputs
# (triton-lang/triton issue 11366, fla-org/flash-linear-attention pull request 988).
LEAST = 64
# VALUES of `_carry`, and its stages (blocks that are loaded ahead). On an H200 one prompt of 8,192
# tokens takes 306 us and 16 prompts of 1,024 take 366 us. The same take 928 and 524 us with 128
# values, 345 and 418 us with two stages, 445 and 371 us with one.
_PART, _STAGES = 64, 3
_WIDE = 128  # largest key width with which _STAGES blocks fit in shared memory


@triton.jit
def softplus(x):
    """Returns log(1 + exp(x))."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def log_decay(given, step_bias, decay):
    """Returns decay * softplus(given + step_bias), which is the logarithm of the factor by which a
    token multiplies the state."""
    return decay * softplus(given + step_bias)


@triton.jit
def weighed(normed, z, norm, lane, there, dtype: tl.constexpr):
    """Returns normed * the norm's weight * silu(z), in float32. The first product and its left
    operand are rounded to `dtype`, as in torch. normed, z: float32. norm: pointer to the weight.
    lane, there: its indices and their mask."""
    weight = tl.load(norm + lane, mask=there, other=0.0).to(tl.float32)
    return (normed.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32) * silu(z)


@triton.jit
def unit_factor(x, unit_eps):
    """Returns for each row of x [rows, columns] the factor that makes its length one, in
    float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + unit_eps)


@triton.jit
def _joined(inverse, system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverse of 1 + system [64, 64], correct within diagonal blocks of size 2 * SIZE.
    inverse: the same, correct within diagonal blocks of size SIZE."""
    token = tl.arange(0, BLOCK)
    row, column = token[:, None] // SIZE, token[None, :] // SIZE
    corner = tl.where((row // 2 == column // 2) & (row > column), system, 0.0)
    step = tl.dot(inverse, corner, input_precision=PRECISION)
    return inverse - tl.dot(step, inverse, input_precision=PRECISION)


@triton.jit
def _inverse(system, room, count, PRECISION: tl.constexpr):
    """Returns the inverse of the matrix 1 + system. system: [64, 64], 0 on and above its diagonal;
    its first `count` rows are not 0. room: pointer to 16 * count numbers of this program, float32.
    Diagonal blocks of 16 are inverted row by row, each thread one column of them; in memory a row's
    numbers reach all threads for one instruction, in registers they would be exchanged. The blocks
    are joined by [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]."""
    token = tl.arange(0, BLOCK)
    row, column = token[:, None], token[None, :]
    own = (row // SMALL == column // SMALL) & (row < count)
    diagonal = room + row * SMALL + column % SMALL
    tl.store(diagonal, system, mask=own)
    tl.debug_barrier()
    its_block, its_column = room + token // SMALL * (SMALL * SMALL), token % SMALL
    found = (tl.where(its_column == 0, 1.0, 0.0),)
    for at in tl.static_range(1, SMALL):
        new = tl.where(its_column == at, 1.0, 0.0)
        there = token // SMALL * SMALL + at < count
        for before in tl.static_range(at):
            seen = tl.load(its_block + at * SMALL + before, mask=there, other=0.0)
            new -= seen * found[before]
        found = found + (new,)
    tl.debug_barrier()
    for at in tl.static_range(SMALL):
        there = token // SMALL * SMALL + at < count
        tl.store(its_block + at * SMALL + its_column, found[at], mask=there)
    tl.debug_barrier()
    whole = tl.load(diagonal, mask=own, other=0.0)
    return _joined(_joined(whole, system, SMALL, PRECISION), system, 2 * SMALL, PRECISION)


@triton.jit(do_not_specialize=["rows", "chunks", "tokens"])
def _decays(
    rates,
    decay,
    step_bias,
    start,
    factors,
    rows,
    chunks,
    tokens,
    most_rate,
    VALUE_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Kernel of launch 3, with one program per block. rates: see `ops.DeltaRule`. Writes two of the
    factors (see `_blocks`): DECAY and RATE."""
    _, first, count = block_of(start, tl.program_id(0), chunks, BLOCK)
    if count > 0:
        token, head = tl.arange(0, BLOCK)[:, None], tl.arange(0, HEADS)[None, :]
        at, is_head = (first + token).to(tl.int64), head < VALUE_HEADS
        there = (token < count) & is_head
        of_rate = rates + (rows + at) * (2 * VALUE_HEADS) + head
        rate = tl.load(of_rate, mask=there, other=0.0).to(tl.float32)
        step = tl.load(of_rate + VALUE_HEADS, mask=there, other=0.0).to(tl.float32)
        bias = tl.load(step_bias + head, mask=is_head, other=0.0)
        left = log_decay(step, bias, tl.load(decay + head, mask=is_head, other=0.0))
        of_factor = factors + head.to(tl.int64) * tokens + at
        tl.store(of_factor + DECAY * VALUE_HEADS * tokens, tl.cumsum(left, axis=0), mask=there)
        rate = most_rate / (1.0 + tl.exp(-rate))
        tl.store(of_factor + RATE * VALUE_HEADS * tokens, rate, mask=there)


@triton.jit(do_not_specialize=["chunks", "tokens"])
def _blocks(
    mixed,
    start,
    solved,
    scores,
    factors,
    room,
    chunks,
    tokens,
    scale,
    unit_eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Kernel of launch 4, with one program per block and value head. mixed: output of the
    convolution. factors: [4, value heads, tokens] float32, for each token: DECAY: the logarithm of
    the decays from the block's start to it; RATE: its rate; OF_QUERY, OF_KEY: what its query and its
    key are multiplied by to be normed. This kernel writes the last two, and for each token: solved: its
    row of the block's inverse matrix, whose columns are multiplied by the rates; scores: its scores
    with the block's tokens. room: see `_inverse`. tokens: of all chunks."""
    _, first, count = block_of(start, tl.program_id(0), chunks, BLOCK)
    head = tl.program_id(1)
    if count > 0:
        token = tl.arange(0, BLOCK)
        at, there = (first + token).to(tl.int64), token < count
        key = tl.arange(0, KEYS)
        channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
        of_key = (
            mixed + at[:, None] * channels + head // (VALUE_HEADS // KEY_HEADS) * KEY + key[None, :]
        )
        keys_there = there[:, None] & (key < KEY)[None, :]
        dtype = mixed.dtype.element_ty
        k = tl.load(of_key + KEY_HEADS * KEY, mask=keys_there, other=0.0)
        k_factor = unit_factor(k, unit_eps)
        of_factor = factors + head.to(tl.int64) * tokens + at
        each = VALUE_HEADS * tokens  # numbers of a kind of factor
        total = tl.load(of_factor + DECAY * each, mask=there, other=0.0)
        rate = tl.load(of_factor + RATE * each, mask=there, other=0.0)
        not_before = (token[:, None] >= token[None, :]) & there[:, None]
        between = tl.exp(tl.where(not_before, total[:, None] - total[None, :], 0.0))
        between *= k_factor[None, :]
        found = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between
        found *= (k_factor * rate)[:, None]
        system = tl.where(token[:, None] > token[None, :], found, 0.0)
        its_room = room + (head.to(tl.int64) * tokens + first) * SMALL
        inverse = _inverse(system, its_room, count, PRECISION) * rate[None, :]
        of_block = (at * VALUE_HEADS + head)[:, None] * BLOCK + token[None, :]
        tl.store(solved + of_block, inverse.to(dtype), mask=there[:, None])
        q = tl.load(of_key, mask=keys_there, other=0.0)
        q_factor = unit_factor(q, unit_eps) * scale
        seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between * q_factor[:, None]
        seen = tl.where(not_before, seen, 0.0)
        tl.store(scores + of_block, seen.to(dtype), mask=there[:, None])
        tl.store(of_factor + OF_QUERY * each, q_factor, mask=there)
        tl.store(of_factor + OF_KEY * each, k_factor, mask=there)


@triton.jit(do_not_specialize=["tokens"])
def _carry(
    mixed,
    solved,
    scores,
    factors,
    start,
    matrix,
    slots,
    out,
    slot_stride,
    tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Kernel of launch 5, with one program per chunk, value head and VALUES of the head's values.
    Block by block it writes the outputs and updates the state in `matrix`. Queries and keys are
    those of `mixed`; their factors multiply what they were multiplied with."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(start + chunk), tl.load(start + chunk + 1)
    if begin == end:  # padding, not a chunk: the state in its slot stays unchanged
        return
    token, key = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY, value < VALUE
    dtype = mixed.dtype.element_ty
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    keys = mixed + head // (VALUE_HEADS // KEY_HEADS) * KEY + key[None, :]
    values = mixed + 2 * KEY_HEADS * KEY + head * VALUE + value[None, :]
    its_factors, each = factors + head.to(tl.int64) * tokens, VALUE_HEADS * tokens
    held = matrix + tl.load(slots + chunk).to(tl.int64) * slot_stride + head * (KEY * VALUE)
    held = held + key[:, None] * VALUE + value[None, :]
    kept = is_key[:, None] & is_value[None, :]
    state = tl.load(held, mask=kept, other=0.0).to(tl.float32)
    for first in range(begin, end, BLOCK):
        at, there = (first + token).to(tl.int64), token < end - first
        keys_there, values_there = (
            there[:, None] & is_key[None, :],
            there[:, None] & is_value[None, :],
        )
        of_head = at * VALUE_HEADS + head
        of_block = of_head[:, None] * BLOCK + token[None, :]
        q = tl.load(keys + at[:, None] * channels, mask=keys_there, other=0.0)
        k = tl.load(keys + KEY_HEADS * KEY + at[:, None] * channels, mask=keys_there, other=0.0)
        v = tl.load(values + at[:, None] * channels, mask=values_there, other=0.0)
        inverse = tl.load(solved + of_block, mask=there[:, None], other=0.0)
        seen = tl.load(scores + of_block, mask=there[:, None], other=0.0)
        total = tl.load(its_factors + DECAY * each + at, mask=there, other=0.0)
        q_factor = tl.load(its_factors + OF_QUERY * each + at, mask=there, other=0.0)
        k_factor = tl.load(its_factors + OF_KEY * each + at, mask=there, other=0.0)
        whole = tl.load(its_factors + DECAY * each + tl.minimum(end, first + BLOCK) - 1)
        rounded = state.to(dtype)
        known = tl.dot(k, rounded, input_precision=PRECISION) * (k_factor * tl.exp(total))[:, None]
        fresh = (v.to(tl.float32) - known).to(dtype)
        writes = tl.dot(inverse, fresh, input_precision=PRECISION)
        answer = tl.dot(q, rounded, input_precision=PRECISION) * (q_factor * tl.exp(total))[:, None]
        answer += tl.dot(seen, writes.to(dtype), input_precision=PRECISION)
        tl.store(
            out + of_head[:, None] * VALUE + value[None, :], answer.to(dtype), mask=values_there
        )
        if dtype == tl.float16:  # whose range is too small for writes times factors of keys
            k = (k.to(tl.float32) * k_factor[:, None]).to(dtype)
            writes *= tl.exp(whole - total)[:, None]
        else:
            writes *= (k_factor * tl.exp(whole - total))[:, None]
        state = state * tl.exp(whole) + tl.dot(
            tl.trans(k), writes.to(dtype), input_precision=PRECISION
        )
    tl.store(held, state.to(matrix.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _norm(
    answers,
    given,
    norm,
    out,
    start,
    rows,
    chunks,
    stride,
    channels,
    eps,
    VALUE_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Kernel of launch 6: norms and gates the outputs, with one program per token and HEADS of its
    value heads. answers: outputs of `_carry`. given: has the gates z."""
    at = tl.program_id(0)
    if at < tl.load(start + chunks):
        token = (rows + at).to(tl.int64)
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        value = tl.arange(0, VALUES)
        there = (head < VALUE_HEADS) & (value < VALUE)[None, :]
        each = head * VALUE + value[None, :]
        x = tl.load(
            answers + at.to(tl.int64) * (VALUE_HEADS * VALUE) + each, mask=there, other=0.0
        ).to(tl.float32)
        z = tl.load(given + token * stride + channels + each, mask=there, other=0.0).to(tl.float32)
        dtype = given.dtype.element_ty
        normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / VALUE + eps)[:, None]
        answer = weighed(normed, z, norm, value[None, :], (value < VALUE)[None, :], dtype)
        tl.store(out + token * (VALUE_HEADS * VALUE) + each, answer.to(dtype), mask=there)


def delta_chunks(
    given: Tensor,
    rates: Tensor,
    heads: DeltaHeads,
    weights: DeltaWeights,
    window: Tensor,
    matrix: Tensor,
    inputs: StepInputs,
    out: Tensor,
) -> None:
    """Writes the outputs of a step's chunks to out [T, value_size], after those of the decode rows.
    Updates the chunks' slots of `window` and `matrix`. Parameters: see `ops.DeltaRule`."""
    h, w, states, rows, prefill = heads, weights, inputs.states, inputs.rows, inputs.prefill
    assert states is not None and prefill is not None
    tokens, start, chunks = given.shape[0] - rows, prefill.start, states.chunk_slots.shape[0]

    def empty(*shape: int, dtype: torch.dtype = given.dtype) -> Tensor:
        return torch.empty((tokens, *shape), dtype=dtype, device=given.device)

    mixed = empty(h.channels)
    convolve_chunks(given, w.taps, None, window, inputs, mixed, gated=False)
    solved, scores = (empty(h.value_heads, BLOCK.value) for _ in range(2))
    factors = empty(4 * h.value_heads, dtype=torch.float32)
    blocks = tokens // BLOCK.value + chunks
    room = empty(h.value_heads * SMALL.value, dtype=torch.float32)
    keys, values = (max(LEAST, next_power_of_2(width)) for width in (h.key_width, h.value_width))
    wide = given.dtype == torch.float32
    exact, warps = ("tf32x3", 8) if wide else ("tf32", 4)
    shape = {
        "KEY_HEADS": h.key_heads,
        "VALUE_HEADS": h.value_heads,
        "KEY": h.key_width,
        "VALUE": h.value_width,
    }
    _decays[(blocks,)](
        rates,
        w.decay,
        w.step_bias,
        start,
        factors,
        rows,
        chunks,
        tokens,
        w.most_rate,
        VALUE_HEADS=h.value_heads,
        HEADS=next_power_of_2(h.value_heads),
        num_warps=4,
    )
    _blocks[(blocks, h.value_heads)](
        mixed,
        start,
        solved,
        scores,
        factors,
        room,
        chunks,
        tokens,
        h.key_width**-0.5,
        NORM_EPS,
        **shape,
        KEYS=keys,
        PRECISION=exact,
        num_warps=warps,
        num_stages=1,
    )
    answers, part = empty(h.value_size), min(_PART, values)
    _carry[(chunks, h.value_heads, cdiv(h.value_width, part))](
        mixed,
        solved,
        scores,
        factors,
        start,
        matrix,
        states.chunk_slots,
        answers,
        matrix.stride(0),
        tokens,
        **shape,
        KEYS=keys,
        VALUES=part,
        PRECISION=exact,
        num_warps=4,
        num_stages=1 if wide or keys > _WIDE else _STAGES,
    )
    few = max(1, 1024 // values)
    _norm[(tokens, cdiv(h.value_heads, few))](
        answers,
        given,
        w.norm,
        out,
        start,
        rows,
        chunks,
        given.stride(0),
        h.channels,
        w.eps,
        VALUE_HEADS=h.value_heads,
        VALUE=h.value_width,
        HEADS=few,
        VALUES=values,
        num_warps=4,
    )

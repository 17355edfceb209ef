"""The gated delta rule over chunks of prompts. kernels/delta_rule.py has the formulas. A chunk is
computed in blocks of 64 tokens, by the WY representation (arXiv:2412.06464, section 3.3).

There are five launches: (1) the convolution; (2) the update of its windows; (3) all work that needs
a single block only, for all blocks at once (`_blocks`, which inverts a triangular matrix); (4) the
states from block to block, and the outputs (`_carry`); (5) norm and gate of the outputs. Which
tokens a block has is computed on the device (`short_conv.block_of`). T: a step's tokens. A chunk's
states are matrices [KEY, VALUE] per value head. KEYS, VALUES: KEY and VALUE (or a part of it),
padded to powers of two."""

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
# The least columns (N) of the second operand of tl.dot. If it has fewer and is computed in
# registers rather than loaded, the warp group products of Triton 3.6 on Hopper read wrong data if
# no load is in progress. With 16 and 32 columns of bfloat16, errors were as large as the outputs
# (triton-lang/triton issue 11366, fla-org/flash-linear-attention pull request 988).
LEAST = 64
# VALUES of `_carry`, and its stages (blocks that are loaded ahead). On an H200 one prompt of 8,192
# tokens takes 253 us and 8 prompts of 1,024 take 174 us. The same take 508 and 153 us with 128
# values, and 372 and 209 us with two stages.
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
def _joined(inverse, system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverse of 1 + system [64, 64], correct within diagonal blocks of size 2 * SIZE.
    inverse: the same, correct within diagonal blocks of size SIZE."""
    token = tl.arange(0, BLOCK)
    row, column = token[:, None] // SIZE, token[None, :] // SIZE
    corner = tl.where((row // 2 == column // 2) & (row > column), system, 0.0)
    step = tl.dot(inverse, corner, input_precision=PRECISION)
    return inverse - tl.dot(step, inverse, input_precision=PRECISION)


@triton.jit
def _inverse(system, PRECISION: tl.constexpr):
    """Returns the inverse of the matrix 1 + system. system: [64, 64], 0 on and above its diagonal.
    Diagonal blocks of 16 are inverted row by row, then joined by [[A, 0], [C, B]]^-1 = [[A^-1, 0],
    [-B^-1 C A^-1, B^-1]]."""
    few: tl.constexpr = BLOCK // SMALL
    outer, inner = tl.arange(0, few), tl.arange(0, SMALL)
    own = outer[:, None, None, None] == outer[None, None, :, None]
    below = tl.sum(tl.where(own, tl.reshape(system, (few, SMALL, few, SMALL)), 0.0), axis=2)
    small = -below
    for row in tl.static_range(1, SMALL):
        here = inner[None, :, None] == row
        old = tl.sum(tl.where(here, small, 0.0), axis=1)
        new = old + tl.sum(old[:, :, None] * small, axis=1)
        small = tl.where(here, new[:, None, :], small)
    small += tl.where(inner[None, :, None] == inner[None, None, :], 1.0, 0.0)
    whole = tl.reshape(tl.where(own, small[:, :, None, :], 0.0), (BLOCK, BLOCK))
    return _joined(_joined(whole, system, SMALL, PRECISION), system, 2 * SMALL, PRECISION)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _blocks(
    mixed,
    rates,
    decay,
    step_bias,
    start,
    new_k,
    new_v,
    scores,
    late_q,
    late_k,
    totals,
    rows,
    chunks,
    scale,
    unit_eps,
    most_rate,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Kernel of launch 3, with one program per block and value head. mixed: output of the
    convolution. rates: see `ops.DeltaRule`. Writes for each token: new_k, new_v: its key and value
    times the inverse matrix; scores: its scores with the block's tokens; late_q: its query, for the
    state before the block; late_k: its key, for the update of the state after the block; totals:
    the logarithm of the decays from the block's start to it."""
    _, first, count = block_of(start, tl.program_id(0), chunks, BLOCK)
    head = tl.program_id(1)
    if count > 0:
        token = tl.arange(0, BLOCK)
        at, there = (first + token).to(tl.int64), token < count
        key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
        channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
        of_key = (
            mixed + at[:, None] * channels + head // (VALUE_HEADS // KEY_HEADS) * KEY + key[None, :]
        )
        keys_there = there[:, None] & (key < KEY)[None, :]
        q = tl.load(of_key, mask=keys_there, other=0.0).to(tl.float32)
        k = tl.load(of_key + KEY_HEADS * KEY, mask=keys_there, other=0.0).to(tl.float32)
        q_scale = tl.rsqrt(tl.sum(q * q, axis=1) + unit_eps) * scale
        k_scale = tl.rsqrt(tl.sum(k * k, axis=1) + unit_eps)
        dtype = mixed.dtype.element_ty
        q, k = (q * q_scale[:, None]).to(dtype), (k * k_scale[:, None]).to(dtype)
        of_rate = rates + (rows + at) * (2 * VALUE_HEADS) + head
        rate = most_rate / (1.0 + tl.exp(-tl.load(of_rate, mask=there, other=0.0).to(tl.float32)))
        rate = tl.where(there, rate, 0.0)
        step = tl.load(of_rate + VALUE_HEADS, mask=there, other=0.0).to(tl.float32)
        left = log_decay(step, tl.load(step_bias + head), tl.load(decay + head))
        total = tl.cumsum(tl.where(there, left, 0.0), axis=0)
        not_before = token[:, None] >= token[None, :]
        between = tl.exp(tl.where(not_before, total[:, None] - total[None, :], 0.0))
        found = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * rate[:, None]
        inverse = (
            _inverse(tl.where(token[:, None] > token[None, :], found, 0.0), PRECISION)
            * rate[None, :]
        )
        of_value = (
            mixed + at[:, None] * channels + 2 * KEY_HEADS * KEY + head * VALUE + value[None, :]
        )
        values_there = there[:, None] & (value < VALUE)[None, :]
        v = tl.load(of_value, mask=values_there, other=0.0)
        fresh = tl.dot(inverse.to(dtype), v, input_precision=PRECISION)
        taken = tl.dot((inverse * tl.exp(total)[None, :]).to(dtype), k, input_precision=PRECISION)
        seen = tl.where(
            not_before, tl.dot(q, tl.trans(k), input_precision=PRECISION) * between, 0.0
        )
        of_head = at * VALUE_HEADS + head
        tl.store(
            new_v + of_head[:, None] * VALUE + value[None, :], fresh.to(dtype), mask=values_there
        )
        tl.store(new_k + of_head[:, None] * KEY + key[None, :], taken.to(dtype), mask=keys_there)
        tl.store(
            scores + of_head[:, None] * BLOCK + token[None, :], seen.to(dtype), mask=there[:, None]
        )
        last = tl.sum(tl.where(token == count - 1, total, 0.0))
        q = (
            tl.load(of_key, mask=keys_there, other=0.0).to(tl.float32)
            * (q_scale * tl.exp(total))[:, None]
        )
        k = tl.load(of_key + KEY_HEADS * KEY, mask=keys_there, other=0.0).to(tl.float32)
        k *= (k_scale * tl.exp(last - total))[:, None]
        tl.store(late_q + of_head[:, None] * KEY + key[None, :], q.to(dtype), mask=keys_there)
        tl.store(late_k + of_head[:, None] * KEY + key[None, :], k.to(dtype), mask=keys_there)
        tl.store(totals + of_head, total, mask=there)


@triton.jit
def _carry(
    new_k,
    new_v,
    scores,
    late_q,
    late_k,
    totals,
    start,
    matrix,
    slots,
    out,
    slot_stride,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Kernel of launch 4, with one program per chunk, value head and VALUES of the head's values.
    Block by block it writes the outputs and updates the state in `matrix`."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(start + chunk), tl.load(start + chunk + 1)
    if begin == end:  # padding, not a chunk: the state in its slot stays unchanged
        return
    token, key = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY, value < VALUE
    dtype = new_k.dtype.element_ty
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
        of_key = of_head[:, None] * KEY + key[None, :]
        taken = tl.load(new_k + of_key, mask=keys_there, other=0.0)
        q = tl.load(late_q + of_key, mask=keys_there, other=0.0)
        k = tl.load(late_k + of_key, mask=keys_there, other=0.0)
        fresh = tl.load(
            new_v + of_head[:, None] * VALUE + value[None, :], mask=values_there, other=0.0
        )
        seen = tl.load(
            scores + of_head[:, None] * BLOCK + token[None, :], mask=there[:, None], other=0.0
        )
        rounded = state.to(dtype)
        writes = (fresh - tl.dot(taken, rounded, input_precision=PRECISION)).to(dtype)
        answer = tl.dot(q, rounded, input_precision=PRECISION) + tl.dot(
            seen, writes, input_precision=PRECISION
        )
        tl.store(
            out + of_head[:, None] * VALUE + value[None, :], answer.to(dtype), mask=values_there
        )
        last = tl.minimum(end - first, BLOCK) - 1
        total = tl.load(totals + (first + last).to(tl.int64) * VALUE_HEADS + head)
        state = state * tl.exp(total) + tl.dot(tl.trans(k), writes, input_precision=PRECISION)
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
    """Kernel of launch 5: norms and gates the outputs, with one program per token and HEADS of its
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
    new_k, late_q, late_k = (empty(h.value_heads, h.key_width) for _ in range(3))
    new_v, scores = (empty(h.value_heads, width) for width in (h.value_width, BLOCK.value))
    totals = empty(h.value_heads, dtype=torch.float32)
    keys, values = (max(LEAST, next_power_of_2(width)) for width in (h.key_width, h.value_width))
    wide = given.dtype == torch.float32
    exact, warps = ("tf32x3", 8) if wide else ("tf32", 4)
    shape = {"VALUE_HEADS": h.value_heads, "KEY": h.key_width, "VALUE": h.value_width}
    _blocks[(tokens // BLOCK.value + chunks, h.value_heads)](
        mixed,
        rates,
        w.decay,
        w.step_bias,
        start,
        new_k,
        new_v,
        scores,
        late_q,
        late_k,
        totals,
        rows,
        chunks,
        h.key_width**-0.5,
        NORM_EPS,
        w.most_rate,
        **shape,
        KEY_HEADS=h.key_heads,
        KEYS=keys,
        VALUES=values,
        PRECISION=exact,
        num_warps=warps,
        num_stages=1,
    )
    answers, part = empty(h.value_size), min(_PART, values)
    _carry[(chunks, h.value_heads, cdiv(h.value_width, part))](
        new_k,
        new_v,
        scores,
        late_q,
        late_k,
        totals,
        start,
        matrix,
        states.chunk_slots,
        answers,
        matrix.stride(0),
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

"""The gated delta rule for decode rows (kernels/delta_rule.py has the formulas). A program computes
one value head of one row: convolutions, rate, decay, update of the state, output, norm and gate.

A program reads, updates and writes the head's state matrix once, some value columns at a time. If
rows may have drafts, it takes all of the row's tokens in order (`StateInputs`), with the columns in
registers, and programs of drafts return at once. A program has few threads, so that sums need
little exchange between warps, and many programs share a multiprocessor. Programs of value heads
with the same key head all compute q and k. That is safe, as the convolution's window is a ring: a
step's tokens overwrite entries that no program reads. `delta_chunks` computes chunks. T: a step's
tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.delta_rule import NORM_EPS, DeltaHeads, DeltaWeights
from penstock.kernels.inputs import StepInputs
from penstock.kernels.triton.grid import next_power_of_2
from penstock.kernels.triton.recurrent.delta_chunks import delta_chunks, log_decay, weighed
from penstock.kernels.triton.recurrent.short_conv import (
    beside_of,
    most_queries,
    of_row,
    queries_of,
    silu,
)

# Numbers of the state matrix that a program has in registers at once, and its warps. 1,000 rows of
# Qwen3.5 on an H200 take, with the state in float32 and in bfloat16: with half of the matrix's
# 16,384 numbers and 2 warps 1,113 and 738 us; with all and 4 warps 1,236 and 872 us, with 8 warps
# 3,466 and 2,030 us; with a quarter and 1 warp 1,281 and 919 us.
_AT_ONCE, _WARPS = 8192, 2


@triton.jit
def _keys(
    given,
    rates,
    taps,
    decay,
    step_bias,
    window,
    slot,
    position,
    ahead,
    fold,
    token,
    stride,
    scale,
    unit_eps,
    most_rate,
    head,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
):
    """Returns q and k [KEYS, 1] of a row's token, its rate, and the factor of its decay. slot,
    position, ahead, fold, token: see `of_row`."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    dtype = given.dtype.element_ty
    of_head = rates + token * 2 * VALUE_HEADS + head
    rate = beside_of(of_head, window, slot, position, ahead, fold, head, channels, WIDTH, RING)
    step = beside_of(
        of_head + VALUE_HEADS,
        window,
        slot,
        position,
        ahead,
        fold,
        VALUE_HEADS + head,
        channels,
        WIDTH,
        RING,
    )
    rate = most_rate / (1.0 + tl.exp(-rate))
    left = tl.exp(log_decay(step, tl.load(step_bias + head), tl.load(decay + head)))
    key = tl.arange(0, KEYS)
    is_key, of_key = key < KEY, head // (VALUE_HEADS // KEY_HEADS) * KEY + key
    q = of_row(
        given,
        taps,
        window,
        slot,
        position,
        ahead,
        fold,
        token,
        stride,
        of_key,
        is_key,
        channels,
        RING,
        TAPS,
        WIDTH,
        False,
    )
    k = of_row(
        given,
        taps,
        window,
        slot,
        position,
        ahead,
        fold,
        token,
        stride,
        of_key + KEY_HEADS * KEY,
        is_key,
        channels,
        RING,
        TAPS,
        WIDTH,
        False,
    )
    q, k = silu(q).to(dtype).to(tl.float32), silu(k).to(dtype).to(tl.float32)
    q = (q * (tl.rsqrt(tl.sum(q * q, axis=0) + unit_eps) * scale))[:, None]
    k = (k * tl.rsqrt(tl.sum(k * k, axis=0) + unit_eps))[:, None]
    return q, k, rate, left


@triton.jit
def _rows(
    given,
    rates,
    taps,
    decay,
    step_bias,
    norm,
    window,
    matrix,
    slots,
    folded,
    offset,
    positions,
    out,
    window_stride,
    matrix_stride,
    stride,
    eps,
    scale,
    unit_eps,
    most_rate,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PART: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    MOST: tl.constexpr,
):
    """Kernel of `delta_rule`, with one program per value head and query. KEY, VALUE: numbers of a
    key and of a value. KEYS, VALUES: these, rounded up to powers of two. PART: value columns that
    are processed at once. MOST: most queries of a row, rounded up to a power of two. Tensors: see
    `ops.DeltaRule`; slots, folded, offset: fields of StateInputs. TAPS, WIDTH, RING: see
    short_conv.py."""
    # neighbouring programs have heads of the same row, whose memory is adjacent
    head, row = (
        tl.program_id(0),
        tl.program_id(1).to(tl.int64),
    )
    slot, position, holds = (
        tl.load(slots + row).to(tl.int64),
        tl.load(positions + row),
        tl.load(folded + row),
    )
    first, last = 0, 1  # the row's tokens, counted from its newest
    if MOST > 1:
        last = queries_of(offset, row, MOST)
        if last == 0:
            return
        first = tl.minimum(holds - position, 0).to(tl.int32)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    size: tl.constexpr = VALUE_HEADS * VALUE
    dtype = given.dtype.element_ty
    its_window = slot * window_stride
    key, some = tl.arange(0, KEYS), tl.arange(0, PART)
    held = (
        matrix + slot * matrix_stride + head * (KEY * VALUE) + key[:, None] * VALUE + some[None, :]
    )
    answers = out + row * size + head * VALUE
    if MOST == 1:
        q, k, rate, left = _keys(
            given,
            rates,
            taps,
            decay,
            step_bias,
            window,
            its_window,
            position,
            0,
            holds <= position,
            row,
            stride,
            scale,
            unit_eps,
            most_rate,
            head,
            KEY_HEADS,
            VALUE_HEADS,
            KEY,
            VALUE,
            KEYS,
            TAPS,
            WIDTH,
            RING,
        )
    for begin in range(0, VALUE, PART):
        there = begin + some < VALUE
        within = (key < KEY)[:, None] & there[None, :]
        state = tl.load(held + begin, mask=within, other=0.0).to(tl.float32)
        for ahead in range(first, last):
            fold = holds <= position + ahead
            if MOST > 1:
                q, k, rate, left = _keys(
                    given,
                    rates,
                    taps,
                    decay,
                    step_bias,
                    window,
                    its_window,
                    position + ahead,
                    ahead,
                    fold,
                    row + ahead,
                    stride,
                    scale,
                    unit_eps,
                    most_rate,
                    head,
                    KEY_HEADS,
                    VALUE_HEADS,
                    KEY,
                    VALUE,
                    KEYS,
                    TAPS,
                    WIDTH,
                    RING,
                )
            v = of_row(
                given,
                taps,
                window,
                its_window,
                position + ahead,
                ahead,
                fold,
                row + ahead,
                stride,
                2 * KEY_HEADS * KEY + head * VALUE + begin + some,
                there,
                channels,
                RING,
                TAPS,
                WIDTH,
                False,
            )
            v = silu(v).to(dtype).to(tl.float32)
            if fold:
                state *= left
                state += k * ((v - tl.sum(state * k, axis=0)) * rate)[None, :]
                kept = state.to(matrix.dtype.element_ty)
                tl.store(held + begin, kept, mask=within & (ahead == 0))
            answer = tl.sum(state * q, axis=0).to(dtype)
            tl.store(answers + ahead * size + begin + some, answer, mask=there & (ahead >= 0))
    tl.debug_barrier()  # the stored outputs are read again below, by other threads
    value = tl.arange(0, VALUES)
    is_value = value < VALUE
    for ahead in range(last):
        gates = given + (row + ahead) * stride + channels + head * VALUE
        z = tl.load(gates + value, mask=is_value, other=0.0).to(tl.float32)
        its_answers = answers + ahead * size + value
        answer = tl.load(its_answers, mask=is_value, other=0.0).to(tl.float32)
        answer *= tl.rsqrt(tl.sum(answer * answer, axis=0) / VALUE + eps)
        answer = weighed(answer, z, norm, value, is_value, dtype)
        tl.store(its_answers, answer.to(dtype), mask=is_value)


def delta_rule(
    given: Tensor,
    rates: Tensor,
    heads: DeltaHeads,
    weights: DeltaWeights,
    window: Tensor,
    matrix: Tensor,
    inputs: StepInputs,
) -> Tensor:
    """Returns the layer's outputs [T, value_size] for decode rows and chunks. given: [T, channels +
    value_size]. rates: [T, 2 * value_heads]. window: [slots, width, channels or more].
    matrix: [slots, value_heads, key_width, value_width]. The contract is `ops.DeltaRule`."""
    h, w, states, rows = heads, weights, inputs.states, inputs.rows
    assert states is not None, "a layer with a recurrent matrix has slots"
    assert rates.is_contiguous() and matrix[0].is_contiguous()
    out = torch.empty((given.shape[0], h.value_size), dtype=given.dtype, device=given.device)
    if rows:
        keys, values = next_power_of_2(h.key_width), next_power_of_2(h.value_width)
        part = min(values, max(1, _AT_ONCE // keys))
        _rows[(h.value_heads, rows)](
            given,
            rates,
            w.taps,
            w.decay,
            w.step_bias,
            w.norm,
            window,
            matrix,
            states.slots,
            states.folded,
            states.offset,
            inputs.positions,
            out,
            window.stride(0),
            matrix.stride(0),
            given.stride(0),
            w.eps,
            h.key_width**-0.5,
            NORM_EPS,
            w.most_rate,
            KEY_HEADS=h.key_heads,
            VALUE_HEADS=h.value_heads,
            KEY=h.key_width,
            VALUE=h.value_width,
            KEYS=keys,
            VALUES=values,
            PART=part,
            TAPS=w.taps.shape[1],
            WIDTH=window.shape[1],
            RING=window.shape[2],
            MOST=most_queries(window, w.taps),
            num_warps=_WARPS if keys * part == _AT_ONCE else 1,
        )
    if inputs.prefill is not None and given.shape[0] > rows:
        delta_chunks(given, rates, h, w, window, matrix, inputs, out)
    return out

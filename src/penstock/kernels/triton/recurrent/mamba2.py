"""Mamba2's recurrence for decode rows (kernels/mamba2.py has the formulas), and its gated norm. A
program computes one head of one row: convolutions, step, decay, update of the state, and output.

A program reads, updates and writes the head's state once, some value columns at a time. If rows may
have drafts, it takes all of the row's tokens in order (`StateInputs`), with the columns in
registers, and programs of drafts return at once. The programs of all heads of a group compute B and
C. That is safe, as the convolution's window is a ring: a step's tokens overwrite entries that no
program reads. `mamba2_chunks` computes chunks. T: a step's tokens, F: numbers of a row of the
norm's input."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.inputs import StepInputs
from penstock.kernels.mamba2 import Mamba2Heads, Mamba2Weights
from penstock.kernels.triton.grid import next_power_of_2
from penstock.kernels.triton.linear.fp8 import BITS, empty_rows, pointers, store_rows
from penstock.kernels.triton.pdl import early_of, release, wait
from penstock.kernels.triton.recurrent.delta_chunks import softplus
from penstock.kernels.triton.recurrent.mamba2_chunks import mamba2_chunks
from penstock.kernels.triton.recurrent.short_conv import (
    beside_of,
    most_queries,
    of_row,
    queries_of,
    silu,
)

# Numbers of the state that a program has in registers at once, and its warps; measured in
# delta_rule.py.
_AT_ONCE, _WARPS = 8192, 2


@triton.jit
def _rows(
    given,
    taps,
    taps_bias,
    a,
    step_bias,
    skip,
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
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    STATE: tl.constexpr,
    PART: tl.constexpr,
    STATE_WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    MOST: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Kernel of `mamba2`, with one program per head and query. HEAD, STATE: numbers of a head and
    of its state's other dimension. STATE_WIDTH: STATE, rounded up to a power of two. PART: value
    columns that are processed at once. MOST: most queries of a row, rounded up to a power of two.
    Tensors: see `ops.Mamba2Scan`; slots, folded, offset: fields of StateInputs. TAPS, WIDTH, RING:
    see short_conv.py."""
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
    size: tl.constexpr = HEADS * HEAD
    channels: tl.constexpr = size + 2 * GROUPS * STATE
    dtype = given.dtype.element_ty
    past = tl.load(skip + head)
    key, some = tl.arange(0, STATE_WIDTH), tl.arange(0, PART)
    its_window = slot * window_stride
    held = (
        matrix + slot * matrix_stride + head * (STATE * HEAD) + key[:, None] * HEAD + some[None, :]
    )
    if MOST == 1:
        b, c, left = _keys(
            given,
            taps,
            taps_bias,
            a,
            step_bias,
            window,
            its_window,
            position,
            0,
            holds <= position,
            row,
            stride,
            head,
            HEADS,
            GROUPS,
            HEAD,
            STATE,
            STATE_WIDTH,
            TAPS,
            WIDTH,
            RING,
            BIAS,
        )
    for begin in range(0, HEAD, PART):
        value = begin + some
        there = value < HEAD
        within = (key < STATE)[:, None] & there[None, :]
        state = tl.load(held + begin, mask=within, other=0.0).to(tl.float32)
        for ahead in range(first, last):
            fold = holds <= position + ahead
            if MOST > 1:
                b, c, left = _keys(
                    given,
                    taps,
                    taps_bias,
                    a,
                    step_bias,
                    window,
                    its_window,
                    position + ahead,
                    ahead,
                    fold,
                    row + ahead,
                    stride,
                    head,
                    HEADS,
                    GROUPS,
                    HEAD,
                    STATE,
                    STATE_WIDTH,
                    TAPS,
                    WIDTH,
                    RING,
                    BIAS,
                )
            x = _convolved(
                given + size,
                taps,
                taps_bias,
                window,
                its_window,
                position + ahead,
                ahead,
                fold,
                row + ahead,
                stride,
                head * HEAD + value,
                there,
                channels,
                TAPS,
                WIDTH,
                RING,
                BIAS,
            )
            if fold:
                state = state * left + b * x[None, :]
                kept = state.to(matrix.dtype.element_ty)
                tl.store(held + begin, kept, mask=within & (ahead == 0))
            answer = (tl.sum(state * c, axis=0) + past * x).to(dtype)
            answers = out + (row + ahead) * size + head * HEAD
            tl.store(answers + value, answer, mask=there & (ahead >= 0))


@triton.jit
def _keys(
    given,
    taps,
    taps_bias,
    a,
    step_bias,
    window,
    slot,
    position,
    ahead,
    fold,
    token,
    stride,
    head,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    STATE: tl.constexpr,
    STATE_WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Returns B times the step's size and C [STATE_WIDTH, 1] of a row's token, and the factor of
    its decay. slot, position, ahead, fold, token: see `of_row`."""
    size: tl.constexpr = HEADS * HEAD
    channels: tl.constexpr = size + 2 * GROUPS * STATE
    source = given + token * stride + size + channels + head
    dt = beside_of(source, window, slot, position, ahead, fold, head, channels, WIDTH, RING)
    dt = softplus(dt + tl.load(step_bias + head))
    left = tl.exp(dt * tl.load(a + head))
    key = tl.arange(0, STATE_WIDTH)
    is_key, of_group = key < STATE, size + head // (HEADS // GROUPS) * STATE + key
    b = _convolved(
        given + size,
        taps,
        taps_bias,
        window,
        slot,
        position,
        ahead,
        fold,
        token,
        stride,
        of_group,
        is_key,
        channels,
        TAPS,
        WIDTH,
        RING,
        BIAS,
    )
    c = _convolved(
        given + size,
        taps,
        taps_bias,
        window,
        slot,
        position,
        ahead,
        fold,
        token,
        stride,
        of_group + GROUPS * STATE,
        is_key,
        channels,
        TAPS,
        WIDTH,
        RING,
        BIAS,
    )
    return b[:, None] * dt, c[:, None], left


@triton.jit
def _convolved(
    given,
    taps,
    taps_bias,
    window,
    slot,
    position,
    ahead,
    fold,
    token,
    stride,
    channel,
    there,
    channels: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Returns silu of a token's convolution, for some channels of x, B and C, in float32. given:
    the first x. Other arguments: see `of_row`."""
    total = of_row(
        given,
        taps,
        window,
        slot,
        position,
        ahead,
        fold,
        token,
        stride,
        channel,
        there,
        channels,
        RING,
        TAPS,
        WIDTH,
        False,
    )
    if BIAS:
        total += tl.load(taps_bias + channel, mask=there, other=0.0).to(tl.float32)
    return silu(total).to(given.dtype.element_ty).to(tl.float32)


@triton.jit
def _gated_norm(
    x,
    gate,
    weight,
    out,
    low,
    scales,
    stride,
    gate_stride,
    eps,
    width,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Kernel of `gated_norm`, with one program per row of GROUPS groups of EACH numbers.
    MOST_GROUPS, MOST: GROUPS and EACH rounded up to powers of two. NORM: False computes x *
    silu(gate) only. low, scales, FP8: see `linear.fp8.store_rows`."""
    wait(EARLY)
    release(EARLY)
    row = tl.program_id(0).to(tl.int64)
    group, own = tl.arange(0, MOST_GROUPS)[:, None], tl.arange(0, MOST)[None, :]
    column, there = group * EACH + own, (group < GROUPS) & (own < EACH)
    opening = tl.load(gate + row * gate_stride + column, mask=there, other=0.0).to(tl.float32)
    value = tl.load(x + row * stride + column, mask=there, other=0.0).to(tl.float32) * silu(opening)
    dtype: tl.constexpr = x.dtype.element_ty
    if NORM:
        value = (
            (value * tl.rsqrt(tl.sum(value * value, axis=1) / EACH + eps)[:, None])
            .to(dtype)
            .to(tl.float32)
        )
        value *= tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    value = value.to(dtype)
    if FP8 > 0:
        whole: tl.constexpr = MOST_GROUPS * MOST
        alone = row + tl.zeros((1, 1), tl.int64)
        at, held = tl.reshape(row * width + column, (1, whole)), tl.reshape(there, (1, whole))
        flat = tl.reshape(value, (1, whole))
        store_rows(flat, out, low, scales, at, held, alone, alone >= 0, width, FP8, whole)
    else:
        tl.store(out + row * width + column, value, mask=there)


def mamba2(
    given: Tensor,
    heads: Mamba2Heads,
    weights: Mamba2Weights,
    window: Tensor,
    matrix: Tensor,
    inputs: StepInputs,
) -> Tensor:
    """Returns the layer's outputs [T, size] for decode rows and chunks. given: [T, columns].
    window: [slots, width, channels or more]. matrix: [slots, heads, state_width, head_width]. The
    contract is `ops.Mamba2Scan`."""
    h, w, states, rows = heads, weights, inputs.states, inputs.rows
    assert states is not None, "a layer with a recurrent matrix has slots"
    assert matrix[0].is_contiguous()
    out = torch.empty((given.shape[0], h.size), dtype=given.dtype, device=given.device)
    bias = w.taps if w.taps_bias is None else w.taps_bias
    if rows:
        key = next_power_of_2(h.state_width)
        part = min(next_power_of_2(h.head_width), max(1, _AT_ONCE // key))
        _rows[(h.heads, rows)](
            given,
            w.taps,
            bias,
            w.a,
            w.step_bias,
            w.skip,
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
            HEADS=h.heads,
            GROUPS=h.groups,
            HEAD=h.head_width,
            STATE=h.state_width,
            PART=part,
            STATE_WIDTH=key,
            TAPS=w.taps.shape[1],
            WIDTH=window.shape[1],
            RING=window.shape[2],
            MOST=most_queries(window, w.taps),
            BIAS=w.taps_bias is not None,
            num_warps=_WARPS if key * part == _AT_ONCE else 1,
        )
    if inputs.prefill is not None and given.shape[0] > rows:
        mamba2_chunks(given, h, w, window, matrix, inputs, out)
    return out


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, form: Form = "wide"
) -> Rows:
    """Returns the RMS norm of x * silu(gate), [T, F], times weight. The norm is computed for each
    group of F / groups neighbours. weight None: returns x * silu(gate). x, gate: [T, F], which may
    have gaps between rows. weight: [F]. form: representation of the result."""
    rows, width = x.shape
    out: Rows = (
        torch.empty((rows, width), dtype=x.dtype, device=x.device)
        if form == "wide"
        else empty_rows(x, form)
    )
    if rows:
        each, early = width // groups, early_of(x.device, rows)
        most, most_groups = next_power_of_2(each), next_power_of_2(groups)
        _gated_norm[(rows,)](
            x,
            gate,
            x if weight is None else weight,
            *pointers(out),
            x.stride(0),
            gate.stride(0),
            eps,
            width,
            GROUPS=groups,
            EACH=each,
            NORM=weight is not None,
            FP8=BITS[form],
            EARLY=early,
            MOST_GROUPS=most_groups,
            MOST=most,
            num_warps=max(1, min(16, most * most_groups // 512)),
            launch_pdl=bool(early),
        )
    return out

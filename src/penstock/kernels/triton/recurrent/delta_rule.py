"""The gated delta rule for decode rows (kernels/delta_rule.py has the formulas). A program computes
one value head of one row: convolutions, rate, decay, update of the state, output, norm and gate.

A program reads, updates and writes the head's state matrix once, some value columns at a time. It
has few threads, so that sums need little exchange between warps, and many programs share a
multiprocessor. Programs of value heads with the same key head all compute q and k. That is safe, as
the convolution's window is a ring: the newest token overwrites an entry that no other program
reads. `delta_chunks` computes chunks. T: a step's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.delta_rule import NORM_EPS, DeltaHeads, DeltaWeights
from penstock.kernels.inputs import StepInputs
from penstock.kernels.triton.grid import next_power_of_2
from penstock.kernels.triton.recurrent.delta_chunks import delta_chunks, log_decay, weighed
from penstock.kernels.triton.recurrent.short_conv import of_row, silu

# Numbers of the state matrix that a program has in registers at once, and its warps. 1,000 rows of
# Qwen3.5 on an H200 take, with the state in float32 and in bfloat16: with half of the matrix's
# 16,384 numbers and 2 warps 1,113 and 738 us; with all and 4 warps 1,236 and 872 us, with 8 warps
# 3,466 and 2,030 us; with a quarter and 1 warp 1,281 and 919 us.
_AT_ONCE, _WARPS = 8192, 2


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
    folds,
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
):
    """Kernel of `delta_rule`, with one program per value head and row. KEY, VALUE: numbers of a key
    and of a value. KEYS, VALUES: these, rounded up to powers of two. PART: value columns that are
    processed at once. TAPS: taps of the convolution. Tensors: see `ops.DeltaRule`; slots, folds:
    fields of StateInputs."""
    # neighbouring programs have heads of the same row, whose memory is adjacent
    head, row = (
        tl.program_id(0),
        tl.program_id(1).to(tl.int64),
    )
    slot, position, fold = (
        tl.load(slots + row).to(tl.int64),
        tl.load(positions + row),
        tl.load(folds + row) != 0,
    )
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    dtype = given.dtype.element_ty
    of_head = rates + row * 2 * VALUE_HEADS + head
    rate = most_rate / (1.0 + tl.exp(-tl.load(of_head).to(tl.float32)))
    step = tl.load(of_head + VALUE_HEADS).to(tl.float32)
    left = tl.exp(log_decay(step, tl.load(step_bias + head), tl.load(decay + head)))
    key, some = tl.arange(0, KEYS), tl.arange(0, PART)
    is_key, its_window = key < KEY, slot * window_stride
    of_key = head // (VALUE_HEADS // KEY_HEADS) * KEY + key
    q = of_row(
        given,
        taps,
        window,
        its_window,
        position,
        fold,
        row,
        stride,
        of_key,
        is_key,
        channels,
        TAPS,
        False,
    )
    k = of_row(
        given,
        taps,
        window,
        its_window,
        position,
        fold,
        row,
        stride,
        of_key + KEY_HEADS * KEY,
        is_key,
        channels,
        TAPS,
        False,
    )
    q, k = silu(q).to(dtype).to(tl.float32), silu(k).to(dtype).to(tl.float32)
    q = (q * (tl.rsqrt(tl.sum(q * q, axis=0) + unit_eps) * scale))[:, None]
    k = (k * tl.rsqrt(tl.sum(k * k, axis=0) + unit_eps))[:, None]
    held = (
        matrix + slot * matrix_stride + head * (KEY * VALUE) + key[:, None] * VALUE + some[None, :]
    )
    answers = out + row * (VALUE_HEADS * VALUE) + head * VALUE
    squares = 0.0
    for begin in range(0, VALUE, PART):
        there = begin + some < VALUE
        within = is_key[:, None] & there[None, :]
        state = tl.load(held + begin, mask=within, other=0.0).to(tl.float32)
        of_value = 2 * KEY_HEADS * KEY + head * VALUE + begin + some
        v = of_row(
            given,
            taps,
            window,
            its_window,
            position,
            fold,
            row,
            stride,
            of_value,
            there,
            channels,
            TAPS,
            False,
        )
        v = silu(v).to(dtype).to(tl.float32)
        if fold:
            state *= left
            state += k * ((v - tl.sum(state * k, axis=0)) * rate)[None, :]
            tl.store(held + begin, state.to(matrix.dtype.element_ty), mask=within)
        answer = tl.sum(state * q, axis=0).to(dtype)
        tl.store(answers + begin + some, answer, mask=there)
        squares += tl.sum(answer.to(tl.float32) * answer.to(tl.float32))
    tl.debug_barrier()  # the stored outputs are read again below, by other threads
    value = tl.arange(0, VALUES)
    is_value = value < VALUE
    z = tl.load(
        given + row * stride + channels + head * VALUE + value, mask=is_value, other=0.0
    ).to(tl.float32)
    answer = tl.load(answers + value, mask=is_value, other=0.0).to(tl.float32)
    answer = weighed(answer * tl.rsqrt(squares / VALUE + eps), z, norm, value, is_value, dtype)
    tl.store(answers + value, answer.to(dtype), mask=is_value)


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
    value_size]. rates: [T, 2 * value_heads]. window: [slots, taps, channels]. matrix: [slots,
    value_heads, key_width, value_width]. The contract is `ops.DeltaRule`."""
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
            states.folds.view(torch.uint8),
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
            num_warps=_WARPS if keys * part == _AT_ONCE else 1,
        )
    if inputs.prefill is not None and given.shape[0] > rows:
        delta_chunks(given, rates, h, w, window, matrix, inputs, out)
    return out

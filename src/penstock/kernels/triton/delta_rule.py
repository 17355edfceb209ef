"""The gated delta rule, a program a row and value head: convolutions, rates, decay, update, answer, norm and gate.

A program reads the head's matrix once, changes it and writes it back; everything else of the layer happens beside that
read. Value heads that share a key head work out its q and k each for itself: the window is a ring, so neither spoils
what the other reads. Chunks are `delta_chunks`' work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.delta_rule import NORM_EPS, DeltaHeads, DeltaWeights
from penstock.kernels.inputs import StepInputs
from penstock.kernels.triton.delta_chunks import delta_chunks, gated_norm, log_decay
from penstock.kernels.triton.grid import next_power_of_2
from penstock.kernels.triton.short_conv import of_row, silu

_WARPS = 8


@triton.jit
def _rows(
    given, rates, taps, decay, step_bias, norm, window, matrix, slots, folds, positions, out, window_stride,
    matrix_stride, stride, eps, scale, unit_eps, most_rate, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, position, fold = tl.load(slots + row).to(tl.int64), tl.load(positions + row), tl.load(folds + row) != 0
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    dtype = given.dtype.element_ty
    lane = tl.arange(0, WIDTH)
    # q, k and v below each other: as many numbers as a program has threads, or more, so that each is loaded once.
    part = tl.arange(0, 4)[:, None]
    of_key = head // (VALUE_HEADS // KEY_HEADS) * KEY + part * (KEY_HEADS * KEY)
    channel = tl.where(part < 2, of_key, 2 * KEY_HEADS * KEY + head * VALUE) + lane[None, :]
    there = ((part < 2) & (lane < KEY)[None, :]) | ((part == 2) & (lane < VALUE)[None, :])
    mixed = of_row(
        given, taps, window, slot * window_stride, position, fold, row, stride, channel, there, channels, TAPS, False
    )
    mixed = silu(mixed).to(dtype).to(tl.float32)
    q, k = tl.sum(tl.where(part == 0, mixed, 0.0), axis=0), tl.sum(tl.where(part == 1, mixed, 0.0), axis=0)
    v = tl.sum(tl.where(part == 2, mixed, 0.0), axis=0)
    q = (q * (tl.rsqrt(tl.sum(q * q, axis=0) + unit_eps) * scale))[:, None]
    k = (k * tl.rsqrt(tl.sum(k * k, axis=0) + unit_eps))[:, None]
    of_head = rates + row * 2 * VALUE_HEADS + head
    rate = most_rate / (1.0 + tl.exp(-tl.load(of_head).to(tl.float32)))
    step = tl.load(of_head + VALUE_HEADS).to(tl.float32)
    left = tl.exp(log_decay(step, tl.load(step_bias + head), tl.load(decay + head)))
    held = matrix + slot * matrix_stride + head * (KEY * VALUE) + lane[:, None] * VALUE + lane[None, :]
    within = (lane < KEY)[:, None] & (lane < VALUE)[None, :]
    state = tl.load(held, mask=within, other=0.0).to(tl.float32)  # further up it would take twice the registers
    if fold:
        state *= left
        state += k * ((v - tl.sum(state * k, axis=0)) * rate)[None, :]
        tl.store(held, state.to(matrix.dtype.element_ty), mask=within)
    answer = tl.sum(state * q, axis=0)[None, :]
    value = head * VALUE + lane
    z = tl.load(given + row * stride + channels + value, mask=lane < VALUE, other=0.0).to(tl.float32)
    answer = gated_norm(answer, z[None, :], norm, lane, lane < VALUE, eps, VALUE, dtype)
    target = out + row * (VALUE_HEADS * VALUE) + value
    tl.store(target[None, :], answer.to(dtype), mask=(lane < VALUE)[None, :])


def delta_rule(
    given: Tensor, rates: Tensor, heads: DeltaHeads, weights: DeltaWeights, window: Tensor, matrix: Tensor,
    inputs: StepInputs,
) -> Tensor:  # fmt: skip
    """given [T, channels + value_size], rates [T, 2 * value_heads], window [slots, taps, channels], matrix
    [slots, value_heads, key_width, value_width] -> [T, value_size]. The contract is `ops.DeltaRule`."""
    h, w, states, rows = heads, weights, inputs.states, inputs.rows
    assert states is not None, "a layer with a recurrent matrix has slots"
    assert rates.is_contiguous() and matrix[0].is_contiguous()
    out = torch.empty((given.shape[0], h.value_size), dtype=given.dtype, device=given.device)
    if rows:
        width = next_power_of_2(max(h.key_width, h.value_width))
        _rows[(rows, h.value_heads)](
            given, rates, w.taps, w.decay, w.step_bias, w.norm, window, matrix, states.slots,
            states.folds.view(torch.uint8), inputs.positions, out, window.stride(0), matrix.stride(0),
            given.stride(0), w.eps, h.key_width**-0.5, NORM_EPS, w.most_rate,
            KEY_HEADS=h.key_heads, VALUE_HEADS=h.value_heads, KEY=h.key_width, VALUE=h.value_width, WIDTH=width,
            TAPS=w.taps.shape[1], num_warps=max(1, min(_WARPS, width * width // 2048)),
        )  # fmt: skip
    if inputs.prefill is not None and given.shape[0] > rows:
        delta_chunks(given, rates, h, w, window, matrix, inputs, out)
    return out

"""Gated short convolution: a program a token and some channels. It knows one layer's window; no layer.

A row's program reads its window, moves it on and writes it back. Tokens of a chunk read the window that was there
before the step; who moves it on comes in a launch behind them, a program a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.triton.grid import cdiv, next_power_of_2

_CHANNELS = 256  # of a program


@triton.jit
def _came(given, token, channel, there, channels):
    """What a token brings to its channels: gate times value, rounded as it is kept."""
    base = given + token * 3 * channels + channel
    gate = tl.load(base, mask=there, other=0.0).to(tl.float32)
    value = tl.load(base + 2 * channels, mask=there, other=0.0).to(tl.float32)
    return (gate * value).to(given.dtype.element_ty).to(tl.float32)


@triton.jit
def _answer(given, bias, out, token, channel, there, channels, total, BIAS: tl.constexpr):
    """Writes a token's answer: its out gate times what its taps add up to."""
    if BIAS:
        total += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(given + token * 3 * channels + channels + channel, mask=there, other=0.0).to(tl.float32)
    mixed = total.to(given.dtype.element_ty).to(tl.float32)
    tl.store(out + token * channels + channel, (gate * mixed).to(out.dtype.element_ty), mask=there)


@triton.jit
def _rows(
    given, weight, bias, window, slots, folds, out, channels, TAPS: tl.constexpr, BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    fold = tl.load(folds + row) != 0
    held = window + tl.load(slots + row).to(tl.int64) * channels * TAPS + channel * TAPS
    came = _came(given, row, channel, there, channels)
    total = tl.zeros((CHANNELS,), tl.float32)
    for tap in tl.static_range(TAPS):
        own = tl.load(held + tap, mask=there, other=0.0).to(tl.float32)
        if tap + 1 < TAPS:
            next = tl.load(held + tap + 1, mask=there, other=0.0).to(tl.float32)
        else:
            next = came
        seen = tl.where(fold, next, own)
        tl.store(held + tap, seen.to(window.dtype.element_ty), mask=there & fold)
        total += seen * tl.load(weight + channel * TAPS + tap, mask=there, other=0.0).to(tl.float32)
    _answer(given, bias, out, row, channel, there, channels, total, BIAS)


@triton.jit
def _chunks(
    given, weight, bias, window, slots, start, out, rows, chunks, channels, TAPS: tl.constexpr, BIAS: tl.constexpr,
    CHANNELS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """A program a token of a chunk."""
    at = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    if at < tl.load(start + chunks):
        low, high = 0, chunks  # the last chunk that begins at or before this token
        for _ in tl.static_range(SEARCH):
            middle = (low + high) // 2
            begins = tl.load(start + middle) <= at
            low, high = tl.where(begins & (middle > low), middle, low), tl.where(begins, high, middle)
        first = tl.load(start + low)
        held = window + tl.load(slots + low).to(tl.int64) * channels * TAPS + channel * TAPS
        token = (rows + at).to(tl.int64)
        total = tl.zeros((CHANNELS,), tl.float32)
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap  # tokens before this one
            if at - back >= first:
                seen = _came(given, token - back, channel, there, channels)
            else:
                # A window's last tap is the token right before the chunk.
                seen = tl.load(held + TAPS - 1 + (at - back - first) + 1, mask=there, other=0.0).to(tl.float32)
            total += seen * tl.load(weight + channel * TAPS + tap, mask=there, other=0.0).to(tl.float32)
        _answer(given, bias, out, token, channel, there, channels, total, BIAS)


@triton.jit
def _move_on(given, window, slots, start, rows, channels, TAPS: tl.constexpr, CHANNELS: tl.constexpr):
    """A program a chunk: its window becomes its last tokens."""
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < channels
    first, stop = tl.load(start + chunk), tl.load(start + chunk + 1)
    count = stop - first
    held = window + tl.load(slots + chunk).to(tl.int64) * channels * TAPS + channel * TAPS
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap  # tokens before the chunk's last
        if back < count:
            seen = _came(given, (rows + stop - 1 - back).to(tl.int64), channel, there, channels)
        else:
            seen = tl.load(held + tap + count, mask=there, other=0.0).to(tl.float32)
        tl.store(held + tap, seen.to(window.dtype.element_ty), mask=there & (count > 0))


def short_conv(given: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs) -> Tensor:
    """given [T, 3c], weight [c, taps], window [slots, c, taps] -> [T, c]. The contract is `ops.GatedConvolution`."""
    states, rows, channels = inputs.states, inputs.rows, weight.shape[0]
    assert states is not None, "a layer with a window has slots"
    out = torch.empty((given.shape[0], channels), dtype=given.dtype, device=given.device)
    block = min(_CHANNELS, next_power_of_2(channels))
    blocks = cdiv(channels, block)
    told = {"TAPS": weight.shape[1], "CHANNELS": block}
    has_bias, added = bias is not None, weight if bias is None else bias
    if rows:
        _rows[(rows, blocks)](
            given, weight, added, window, states.slots, states.folds.to(torch.int32), out, channels, BIAS=has_bias,
            **told,
        )  # fmt: skip
    if inputs.prefill is not None and given.shape[0] > rows:
        start, slots = inputs.prefill.start, states.chunk_slots
        chunks = slots.shape[0]
        _chunks[(given.shape[0] - rows, blocks)](
            given, weight, added, window, slots, start, out, rows, chunks, channels, BIAS=has_bias,
            SEARCH=max(1, chunks.bit_length()), **told,
        )  # fmt: skip
        _move_on[(chunks, blocks)](given, window, slots, start, rows, channels, **told)
    return out

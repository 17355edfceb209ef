"""Mamba2's recurrence over chunks of prompts, in blocks of 64 tokens by its dual form (arXiv:2405.21060, section 6).

Four launches: the convolution, its windows, C B of a block's tokens with each other (which heads of a group share), and
the states from block to block with the answers (a program a chunk, head and part of its values).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.mamba2 import Mamba2Heads, Mamba2Weights
from penstock.kernels.triton.delta_chunks import BLOCK, softplus
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.short_conv import block_of, convolve_chunks

# Values of a program that carries a state, and blocks that it has under way: as `delta_chunks` has them.
_MANY, _FEW = (64, 2), (32, 3)
_SEVERAL = 4  # chunks
_NARROW = 128  # states up to here have room in the registers of four warps


@triton.jit(do_not_specialize=["chunks"])
def _scores(
    mixed, start, scores, chunks, SIZE: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    STATE_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program a block and group: C of each token times B of the block's tokens."""
    _, first, count = block_of(start, tl.program_id(0), chunks, BLOCK)
    group = tl.program_id(1)
    if count > 0:
        token, key = tl.arange(0, BLOCK), tl.arange(0, STATE_WIDTH)
        at, there = (first + token).to(tl.int64), token < count
        of_b = mixed + at[:, None] * (SIZE + 2 * GROUPS * STATE) + SIZE + group * STATE + key[None, :]
        keys_there = there[:, None] & (key < STATE)[None, :]
        b = tl.load(of_b, mask=keys_there, other=0.0)
        c = tl.load(of_b + GROUPS * STATE, mask=keys_there, other=0.0)
        seen = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        tl.store(scores + (at[:, None] * GROUPS + group) * BLOCK + token[None, :], seen, mask=there[:, None])


@triton.jit(do_not_specialize=["rows"])
def _carry(
    mixed, given, scores, a, step_bias, skip, start, matrix, slots, out, rows, slot_stride, stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, STATE: tl.constexpr, STATE_WIDTH: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program a chunk, head and VALUES of its values: block by block, the answers and the state behind it."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    group = head // (HEADS // GROUPS)
    begin, end = tl.load(start + chunk), tl.load(start + chunk + 1)
    token, key = tl.arange(0, BLOCK), tl.arange(0, STATE_WIDTH)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < STATE, value < HEAD
    size: tl.constexpr = HEADS * HEAD
    channels: tl.constexpr = size + 2 * GROUPS * STATE
    dtype = mixed.dtype.element_ty
    held = matrix + tl.load(slots + chunk).to(tl.int64) * slot_stride + head * (STATE * HEAD)
    held = held + key[:, None] * HEAD + value[None, :]
    kept = is_key[:, None] & is_value[None, :]
    state = tl.load(held, mask=kept, other=0.0).to(tl.float32)
    by, bias, past = tl.load(a + head), tl.load(step_bias + head), tl.load(skip + head)
    not_before = token[:, None] >= token[None, :]
    for first in range(begin, end, BLOCK):
        at, there = (first + token).to(tl.int64), token < end - first
        keys_there, values_there = there[:, None] & is_key[None, :], there[:, None] & is_value[None, :]
        of_token = mixed + at[:, None] * channels
        x = tl.load(of_token + head * HEAD + value[None, :], mask=values_there, other=0.0)
        of_b = of_token + size + group * STATE + key[None, :]
        b = tl.load(of_b, mask=keys_there, other=0.0)
        c = tl.load(of_b + GROUPS * STATE, mask=keys_there, other=0.0)
        of_scores = scores + (at[:, None] * GROUPS + group) * BLOCK + token[None, :]
        seen = tl.load(of_scores, mask=there[:, None], other=0.0)
        raw = tl.load(given + (rows + at) * stride + size + channels + head, mask=there, other=0.0).to(tl.float32)
        dt = tl.where(there, softplus(raw + bias), 0.0)
        total = tl.cumsum(dt * by, axis=0)
        between = tl.exp(tl.where(not_before, total[:, None] - total[None, :], 0.0))
        weighed = tl.where(not_before, seen * between * dt[None, :], 0.0).to(dtype)
        answer = tl.dot(c, state.to(dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
        answer += tl.dot(weighed, x, input_precision=PRECISION) + past * x.to(tl.float32)
        tl.store(out + (rows + at[:, None]) * size + head * HEAD + value[None, :], answer.to(dtype), mask=values_there)
        last = tl.sum(tl.where(token == BLOCK - 1, total, 0.0))  # tokens that aren't there have steps of 0
        left = (b.to(tl.float32) * (tl.exp(last - total) * dt)[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(left), x, input_precision=PRECISION)
    tl.store(held, state.to(matrix.dtype.element_ty), mask=kept)


def mamba2_chunks(
    given: Tensor, heads: Mamba2Heads, weights: Mamba2Weights, window: Tensor, matrix: Tensor, inputs: StepInputs,
    out: Tensor,
) -> None:  # fmt: skip
    """Writes the answers of a step's chunks to out [T, size], behind its rows; windows and matrices move on."""
    h, w, states, rows, prefill = heads, weights, inputs.states, inputs.rows, inputs.prefill
    assert states is not None and prefill is not None
    tokens, start, chunks = given.shape[0] - rows, prefill.start, states.chunk_slots.shape[0]
    mixed = torch.empty((tokens, h.channels), dtype=given.dtype, device=given.device)
    convolve_chunks(given[:, h.size :], w.taps, w.taps_bias, window, inputs, mixed, gated=False)
    scores = torch.empty((tokens, h.groups, BLOCK.value), dtype=torch.float32, device=given.device)
    keys, values = (max(16, next_power_of_2(width)) for width in (h.state_width, h.head_width))
    wide = given.dtype == torch.float32
    exact = "tf32x3" if wide else "tf32"
    part, stages = _MANY if chunks >= _SEVERAL and not wide else _FEW
    _scores[(tokens // BLOCK.value + chunks, h.groups)](
        mixed, start, scores, chunks, SIZE=h.size, GROUPS=h.groups, STATE=h.state_width, STATE_WIDTH=keys,
        PRECISION=exact, num_warps=4, num_stages=1,
    )  # fmt: skip
    part = min(part, values)
    _carry[(chunks, h.heads, cdiv(h.head_width, part))](
        mixed, given, scores, w.a, w.step_bias, w.skip, start, matrix, states.chunk_slots, out, rows,
        matrix.stride(0), given.stride(0), HEADS=h.heads, GROUPS=h.groups, HEAD=h.head_width, STATE=h.state_width,
        STATE_WIDTH=keys, VALUES=part, PRECISION=exact, num_warps=8 if wide or keys > _NARROW else 4,
        num_stages=1 if wide else stages,
    )  # fmt: skip

"""Mamba2's recurrence over chunks of prompts. kernels/mamba2.py has the formulas. A chunk is
computed in blocks of 64 tokens, by the dual form (arXiv:2405.21060, section 6).

There are four launches: (1) the convolution; (2) the update of its windows; (3) all work that needs
a single block only, for all blocks at once (`_blocks`); (4) the states from block to block, and the
outputs (`_carry`). T: a step's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.mamba2 import Mamba2Heads, Mamba2Weights
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.recurrent.delta_chunks import BLOCK, LEAST, softplus
from penstock.kernels.triton.recurrent.short_conv import block_of, convolve_chunks

# VALUES of `_carry`, and its stages (blocks that are loaded ahead)
_PART, _STAGES = 64, 3
# the largest state width for which the state fits in the registers of four warps, and _STAGES
# blocks fit in shared memory
_NARROW = 128


@triton.jit(do_not_specialize=["rows", "chunks"])
def _blocks(
    mixed,
    given,
    a,
    step_bias,
    start,
    scores,
    to_state,
    from_state,
    rows,
    chunks,
    stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    STATE: tl.constexpr,
    STATE_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Kernel of launch 3, with one program per block and group of heads, which share B and C.
    Writes for each token and head: scores: the weights with which the block's tokens enter its
    output; to_state: the factor with which its x enters the state after the block; from_state: the
    factor with which the state before the block enters its output. mixed: output of the
    convolution."""
    _, first, count = block_of(start, tl.program_id(0), chunks, BLOCK)
    group = tl.program_id(1)
    if count > 0:
        token, key = tl.arange(0, BLOCK), tl.arange(0, STATE_WIDTH)
        at, there = (first + token).to(tl.int64), token < count
        size: tl.constexpr = HEADS * HEAD
        channels: tl.constexpr = size + 2 * GROUPS * STATE
        of_b = mixed + at[:, None] * channels + size + group * STATE + key[None, :]
        keys_there = there[:, None] & (key < STATE)[None, :]
        b = tl.load(of_b, mask=keys_there, other=0.0)
        c = tl.load(of_b + GROUPS * STATE, mask=keys_there, other=0.0)
        not_before = token[:, None] >= token[None, :]
        met = tl.where(not_before, tl.dot(c, tl.trans(b), input_precision=PRECISION), 0.0)
        for head in range(group * (HEADS // GROUPS), (group + 1) * (HEADS // GROUPS)):
            of_dt = given + (rows + at) * stride + size + channels + head
            raw = tl.load(of_dt, mask=there, other=0.0).to(tl.float32)
            dt = tl.where(there, softplus(raw + tl.load(step_bias + head)), 0.0)
            total = tl.cumsum(dt * tl.load(a + head), axis=0)
            # tokens past the block's end have a step of 0, so the last total is that of all its
            # tokens
            last = tl.sum(tl.where(token == BLOCK - 1, total, 0.0))
            between = tl.exp(tl.where(not_before, total[:, None] - total[None, :], 0.0))
            of_head = at * HEADS + head
            seen = (met * between * dt[None, :]).to(mixed.dtype.element_ty)
            tl.store(scores + of_head[:, None] * BLOCK + token[None, :], seen, mask=there[:, None])
            tl.store(to_state + of_head, tl.exp(last - total) * dt, mask=there)
            tl.store(from_state + of_head, tl.exp(total), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _carry(
    mixed,
    scores,
    to_state,
    from_state,
    skip,
    start,
    matrix,
    slots,
    out,
    rows,
    slot_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    STATE: tl.constexpr,
    STATE_WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Kernel of launch 4, with one program per chunk, head and VALUES of the head's values. Block
    by block it writes the outputs and updates the state in `matrix`."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(start + chunk), tl.load(start + chunk + 1)
    if begin == end:  # padding, not a chunk: the state in its slot stays unchanged
        return
    token, key = tl.arange(0, BLOCK), tl.arange(0, STATE_WIDTH)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < STATE, value < HEAD
    size: tl.constexpr = HEADS * HEAD
    dtype = mixed.dtype.element_ty
    held = matrix + tl.load(slots + chunk).to(tl.int64) * slot_stride + head * (STATE * HEAD)
    held = held + key[:, None] * HEAD + value[None, :]
    kept = is_key[:, None] & is_value[None, :]
    state = tl.load(held, mask=kept, other=0.0).to(tl.float32)
    past = tl.load(skip + head)
    for first in range(begin, end, BLOCK):
        at, there = (first + token).to(tl.int64), token < end - first
        keys_there, values_there = (
            there[:, None] & is_key[None, :],
            there[:, None] & is_value[None, :],
        )
        of_token = mixed + at[:, None] * (size + 2 * GROUPS * STATE)
        x = tl.load(of_token + head * HEAD + value[None, :], mask=values_there, other=0.0)
        of_b = of_token + size + head // (HEADS // GROUPS) * STATE + key[None, :]
        b = tl.load(of_b, mask=keys_there, other=0.0)
        c = tl.load(of_b + GROUPS * STATE, mask=keys_there, other=0.0)
        of_head = at * HEADS + head
        seen = tl.load(
            scores + of_head[:, None] * BLOCK + token[None, :], mask=there[:, None], other=0.0
        )
        kept_of_state = tl.load(from_state + of_head, mask=there, other=0.0)
        answer = tl.dot(c, state.to(dtype), input_precision=PRECISION) * kept_of_state[:, None]
        answer += tl.dot(seen, x, input_precision=PRECISION) + past * x.to(tl.float32)
        tl.store(
            out + (rows + at[:, None]) * size + head * HEAD + value[None, :],
            answer.to(dtype),
            mask=values_there,
        )
        added = (x.to(tl.float32) * tl.load(to_state + of_head, mask=there, other=0.0)[:, None]).to(
            dtype
        )
        last = (first + tl.minimum(end - first, BLOCK) - 1).to(tl.int64)
        state = state * tl.load(from_state + last * HEADS + head)
        state += tl.dot(tl.trans(b), added, input_precision=PRECISION)
    tl.store(held, state.to(matrix.dtype.element_ty), mask=kept)


def mamba2_chunks(
    given: Tensor,
    heads: Mamba2Heads,
    weights: Mamba2Weights,
    window: Tensor,
    matrix: Tensor,
    inputs: StepInputs,
    out: Tensor,
) -> None:
    """Writes the outputs of a step's chunks to out [T, size], after those of the decode rows.
    Updates the chunks' slots of `window` and `matrix`. Parameters: see `ops.Mamba2Scan`."""
    h, w, states, rows, prefill = heads, weights, inputs.states, inputs.rows, inputs.prefill
    assert states is not None and prefill is not None
    tokens, start, chunks = given.shape[0] - rows, prefill.start, states.chunk_slots.shape[0]
    mixed = torch.empty((tokens, h.channels), dtype=given.dtype, device=given.device)
    convolve_chunks(given[:, h.size :], w.taps, w.taps_bias, window, inputs, mixed, gated=False)
    scores = torch.empty((tokens, h.heads, BLOCK.value), dtype=given.dtype, device=given.device)
    to_state, from_state = torch.empty(
        (2, tokens, h.heads), dtype=torch.float32, device=given.device
    )
    keys, values = (max(LEAST, next_power_of_2(width)) for width in (h.state_width, h.head_width))
    wide = given.dtype == torch.float32
    shape = {
        "HEADS": h.heads,
        "GROUPS": h.groups,
        "HEAD": h.head_width,
        "STATE": h.state_width,
        "STATE_WIDTH": keys,
        "PRECISION": "tf32x3" if wide else "tf32",
    }
    _blocks[(tokens // BLOCK.value + chunks, h.groups)](
        mixed,
        given,
        w.a,
        w.step_bias,
        start,
        scores,
        to_state,
        from_state,
        rows,
        chunks,
        given.stride(0),
        **shape,
        num_warps=4,
        num_stages=1,
    )
    part = min(_PART, values)
    _carry[(chunks, h.heads, cdiv(h.head_width, part))](
        mixed,
        scores,
        to_state,
        from_state,
        w.skip,
        start,
        matrix,
        states.chunk_slots,
        out,
        rows,
        matrix.stride(0),
        **shape,
        VALUES=part,
        num_warps=8 if wide or keys > _NARROW else 4,
        num_stages=1 if wide else _STAGES if keys <= _NARROW else _STAGES - 1,
    )

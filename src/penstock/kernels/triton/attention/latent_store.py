"""Stores tokens' latents and rotates their queries, in one launch. It is a part of multi-head
latent attention (arXiv:2405.04434). T: a step's tokens, H: heads; rank, turning, still: see
LatentSizes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.state_forms import LatentKv
from penstock.kernels.triton.attention.rotary_and_store import to_eight
from penstock.kernels.triton.grid import next_power_of_2
from penstock.kernels.triton.pdl import early_of, release, wait


@triton.jit
def _store(
    given,
    q,
    norm,
    vectors,
    beside,
    of_eight,
    slots,
    positions,
    cos_sin,
    eps,
    stride_given,
    stride_q,
    stride_block,
    stride_beside,
    EIGHT: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    STILL: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per token: norms and stores its latent, rotates its key and the queries of all
    heads. vectors, beside: pointers to latents and rotated keys in the cache (LatentKv). of_eight:
    pointer to the scale of eight bits, if EIGHT. EARLY: see pdl.py."""
    lane, half = tl.arange(0, RANK_PAD), tl.arange(0, HALF_PAD)
    inside, there = lane < RANK, half < HALF
    weight = tl.load(norm + lane, mask=inside, other=0.0).to(tl.float32)
    wait(EARLY)
    release(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + token).to(tl.int64), tl.load(positions + token).to(tl.int64)
    FROM: tl.constexpr = RANK if EIGHT else RANK + 2 * HALF  # stride of tokens, in numbers
    to = vectors + slot // 16 * stride_block + slot % 16 * FROM
    turned = beside + slot // 16 * stride_beside + slot % 16 * (2 * HALF if EIGHT else FROM)
    dtype: tl.constexpr = given.dtype.element_ty
    full = tl.load(given + token * stride_given + lane, mask=inside, other=0.0).to(tl.float32)
    normed = (full * tl.rsqrt(tl.sum(full * full, 0) / RANK + eps)).to(dtype).to(tl.float32)
    normed *= weight
    if EIGHT:
        tl.store(to + lane, to_eight(normed.to(dtype), tl.load(of_eight)), mask=inside)
    else:
        tl.store(to + lane, normed.to(vectors.dtype.element_ty), mask=inside)
    cos = tl.load(cos_sin + position * (2 * HALF) + half, mask=there, other=1.0)
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + half, mask=there, other=0.0)
    key = given + token * stride_given + RANK + half
    a, b = (
        tl.load(key, mask=there, other=0.0).to(tl.float32),
        tl.load(key + HALF, mask=there, other=0.0).to(tl.float32),
    )
    tl.store(turned + half, (a * cos - b * sin).to(dtype), mask=there)
    tl.store(turned + HALF + half, (b * cos + a * sin).to(dtype), mask=there)
    head = tl.arange(0, HEADS_PAD)[:, None]
    cell = q + token * stride_q + head * (STILL + 2 * HALF) + STILL + half[None, :]
    of_head = (head < HEADS) & there[None, :]
    a = tl.load(cell, mask=of_head, other=0.0).to(tl.float32)
    b = tl.load(cell + HALF, mask=of_head, other=0.0).to(tl.float32)
    tl.store(cell, (a * cos[None, :] - b * sin[None, :]).to(dtype), mask=of_head)
    tl.store(cell + HALF, (b * cos[None, :] + a * sin[None, :]).to(dtype), mask=of_head)


def latent_store(
    given: Tensor,
    q: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    inputs: StepInputs,
    kv: LatentKv,
    plan: object,
) -> None:
    """Norms and stores latents given [T, rank + turning]; rotates q [T, H, still + turning] in
    place. The contract is `ops.LatentStore`."""
    (tokens, heads, width), rank, turning = q.shape, norm.shape[0], given.shape[1] - norm.shape[0]
    assert q.stride()[1:] == (width, 1) and given.stride(1) == 1
    if tokens:
        early = early_of(q.device, tokens)
        _store[(tokens,)](
            given,
            q,
            norm,
            kv.latent,
            kv.turned,
            norm if kv.scale is None else kv.scale,
            inputs.slots,
            inputs.positions,
            cos_sin,
            eps,
            given.stride(0),
            q.stride(0),
            kv.latent.stride(0),
            kv.turned.stride(0),
            EIGHT=kv.scale is not None,
            HEADS=heads,
            HEADS_PAD=next_power_of_2(heads),
            STILL=width - turning,
            RANK=rank,
            RANK_PAD=next_power_of_2(rank),
            HALF=turning // 2,
            HALF_PAD=next_power_of_2(turning // 2),
            EARLY=early,
            num_warps=4,
            launch_pdl=bool(early),
        )

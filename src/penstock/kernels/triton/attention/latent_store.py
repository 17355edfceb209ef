"""Stores tokens' latents and rotates their queries, in one launch, which for few tokens also makes
the queries for latents. It is a part of multi-head latent attention (arXiv:2405.04434). T: a step's
tokens, H: heads; rank, turning, still, value: see LatentSizes."""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.state_forms import LatentKv
from penstock.kernels.triton.attention.latent_maps import FEW_TOKENS, grid_of, how_of, product
from penstock.kernels.triton.attention.rotary_and_store import to_eight
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import early_of, release, wait


@triton.jit(do_not_specialize=["tokens"])
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
    up,
    asked,
    tokens,
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
    VALUE: tl.constexpr,
    ABSORBS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `latent_store`. Without ABSORBS: one program per token. With it: programs whose
    second index is a head multiply a tile of BM queries by the keys' part of `up` [HEADS, STILL +
    VALUE, RANK], and write BN of the RANK numbers of asked [tokens, HEADS, RANK]; later ones handle
    a token each: norm and store its latent, rotate its key and the queries of all heads. vectors,
    beside: pointers to latents and rotated keys in the cache (LatentKv). of_eight: pointer to the
    scale of eight bits, if EIGHT. EARLY: see pdl.py."""
    head = tl.program_id(1)
    if ABSORBS and head < HEADS:
        m = tl.program_id(2) * BM + tl.arange(0, BM)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        real = (m < tokens)[:, None]
        x = q + m[:, None].to(tl.int64) * stride_q + head * (STILL + 2 * HALF)
        w = up + head.to(tl.int64) * ((STILL + VALUE) * RANK) + n[None, :]
        made = product(x, w, real, (n < RANK)[None, :], RANK, STILL, EARLY, LANES, PRECISION)
        to = asked + (m[:, None].to(tl.int64) * HEADS + head) * RANK
        tl.store(to + n[None, :], made.to(asked.dtype.element_ty), mask=real & (n < RANK)[None, :])
    else:
        lane, half = tl.arange(0, RANK_PAD), tl.arange(0, HALF_PAD)
        inside, there = lane < RANK, half < HALF
        weight = tl.load(norm + lane, mask=inside, other=0.0).to(tl.float32)
        token = tl.program_id(0)
        if ABSORBS:
            later = (head - HEADS) * tl.num_programs(2) + tl.program_id(2)
            token += later * tl.num_programs(0)
        wait(EARLY)
        release(EARLY)
        if token < tokens:
            row = token.to(tl.int64)
            slot = tl.load(slots + row).to(tl.int64)
            position = tl.load(positions + row).to(tl.int64)
            FROM: tl.constexpr = RANK if EIGHT else RANK + 2 * HALF  # stride of tokens, in numbers
            to = vectors + slot // 16 * stride_block + slot % 16 * FROM
            turned = beside + slot // 16 * stride_beside + slot % 16 * (2 * HALF if EIGHT else FROM)
            dtype: tl.constexpr = given.dtype.element_ty
            full = tl.load(given + row * stride_given + lane, mask=inside, other=0.0).to(tl.float32)
            normed = (full * tl.rsqrt(tl.sum(full * full, 0) / RANK + eps)).to(dtype).to(tl.float32)
            normed *= weight
            if EIGHT:
                tl.store(to + lane, to_eight(normed.to(dtype), tl.load(of_eight)), mask=inside)
            else:
                tl.store(to + lane, normed.to(vectors.dtype.element_ty), mask=inside)
            cos = tl.load(cos_sin + position * (2 * HALF) + half, mask=there, other=1.0)
            sin = tl.load(cos_sin + position * (2 * HALF) + HALF + half, mask=there, other=0.0)
            key = given + row * stride_given + RANK + half
            a, b = (
                tl.load(key, mask=there, other=0.0).to(tl.float32),
                tl.load(key + HALF, mask=there, other=0.0).to(tl.float32),
            )
            tl.store(turned + half, (a * cos - b * sin).to(dtype), mask=there)
            tl.store(turned + HALF + half, (b * cos + a * sin).to(dtype), mask=there)
            every = tl.arange(0, HEADS_PAD)[:, None]
            cell = q + row * stride_q + every * (STILL + 2 * HALF) + STILL + half[None, :]
            of_head = (every < HEADS) & there[None, :]
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
    up: Tensor | None = None,
) -> Tensor | None:
    """Norms and stores latents given [T, rank + turning]; rotates q [T, H, still + turning] in
    place. up: [H, still + value, rank]; if T is small, the same launch multiplies queries by its
    keys' part. The contract is `ops.LatentStore`."""
    (tokens, heads, width), rank, turning = q.shape, norm.shape[0], given.shape[1] - norm.shape[0]
    assert q.stride()[1:] == (width, 1) and given.stride(1) == 1
    still, absorbs = width - turning, up is not None and tokens <= FEW_TOKENS
    if not tokens:
        return None
    how, grid = how_of(min(tokens, FEW_TOKENS), still, q.dtype), (tokens, 1, 1)
    asked = None
    if absorbs:
        asked = torch.empty((tokens, heads, rank), dtype=q.dtype, device=q.device)
        across, _, tiles = grid_of(rank, heads, tokens, how)
        grid = (across, heads + cdiv(tokens, across * tiles), tiles)
    early = early_of(q.device, prod(grid))
    _store[grid](
        given,
        q,
        norm,
        kv.latent,
        kv.turned,
        norm if kv.scale is None else kv.scale,
        inputs.slots,
        inputs.positions,
        cos_sin,
        norm if up is None else up,
        q if asked is None else asked,
        tokens,
        eps,
        given.stride(0),
        q.stride(0),
        kv.latent.stride(0),
        kv.turned.stride(0),
        EIGHT=kv.scale is not None,
        HEADS=heads,
        HEADS_PAD=next_power_of_2(heads),
        STILL=still,
        RANK=rank,
        RANK_PAD=next_power_of_2(rank),
        HALF=turning // 2,
        HALF_PAD=next_power_of_2(turning // 2),
        VALUE=0 if up is None else up.shape[1] - still,
        ABSORBS=absorbs,
        **how,
        EARLY=early,
        launch_pdl=bool(early),
    )
    return asked

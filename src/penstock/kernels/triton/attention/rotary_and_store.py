"""Rotary embedding and KV store, in one launch. It takes the output of the fused qkv product; q and
k may be normed as well.

A program handles a token and some of its heads (q's, then k's, then v's, as in the product). q is
rotated in place; k and v are written to the cache only. T: a step's tokens, H: query heads, D:
numbers of a head. Knows heads, positions and slots; no layer. Source: RoFormer, arXiv:2104.09864;
number n of a head rotates together with number n + D / 2, as in Hugging Face's models."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton.attention.flash_loop import BESIDE
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import early_of, release, wait

_HEADS, _WARPS = 16, 4
_WARPS_OF_NORMS = (
    # warps of a program: 16,384 tokens of 16 heads of 256, with norms, take 119 us with 4 warps, 95
    # us with 8; copying takes 63 us
    8
)
_MANY = (
    # With so many tokens or more, a program handles all heads of a token: 8,192 tokens then take
    # 0.0302 ms, and 0.0319 ms with fewer heads a program.
    512
)


@triton.jit
def _by(x, scale, weight, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Returns x * scale * weight. WIDE: True rounds once, at the end; False also rounds x * scale
    to `dtype`."""
    if WIDE:
        return (x * scale * weight).to(dtype).to(tl.float32)
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _normed(
    a,
    b,
    q_norm,
    k_norm,
    is_q,
    is_k,
    lane,
    eps,
    dtype: tl.constexpr,
    WIDTH: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Norms the heads of q and k. a, b: first and second halves of heads, [PIECE, HALF] float32.
    Returns both; the heads of v are unchanged. is_q, is_k: masks of heads [PIECE, 1]. lane: index
    of a number in its half."""
    half = WIDTH // 2
    scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / WIDTH + eps)[:, None]
    if Q_NORM:
        by_a = tl.load(q_norm + lane, mask=lane < half, other=0.0).to(tl.float32)
        by_b = tl.load(q_norm + half + lane, mask=lane < half, other=0.0).to(tl.float32)
        a = tl.where(is_q, _by(a, scale, by_a, dtype, WIDE), a)
        b = tl.where(is_q, _by(b, scale, by_b, dtype, WIDE), b)
    if K_NORM:
        by_a = tl.load(k_norm + lane, mask=lane < half, other=0.0).to(tl.float32)
        by_b = tl.load(k_norm + half + lane, mask=lane < half, other=0.0).to(tl.float32)
        a = tl.where(is_k, _by(a, scale, by_a, dtype, WIDE), a)
        b = tl.where(is_k, _by(b, scale, by_b, dtype, WIDE), b)
    return a, b


@triton.jit
def to_eight(numbers, scale):
    """Returns numbers * (1 / scale) in e4m3. numbers: already rounded to the model's dtype."""
    eight = numbers.to(tl.float32) * tl.div_rn(1.0, scale)
    return tl.clamp(eight, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def store_kv(
    keys,
    scales,
    slot,
    stride,
    head,
    is_v,
    lane,
    numbers,
    there,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    EIGHT: tl.constexpr,
):
    """Stores numbers of K and V in the cache. numbers: already rounded to the model's dtype. slot,
    lane, head: slot of the token, indices of numbers and of KV heads. is_v: True for heads of V.
    SLOTS: tokens of a block. EIGHT: which of K and V are in eight bits: 0 none, 1 V, 2 both
    (kernels/layer_kv.py); V in eight bits is left to `store_eight_v`."""
    block, offset = slot // SLOTS, slot % SLOTS
    if EIGHT == 0:
        part = tl.where(is_v, 1, 0)
        target = keys + block * stride + ((head * 2 + part) * SLOTS + offset) * WIDTH + lane
        tl.store(target, numbers.to(keys.dtype.element_ty), mask=there)
    else:
        wider: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
        target = (
            keys
            + block * stride
            + head * (SLOTS * WIDTH * (wider + 1) // wider)
            + offset * WIDTH
            + lane
        )
        if EIGHT == 2:
            # clamped, so that the index is valid for query heads too, whose result is not stored
            of_head = tl.minimum(tl.maximum(head, 0), KV_HEADS - 1)
            numbers = to_eight(numbers, tl.load(scales + of_head))
        tl.store(target, numbers, mask=there & (is_v == 0))


@triton.jit
def store_eight_v(
    keys,
    values,
    scales,
    slot,
    stride,
    head,
    lane,
    numbers,
    there,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Stores V of KV heads in eight bits, which is transposed in the cache (kernels/layer_kv.py).
    numbers: V, already rounded to the model's dtype. Other arguments: see `store_kv`."""
    wider: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
    of_head = tl.minimum(tl.maximum(head, 0), KV_HEADS - 1)
    eight = to_eight(numbers, tl.load(scales + KV_HEADS + of_head))
    offset = slot % SLOTS
    turned = offset // BESIDE * (BESIDE * WIDTH) + lane * BESIDE + offset % BESIDE
    target = (
        values + slot // SLOTS * (stride * wider) + head * (SLOTS * WIDTH * (wider + 1)) + turned
    )
    tl.store(target, eight, mask=there)


@triton.jit
def _rotary_and_store(
    qkv,
    cos_sin,
    positions,
    slots,
    keys,
    values,
    scales,
    q_norm,
    k_norm,
    eps,
    kv_stride,
    stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    SLOTS: tl.constexpr,
    EIGHT: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
    PIECE: tl.constexpr,
    OF_V: tl.constexpr,
    TURNED_FIRST: tl.constexpr,
    KEYS_AS_VALUES: tl.constexpr,
    V_NORM: tl.constexpr,
):
    """Kernel of `rotary_and_store`, with one program per token and PIECE heads. WIDTH: numbers of a
    head. HALF: half of them, rounded up to a power of two. OF_V: KV_HEADS, rounded up to a power of
    two. EIGHT, SLOTS: see `store_kv`. WIDE: see `_by`. KEYS_AS_VALUES, V_NORM, TURNED_FIRST: see
    AttentionKind. EARLY: see pdl.py."""
    wait(EARLY)
    release(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * PIECE + tl.arange(0, PIECE)[:, None]
    half = WIDTH // 2
    lane = tl.arange(0, HALF)[None, :]
    there = (head < HEADS + 2 * KV_HEADS) & (lane < half)
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    column = head - tl.where(is_v, KV_HEADS, 0) if KEYS_AS_VALUES else head
    source = qkv + token * stride + column * WIDTH + lane
    a = tl.load(source, mask=there, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=there, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qkv.dtype.element_ty
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    if V_NORM:
        by = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / WIDTH + eps)[:, None]
        a = tl.where(is_v, (a * by).to(dtype).to(tl.float32), a)
        b = tl.where(is_v, (b * by).to(dtype).to(tl.float32), b)
    if (Q_NORM or K_NORM) and not TURNED_FIRST:
        a, b = _normed(
            a, b, q_norm, k_norm, is_q, is_k, lane, eps, dtype, WIDTH, Q_NORM, K_NORM, WIDE
        )
    table = cos_sin + tl.load(positions + token).to(tl.int64) * WIDTH + lane
    cos = tl.load(table, mask=lane < half, other=0.0)
    sin = tl.load(table + half, mask=lane < half, other=0.0)
    first = tl.where(is_v, a, a * cos - b * sin).to(dtype)
    second = tl.where(is_v, b, b * cos + a * sin).to(dtype)
    if (Q_NORM or K_NORM) and TURNED_FIRST:
        a, b = first.to(tl.float32), second.to(tl.float32)
        a, b = _normed(
            a, b, q_norm, k_norm, is_q, is_k, lane, eps, dtype, WIDTH, Q_NORM, K_NORM, WIDE
        )
        first, second = a.to(dtype), b.to(dtype)
    tl.store(source, first, mask=there & is_q)
    tl.store(source + half, second, mask=there & is_q)
    slot = tl.load(slots + token).to(tl.int64)
    kv_head = head - HEADS - tl.where(is_v, 1, 0) * KV_HEADS
    stored = there & (head >= HEADS)
    store_kv(
        keys,
        scales,
        slot,
        kv_stride,
        kv_head,
        is_v,
        lane,
        first,
        stored,
        KV_HEADS,
        WIDTH,
        SLOTS,
        EIGHT,
    )
    store_kv(
        keys,
        scales,
        slot,
        kv_stride,
        kv_head,
        is_v,
        lane + half,
        second,
        stored,
        KV_HEADS,
        WIDTH,
        SLOTS,
        EIGHT,
    )
    # V in eight bits is written byte by byte, by the first program of a token for all KV heads
    if EIGHT > 0 and tl.program_id(1) == 0:
        of_v, each = tl.arange(0, OF_V)[:, None], tl.arange(0, 2 * HALF)[None, :]
        inside = (of_v < KV_HEADS) & (each < WIDTH)
        first_v: tl.constexpr = HEADS if KEYS_AS_VALUES else HEADS + KV_HEADS
        numbers = tl.load(
            qkv + token * stride + (first_v + of_v) * WIDTH + each, mask=inside, other=0.0
        )
        if V_NORM:
            full = numbers.to(tl.float32)
            numbers = (full * tl.rsqrt(tl.sum(full * full, axis=1) / WIDTH + eps)[:, None]).to(
                dtype
            )
        store_eight_v(
            keys,
            values,
            scales,
            slot,
            kv_stride,
            of_v,
            each,
            numbers,
            inside,
            KV_HEADS,
            WIDTH,
            SLOTS,
        )


def rotary_and_store(
    qkv: Tensor,
    cos_sin: Tensor,
    inputs: StepInputs,
    kv: LayerKv | None,
    kind: AttentionKind,
    plan: object,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Norms and rotates q and k of qkv, which is overwritten; returns q [T, H, D], a view of it.
    With `kind.turned_first` rotation comes first. K and V go to `inputs.slots` of the layer's KV.
    The contract is `ops.RotaryAndStore`. Positions and slots are of any integer dtype."""
    heads, kv_heads, width = kind.heads, kind.kv_heads if kv is not None else 0, kind.width
    tokens, parts = qkv.shape[0], heads + 2 * kv_heads
    keys, values, scales, eight = (
        (qkv, qkv, None, 0) if kv is None else (kv.keys, kv.values, kv.scales, kv.eight)
    )
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous()
    if tokens:
        piece = min(_HEADS if tokens < _MANY else 64, next_power_of_2(parts))
        early = early_of(qkv.device, tokens * cdiv(parts, piece))
        half = next_power_of_2(width // 2)
        _rotary_and_store[(tokens, cdiv(parts, piece))](
            qkv,
            cos_sin,
            inputs.positions,
            inputs.slots,
            keys,
            values,
            cos_sin if scales is None else scales,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            eps,
            keys.stride(0),
            qkv.stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            WIDTH=width,
            HALF=half,
            SLOTS=BLOCK_SIZE,
            EIGHT=eight,
            Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None,
            WIDE=q_norm is not None and q_norm.dtype == torch.float32,
            EARLY=early,
            PIECE=piece,
            OF_V=next_power_of_2(max(1, kv_heads)),
            TURNED_FIRST=kind.turned_first,
            KEYS_AS_VALUES=kind.keys_as_values and kv is not None,
            V_NORM=kind.normed_values and kv is not None,
            num_warps=max(
                1, min(_WARPS if q_norm is None else _WARPS_OF_NORMS, piece * half // 128)
            ),
            launch_pdl=bool(early),
        )
    return qkv.unflatten(1, (-1, width))[:, :heads]

"""Fused kernels for a decode step with a single row. Norms, gate, rotary embedding and KV store are
computed inside the neighbouring products. A layer takes four launches. `norm_qkv` adds the
residual, norms, multiplies by qkv, rotates q and k and stores K and V; `one_row_attention.py` and
the output product by `linear_one` follow. `norm_gate` adds the residual, norms, multiplies by gate
and up and computes silu(gate) * up; the down product by `linear_one` follows.

With one row, a launch that waits for the previous one takes at least 1.6 to 2.8 us, and an unfused
layer needs ten. Every program computes the norm of the whole row itself, as the row is in the L1
cache. It loads its first weights before the previous kernel has ended, and rounds where the unfused
kernels round. K: hidden size, F: inner size of the MLP, H: query heads, Hkv: KV heads, D: numbers
of a head. Knows a row and matrices; no layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fixed_row import FixedRow
from penstock.kernels.fp8_rows import Form, Rows, wide
from penstock.kernels.inputs import StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton.attention.rotary_and_store import store_kv
from penstock.kernels.triton.elementwise.activation import both
from penstock.kernels.triton.elementwise.norm import add_rms_norm, rms_norm
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.linear.linear_four import lone_product
from penstock.kernels.triton.linear.linear_one import gate_one
from penstock.kernels.triton.linear.linear_small import SmallWeight
from penstock.kernels.triton.linear.stream_fp4 import Fp4Weight
from penstock.kernels.triton.linear.stream_groups import GroupMatrix, streamed_groups
from penstock.kernels.triton.pdl import has_pdl, release, wait

# Number of programs, and EARLY (see pdl.py), of `norm_qkv` and `norm_gate`. A forward pass of a
# model with 16 layers takes 0.682, 0.676, 0.670 and 0.692 ms with 384, 512, 768 and 1,536 qkv
# programs; 0.676, 0.670 and 0.682 ms with 2,048, 4,096 and 8,192 gate programs; 0.657 ms with 4,096
# gate programs whose EARLY is 2, which release the next kernel at once. QKV_EARLY must be 1, since
# attention reads data before its `wait`.
QKV_PROGRAMS, QKV_EARLY = 768, 1
GATE_PROGRAMS, GATE_EARLY = 4096, 2


@triton.jit
def _normed(x, residual, kept, by, k, inside, writes, eps, K: tl.constexpr, ADD: tl.constexpr):
    """Returns the RMS norm of the row x, rounded to x's dtype, as float32 [BK]. BK is K rounded up
    to a power of two. by: the norm's weight, already loaded, [BK]. k, inside: indices [BK] and the
    mask of those below K. ADD: True adds `residual` first, and stores the sum to `kept` if
    `writes`."""
    kind = x.dtype.element_ty
    row = tl.load(x + k, mask=inside, other=0.0)
    if ADD:
        row = (
            row.to(tl.float32) + tl.load(residual + k, mask=inside, other=0.0).to(tl.float32)
        ).to(kind)
        tl.store(kept + k, row, mask=inside & writes)
    full = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, axis=0) / K + eps)
    return ((full * scale).to(kind).to(tl.float32) * by.to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def _norm_gate(
    x,
    residual,
    kept,
    norm,
    weight,
    out,
    F,
    eps,
    PROGRAMS: tl.constexpr,
    EACH: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `norm_gate` for unquantized weights. Each of PROGRAMS programs computes up to EACH
    outputs, one after the other. BK: K rounded up to a power of two. x, residual, norm: [K]. kept:
    receives the sum of x and residual, if ADD. weight: [2F, K]. out: [F]. EARLY: see pdl.py."""
    release(EARLY)
    part = tl.program_id(0)
    k = tl.arange(0, BK)
    inside = k < K
    gate = weight + part.to(tl.int64) * K + k
    up = F.to(tl.int64) * K
    gates = tl.load(gate, mask=inside, other=0.0)
    ups = tl.load(gate + up, mask=inside, other=0.0)
    by = tl.load(norm + k, mask=inside, other=0.0)
    wait(EARLY)
    row = _normed(x, residual, kept, by, k, inside, part == 0, eps, K, ADD)
    kind = out.dtype.element_ty
    for turn in range(EACH):
        n = part + turn * PROGRAMS
        gate += PROGRAMS * K
        there = inside & (n + PROGRAMS < F)
        more_gates = tl.load(gate, mask=there, other=0.0)
        more_ups = tl.load(gate + up, mask=there, other=0.0)
        a, b = tl.reduce((gates.to(tl.float32) * row, ups.to(tl.float32) * row), 0, both)
        a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
        tl.store(out + n, (a / (1.0 + tl.exp(-a)) * b).to(kind), mask=n < F)
        gates, ups = more_gates, more_ups


def norm_gate(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: SmallWeight | GroupMatrix | Fp4Weight,
    form: Form = "wide",
) -> tuple[Rows, Tensor]:
    """Computes the norm of x + residual, its product with gate and up, and silu(gate) * up. Returns
    silu(gate) * up [1, F], quantized as `form` says if that is supported, and x + residual [1, K].

    x, residual: [1, K] (may be overwritten). norm: weight of the norm [K]. weight: prepared, [2F,
    K] (the gate's rows, then up's)."""
    if isinstance(weight, Fp4Weight):
        row, kept = _normed_row(x, residual, norm, eps, "fixed")
        assert isinstance(row, FixedRow)
        return lone_product(row, weight, gated=True, form=form), kept
    if isinstance(weight, GroupMatrix):
        normed, kept = _normed_row(x, residual, norm, eps, weight.form(1))
        if isinstance(normed, FixedRow):
            return lone_product(normed, weight, gated=True, form=form), kept
        return streamed_groups(wide(normed), weight, gated=True), kept
    if weight.scale is not None:
        normed, kept = _normed_row(x, residual, norm, eps, "wide")
        return gate_one(wide(normed), weight.weight, weight.scale), kept
    n, k = weight.weight.shape
    out, kept = _empty(x, n // 2), x if residual is None else torch.empty_like(x)
    early = GATE_EARLY * has_pdl(x.device)
    programs = min(GATE_PROGRAMS, n // 2)
    _norm_gate[(programs,)](
        x,
        x if residual is None else residual,
        kept,
        norm,
        weight.weight,
        out,
        n // 2,
        eps,
        PROGRAMS=programs,
        EACH=cdiv(n // 2, programs),
        K=k,
        BK=next_power_of_2(k),
        ADD=residual is not None,
        EARLY=early,
        num_warps=_warps(k),
        launch_pdl=bool(early),
    )
    return out, kept


def _normed_row(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, form: Form
) -> tuple[Rows, Tensor]:
    """Computes the norm of x + residual in a separate launch. Returns the norm [1, K] in the
    representation `form`, and x + residual [1, K].

    It is used for quantized weights. With them a fused program would load too few bytes at once:
    norm, gate and up of an 8B model with eight-bit weights take 42 us fused, and 32 us in two
    launches."""
    if residual is None:
        return rms_norm(x, norm, eps, form), x
    return add_rms_norm(x, residual, norm, eps, form)


@triton.jit
def _norm_qkv(
    x,
    residual,
    kept,
    norm,
    weight,
    bias,
    cos_sin,
    positions,
    slots,
    keys,
    q,
    eps,
    kv_stride,
    PROGRAMS: tl.constexpr,
    EACH: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `norm_qkv`. Each of PROGRAMS programs computes up to EACH pairs of outputs, one
    after the other. A pair is the two numbers of a head that rotate together. BK: K rounded up to a
    power of two. x, residual, norm: [K]. kept: receives the sum of x and residual, if ADD. weight:
    [(HEADS + 2 * KV_HEADS) * WIDTH, K]. keys: pointer to the layer's K and V. q: output [HEADS,
    WIDTH]. SLOTS: tokens of a KV block. EARLY: see pdl.py."""
    release(EARLY)
    HALF: tl.constexpr = WIDTH // 2
    PAIRS: tl.constexpr = (HEADS + 2 * KV_HEADS) * HALF
    part = tl.program_id(0)
    k = tl.arange(0, BK)
    inside = k < K
    first = weight + (part // HALF * WIDTH + part % HALF).to(tl.int64) * K + k
    of_a = tl.load(first, mask=inside, other=0.0)
    of_b = tl.load(first + HALF * K, mask=inside, other=0.0)
    by = tl.load(norm + k, mask=inside, other=0.0)
    wait(EARLY)
    table = cos_sin + tl.load(positions).to(tl.int64) * WIDTH
    slot = tl.load(slots).to(tl.int64)
    row = _normed(x, residual, kept, by, k, inside, part == 0, eps, K, ADD)
    kind = q.dtype.element_ty
    for turn in range(EACH):
        pair = part + turn * PROGRAMS
        real = pair < PAIRS
        more = pair + PROGRAMS
        there = inside & (more < PAIRS)
        first = weight + (more // HALF * WIDTH + more % HALF).to(tl.int64) * K + k
        more_a = tl.load(first, mask=there, other=0.0)
        more_b = tl.load(first + HALF * K, mask=there, other=0.0)
        a, b = tl.reduce((of_a.to(tl.float32) * row, of_b.to(tl.float32) * row), 0, both)
        head, lane = pair // HALF, pair % HALF
        at = head * WIDTH + lane
        if HAS_BIAS:
            a += tl.load(bias + at, mask=real, other=0.0).to(tl.float32)
            b += tl.load(bias + at + HALF, mask=real, other=0.0).to(tl.float32)
        a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
        cos, sin = tl.load(table + lane), tl.load(table + HALF + lane)
        is_v = head >= HEADS + KV_HEADS
        one = tl.where(is_v, a, a * cos - b * sin).to(kind)
        other = tl.where(is_v, b, b * cos + a * sin).to(kind)
        kv_head = head - HEADS - tl.where(is_v, 1, 0) * KV_HEADS
        stored = real & (head >= HEADS)
        is_q = head < HEADS
        tl.store(q + at, one, mask=is_q)
        tl.store(q + at + HALF, other, mask=is_q)
        store_kv(
            keys, keys, slot, kv_stride, kv_head, is_v, lane, one, stored, KV_HEADS, WIDTH, SLOTS, 0
        )
        store_kv(
            keys,
            keys,
            slot,
            kv_stride,
            kv_head,
            is_v,
            lane + HALF,
            other,
            stored,
            KV_HEADS,
            WIDTH,
            SLOTS,
            0,
        )
        of_a, of_b = more_a, more_b


def norm_qkv(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: SmallWeight,
    bias: Tensor | None,
    cos_sin: Tensor,
    inputs: StepInputs,
    kv: LayerKv,
    heads: int,
    kv_heads: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Computes the norm of x + residual, its product with qkv, and the rotation of q and k; stores
    K and V at `inputs.slots`. Returns the rotated q [1, H, D] and x + residual [1, K].

    x, residual: [1, K]. norm: weight of the norm [K]. weight: prepared and unquantized, [(H + 2
    Hkv) * D, K]. The layer's KV must be unquantized too. heads, kv_heads, width: H, Hkv, D.
    Rotation as in `rotary_and_store.py`."""
    n, k = weight.weight.shape
    q, kept = _empty(x, heads, width), x if residual is None else torch.empty_like(x)
    early = QKV_EARLY * has_pdl(x.device)
    programs = min(QKV_PROGRAMS, n // 2)
    _norm_qkv[(programs,)](
        x,
        x if residual is None else residual,
        kept,
        norm,
        weight.weight,
        x if bias is None else bias,
        cos_sin,
        inputs.positions,
        inputs.slots,
        kv.keys,
        q,
        eps,
        kv.keys.stride(0),
        PROGRAMS=programs,
        EACH=cdiv(n // 2, programs),
        K=k,
        BK=next_power_of_2(k),
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        SLOTS=BLOCK_SIZE,
        ADD=residual is not None,
        HAS_BIAS=bias is not None,
        EARLY=early,
        num_warps=_warps(k),
        launch_pdl=bool(early),
    )
    return q, kept


def _warps(k: int) -> int:
    return max(1, min(8, next_power_of_2(k) // 512))


def _empty(x: Tensor, *shape: int) -> Tensor:
    return torch.empty((1, *shape), dtype=x.dtype, device=x.device)

"""Attention of a single row, in one launch. Several programs share the row's tokens, and the last
program of each KV head joins their results.

A program loads data that earlier steps wrote (the row's length, blocks, K and V) and angles before
the previous kernel ends. Only the query and the new token's K and V have to wait for it.
`rotate_and_attend_one` takes the output of the qkv product: each program rotates the queries
itself, and the one with the new token rotates and stores K and V. H: query heads, Hkv: KV heads, D:
numbers of a head. Knows a row and its blocks; no layer."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.fixed_row import FIXED, empty_fixed
from penstock.kernels.fp8_rows import Form, Rows, wide
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton.attention.decode import least_queries
from penstock.kernels.triton.attention.flash_loop import (
    LOG2_E,
)
from penstock.kernels.triton.attention.one_row_attention_kernel import EARLY, JOINED, _attend_one
from penstock.kernels.triton.grid import next_power_of_2, precision_of
from penstock.kernels.triton.linear.fp8 import pointers
from penstock.kernels.triton.pdl import has_pdl

PARTS = 16  # the most programs that share a row and KV head
TOKENS = 64  # tokens of a tile; a program has at least one tile


def attend_one(
    q: Tensor,
    kv: LayerKv,
    inputs: StepInputs,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Computes attention of rotated q [1, H, D] over a layer's KV; returns [1, H, D]. inputs.decode
    has the row, which has no prefix group. It sees length + 1 tokens, of which the newest is
    already stored; with a window, the last `window` of them."""
    assert q.stride()[1:] == (q.shape[2], 1)
    out = _launch(q, None, kv, inputs, q.shape[1], q.shape[2], scale, window, sinks, softcap, False)
    return wide(out)


def rotate_and_attend_one(
    qkv: Tensor,
    cos_sin: Tensor,
    kv: LayerKv,
    inputs: StepInputs,
    kind: AttentionKind,
    sinks: Tensor | None = None,
    form: Form = "wide",
) -> Rows:
    """Computes `rotary_and_store` and `attend_one` in one launch. qkv: [1, (H + 2 Hkv) * D], the
    output of the qkv product. Returns [1, H * D], quantized as `form` says."""
    assert qkv.is_contiguous() and cos_sin.is_contiguous()
    fixed = form == "fixed" and kind.width % FIXED == 0
    out = _launch(
        qkv,
        cos_sin,
        kv,
        inputs,
        kind.heads,
        kind.width,
        kind.scale,
        kind.window,
        sinks,
        kind.softcap,
        fixed,
    )
    return out.view(1, -1) if isinstance(out, Tensor) else out


def _launch(
    q: Tensor,
    cos_sin: Tensor | None,
    kv: LayerKv,
    inputs: StepInputs,
    heads: int,
    width: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    fixed: bool,
) -> Rows:
    decode = inputs.decode
    assert decode is not None and decode.groups is None
    kv_heads, device = kv.kv_heads, q.device
    part = torch.empty((heads, PARTS, width), dtype=torch.float32, device=device)
    lse = torch.empty((heads, PARTS), dtype=torch.float32, device=device)
    out = (
        empty_fixed(heads * width, device)
        if fixed
        else torch.empty((1, heads, width), dtype=q.dtype, device=device)
    )
    can = has_pdl(device)
    width_pad = max(16, next_power_of_2(width))
    columns = next_power_of_2(heads // kv_heads) * width_pad
    where = (lse, lse, lse) if cos_sin is None else (cos_sin, inputs.positions, inputs.slots)
    _attend_one[(kv_heads, PARTS)](
        q,
        *where,
        kv.keys,
        kv.values,
        lse if kv.scales is None else kv.scales,
        lse if sinks is None else sinks,
        part,
        lse,
        kv.arrived,
        *pointers(out),
        decode.table,
        decode.rows,
        decode.length,
        decode.table.shape[1] * 16,
        window or 0,
        scale * LOG2_E,
        (softcap or 1.0) * LOG2_E,
        kv.keys.stride(0),
        decode.table.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        WIDTH_PAD=width_pad,
        RATIO_PAD=least_queries(heads // kv_heads, kv),
        RAW=cos_sin is not None,
        WINDOWED=window is not None,
        TOKENS=TOKENS if width <= 128 else TOKENS // 2,
        PARTS=PARTS,
        COLUMNS=columns,
        AT_ONCE=max(1, min(PARTS, JOINED // columns)),
        SINKS=sinks is not None,
        CAPPED=softcap is not None,
        EIGHT=kv.eight,
        FIXED=fixed,
        PRECISION=precision_of(q.dtype, width),
        EARLY=EARLY * can,
        num_warps=4,
        num_stages=2,
        launch_pdl=bool(can),
    )
    return out

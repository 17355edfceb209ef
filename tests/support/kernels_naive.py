"""The kernels' contracts in float64, one row and one head at a time, and cases to hold the kernels
against.

Nothing here is shared with the kernels but the shapes: a mistake in one does not hide in the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.inputs import (
    AttentionKind,
    ChunkSight,
    DecodeInputs,
    GroupInputs,
    PrefillInputs,
    StepInputs,
)
from penstock.kernels.layer_kv import KvForm, LayerKv


def tolerance(dtype: torch.dtype) -> float:
    """Largest error beside the fp64 answer, as a share of the answer's scale: a few roundings of
    the dtype."""
    return {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]


def assert_close(got: Tensor, want: Tensor, factor: float = 1.0) -> None:
    """Every element of `got` is within the dtype's tolerance of the fp64 `want`, by want's own
    scale."""
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    error = (got.double() - want).abs().max().item() if got.numel() else 0.0
    scale = want.abs().max().item() if want.numel() else 1.0
    assert error <= factor * tolerance(got.dtype) * max(scale, 1e-3), (error, scale)


def naive_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return weight.double() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def naive_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [D] as D / 2 complex numbers (first half real, second imaginary), turned."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[:half], x[half:]) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag])


def stored(kv: Tensor, table: Tensor, positions: Tensor, kv_head: int, part: int) -> Tensor:
    return kv[table[positions // 16].long(), kv_head, part, positions % 16].double()


def naive_attention_one(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    position: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """q [H, D] of the query at `position` over the tokens that it sees, and sinks [H] -> [H, D],
    fp64."""
    heads, kv_heads = q.shape[0], kv.shape[1]
    seen = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
    out = []
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = stored(kv, table, seen, kv_head, 0) @ q[head].double() * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        weights = torch.exp(scores - scores.max())
        sunk = 0.0 if sinks is None else torch.exp(sinks[head].double() - scores.max())
        out.append((weights / (weights.sum() + sunk)) @ stored(kv, table, seen, kv_head, 1))
    return torch.stack(out)


def in_form(kv: Tensor, eight: int, dtype: torch.dtype, device: str | None = None) -> LayerKv:
    """Empty KV of kv's shape [blocks, Hkv, 2, 16, D] with 0 nothing, 1 V, 2 K and V in eight bits,
    the rest of `dtype`. No two scales are alike, and none is a power of two."""
    blocks, kv_heads, _, _, width = kv.shape
    at = device or kv.device
    scales = 0.013 * (
        1 + torch.arange(2 * kv_heads, dtype=torch.float32, device=at).view(2, -1) / 3
    )
    scales[0] = scales[0] if eight == 2 else 1.0
    e4m3 = torch.float8_e4m3fn
    form = KvForm(
        kv_heads,
        width,
        e4m3 if eight == 2 else dtype,
        e4m3 if eight else dtype,
        scales if eight else None,
    )
    return form.over(torch.zeros(blocks, kv_heads, form.head_bytes, dtype=torch.uint8, device=at))


def stored_in(kv: Tensor, eight: int) -> LayerKv:
    """kv [blocks, Hkv, 2, 16, D] stored in such a form."""
    made = in_form(kv, eight, kv.dtype)
    for part, (to, wide) in enumerate(zip((made.keys, made.values), kv.unbind(2), strict=True)):
        if to.dtype != kv.dtype:
            wide = rounded(wide, made.scales[part, :, None, None])
        if to.dim() == 5:
            wide = wide.unflatten(2, (2, 8)).mT
        to.view(torch.uint8).copy_(wide.contiguous().view(torch.uint8))
    return made


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """What is stored of x in eight bits."""
    return (x.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)


def worth(kv: LayerKv) -> Tensor:
    """All of it, [blocks, Hkv, 2, 16, D] float64."""
    parts = [part.double() for part in (kv.keys, kv.values)]
    parts[1] = parts[1].mT.flatten(2, 3) if kv.values.dim() == 5 else parts[1]
    if kv.scales is not None:
        parts = [
            part * scale.double()[:, None, None]
            for part, scale in zip(parts, kv.scales, strict=True)
        ]
    return torch.stack(parts, 2)


@dataclass
class Case:
    """A step: its queries, its cache, its inputs, and where each token stands."""

    q: Tensor
    kv: Tensor
    inputs: StepInputs
    tables: list[Tensor]  # of each token
    positions: list[int]  # of each token
    scale: float

    def naive(
        self, window: int | None = None, only: list[int] | None = None, **more: Any
    ) -> Tensor:
        """more: sinks, softcap."""
        tokens = range(len(self.positions)) if only is None else only
        told = (
            (self.q[t], self.kv, self.tables[t], self.positions[t], self.scale, window)
            for t in tokens
        )
        return torch.stack([naive_attention_one(*each, **more) for each in told])


def make_case(
    lengths: list[int],
    groups: list[tuple[int, int]] = [],  # noqa: B006
    chunks: list[tuple[int, int]] = [],  # noqa: B006
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    extra_width: int = 0,
    loud: float = 1.0,
) -> Case:
    """Rows that attend to `lengths` tokens each; groups of (members, prefix length) take rows from
    the front; chunks of (context, tokens). Tables point at blocks scattered over the pool; scratch
    and free blocks hold huge numbers.
    """
    rng = torch.Generator().manual_seed(seed)
    tables, skip, group_start, group_tables = _tables(lengths, groups, chunks, rng)
    pool = 1 + max((int(t.max()) for t in tables + group_tables if len(t)), default=0) + 3
    kv = torch.randn(pool, kv_heads, 2, 16, width, generator=rng).to(dtype)
    kv[0] = 1e4  # the scratch block: anything may be there, and nobody may see it
    kv[-3:] = -1e4
    rows = len(lengths)
    tokens = rows + sum(n for _, n in chunks)
    q = (torch.randn(tokens, heads, width, generator=rng) * loud).to(dtype)
    decode = _decode_inputs(
        lengths, skip, tables[:rows], groups, group_start, group_tables, extra_width
    )
    prefill = _prefill_inputs(chunks, tables[rows:], extra_width)
    token_tables = list(tables[:rows])
    positions = [n - 1 for n in lengths]
    for (context, count), table in zip(chunks, tables[rows:], strict=True):
        token_tables += [table] * count
        positions += range(context, context + count)
    slots = [int(t[p // 16]) * 16 + p % 16 for t, p in zip(token_tables, positions, strict=True)]
    inputs = StepInputs(
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        rows=rows,
        decode=decode,
        prefill=prefill,
    )
    return Case(q, kv, inputs, token_tables, positions, 1 / math.sqrt(width))


def _tables(
    lengths: list[int],
    groups: list[tuple[int, int]],
    chunks: list[tuple[int, int]],
    rng: torch.Generator,
) -> tuple[list[Tensor], list[int], list[int], list[Tensor]]:
    """Block tables of rows then chunks, what rows skip, group starts, groups' tables. Block 0 is
    the scratch block."""
    totals = [*lengths, *(c + n for c, n in chunks)]
    shared: list[tuple[int, int]] = []  # group, prefix blocks: of each row
    start = [0]
    for group, (members, prefix) in enumerate(groups):
        shared += [(group, prefix // 16)] * members
        start.append(start[-1] + members)
    shared += [(-1, 0)] * (len(totals) - len(shared))
    need = sum(p // 16 for _, p in groups) + sum(
        -(-t // 16) - s for t, (_, s) in zip(totals, shared, strict=True)
    )
    free = (torch.randperm(need + need // 4 + 4, generator=rng) + 1).tolist()
    group_tables = [
        torch.tensor([free.pop() for _ in range(p // 16)], dtype=torch.int32) for _, p in groups
    ]
    tables = []
    for total, (group, blocks) in zip(totals, shared, strict=True):
        own = torch.tensor([free.pop() for _ in range(-(-total // 16) - blocks)], dtype=torch.int32)
        tables.append(torch.cat([group_tables[group], own]) if group >= 0 else own)
    return tables, [16 * blocks for _, blocks in shared[: len(lengths)]], start, group_tables


def padded(tables: list[Tensor], extra: int) -> Tensor:
    out = torch.zeros(len(tables), max(map(len, tables), default=0) + extra, dtype=torch.int32)
    for row, table in enumerate(tables):
        out[row, : len(table)] = table
    return out


def _decode_inputs(
    lengths: list[int],
    skip: list[int],
    tables: list[Tensor],
    groups: list[tuple[int, int]],
    start: list[int],
    group_tables: list[Tensor],
    extra: int,
) -> DecodeInputs | None:
    if not lengths:
        return None
    return DecodeInputs(
        rows=torch.arange(len(lengths), dtype=torch.int32),
        position=torch.tensor(lengths) - 1,
        table=padded(tables, extra),
        length=torch.tensor(lengths, dtype=torch.int32) - 1,
        skip=torch.tensor(skip, dtype=torch.int32),
        max_own=max(n - s for n, s in zip(lengths, skip, strict=True)),
        groups=GroupInputs(
            start=torch.tensor(start, dtype=torch.int32),
            blocks=padded(group_tables, extra),
            length=torch.tensor([p for _, p in groups], dtype=torch.int32),
        )
        if groups
        else None,
    )


def _prefill_inputs(
    chunks: list[tuple[int, int]], tables: list[Tensor], extra: int
) -> PrefillInputs | None:
    if not chunks:
        return None
    start = [0]
    for _, count in chunks:
        start.append(start[-1] + count)
    return PrefillInputs(
        start=torch.tensor(start, dtype=torch.int32),
        context=torch.tensor([c for c, _ in chunks], dtype=torch.int32),
        block_table=padded(tables, extra),
        seen=ChunkSight.of(np.diff(start), np.array([c for c, _ in chunks])),
    )


def kind_of(
    heads: int, kv_heads: int, width: int, scale: float, window: int | None = None
) -> AttentionKind:
    return AttentionKind(heads, kv_heads, width, 0, window, scale)


def attend(
    column: Any,
    q: Tensor,
    kv: Tensor | LayerKv,
    inputs: StepInputs,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One layer's attention by a column (an Ops, or a module with `plan` and `attention`), planned
    for it alone.

    kv: [blocks, Hkv, 2, 16, D], or in any form."""
    kv = LayerKv.plain(kv) if isinstance(kv, Tensor) else kv
    kind = replace(kind_of(q.shape[1], kv.kv_heads, q.shape[2], scale, window), softcap=softcap)
    # the GPU's plan turns nothing, and may be captured
    reads = inputs.positions.numel() and not q.is_cuda
    most = int(inputs.positions.max()) + 1 if reads else 1
    turned = torch.zeros(most, 2, q.shape[2] // 2, device=q.device)
    return column.attention(q, kv, inputs, kind, column.plan(inputs, kind, turned, q.dtype), sinks)


def rotate(
    column: Any,
    qkv: Tensor,
    cos_sin: Tensor,
    inputs: StepInputs,
    kv: Tensor | LayerKv | None,
    heads: int,
    kv_heads: int,
    width: int,
    *norms: Any,
    **switches: bool,
) -> Tensor:
    """`rotary_and_store` by a column; norms: q's, k's, eps. kv: as `attend` takes it. switches: the
    kind's."""
    kv = LayerKv.plain(kv) if isinstance(kv, Tensor) else kv
    kind = replace(kind_of(heads, kv_heads, width, 1.0), **switches)
    plan = column.plan(inputs, kind, cos_sin, qkv.dtype) if hasattr(column, "plan") else None
    return column.rotary_and_store(qkv, cos_sin, inputs, kv, kind, plan, *norms)

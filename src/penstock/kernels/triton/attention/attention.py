"""Attention over the paged KV cache. It launches three kernels as a step needs them: for the shared
prefixes of prefix groups (prefix.py), for decode queries, which continue from their group's result
(decode.py), and for chunks of prompts (prefill.py).

Reads nothing from the device on the host, so the launches of a step can be captured as a graph. T:
a step's tokens, H: query heads, D: numbers of a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import AttentionKind, DecodeInputs, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton.attention.decode import attend_rows
from penstock.kernels.triton.attention.latent_chunks import Room, Seen
from penstock.kernels.triton.attention.one_row_attention import attend_one
from penstock.kernels.triton.attention.prefill import attend_chunks
from penstock.kernels.triton.attention.prefix import PrefixState, attend_prefixes
from penstock.kernels.triton.attention.row_parts import FEW_PROGRAMS


@dataclass(slots=True)
class KindPlan:
    """Decode queries and buffers that all layers of one AttentionKind share in a step. prefix:
    buffers for the results of shared prefixes. The first layer that makes keys and values from
    latents sets the others. room: where they are made. chunks, prefixes: the latents that chunks
    and prefix groups see."""

    decode: DecodeInputs | None
    prefix: PrefixState | None
    room: Room | None = None
    chunks: Seen | None = None
    prefixes: Seen | None = None


def plan(inputs: StepInputs, kind: AttentionKind, cos_sin: Tensor, dtype: torch.dtype) -> KindPlan:
    """Makes the plan of a step for one AttentionKind;
    allocates the buffers that its layers share."""
    decode = inputs.decode_for(kind.window) if inputs.rows else None
    groups, prefix = None if decode is None else decode.groups, None
    if groups is not None and (kind.latent is None or groups.expanded is None):
        shape, device = (
            (inputs.rows, kind.heads, kind.value_width or kind.width),
            inputs.positions.device,
        )
        prefix = PrefixState.of(shape, dtype, device, kind.kv_heads, groups.length.shape[0])
    return KindPlan(decode, prefix)


def attention(
    q: Tensor,
    kv: LayerKv,
    inputs: StepInputs,
    kind: AttentionKind,
    plan: KindPlan,
    sinks: Tensor | None = None,
    *,
    few_programs: int = FEW_PROGRAMS,
) -> Tensor:
    """Computes attention of q [T, H, D] over a layer's KV; returns [T, H, D]. The contract is
    `ops.Attention`. few_programs: see kernels/tunables.py."""
    if q.stride()[1:] != (q.shape[2], 1):
        # no copy is made for a view of a fused product, whose heads are adjacent
        q = q.contiguous()
    if inputs.is_one_row:
        return attend_one(q, kv, inputs, kind.scale, kind.window, sinks, kind.softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows, scale, window = inputs.rows, kind.scale, kind.window
    if (decode := plan.decode) is not None:
        if (groups := decode.groups) is not None and plan.prefix is not None:
            attend_prefixes(
                q[:rows],
                kv,
                groups.start,
                groups.blocks,
                groups.length,
                scale,
                plan.prefix,
                kind.softcap,
            )
        attend_rows(
            q[:rows],
            kv,
            decode.rows,
            decode.table,
            decode.position,
            decode.skip,
            plan.prefix,
            scale,
            window,
            decode.max_own,
            out[:rows],
            few_programs,
            sinks,
            kind.softcap,
        )
    if inputs.prefill is not None and q.shape[0] > rows:
        chunks = inputs.prefill
        attend_chunks(
            q[rows:],
            kv,
            chunks.start,
            chunks.context,
            chunks.block_table,
            scale,
            window,
            out[rows:],
            sinks,
            kind.softcap,
        )
    return out

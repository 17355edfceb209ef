"""Attention over the paged cache: prefixes of groups, decode rows carried on from them, then chunks.

It knows the step's inputs and takes them apart for the kernels; it computes nothing. Nothing here reads the device, so
the launches of a step can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import AttentionInputs, DecodeInputs
from penstock.kernels.triton.decode import attend_rows
from penstock.kernels.triton.prefill import attend_chunks
from penstock.kernels.triton.prefix import PrefixState, attend_prefixes


def attention(q: Tensor, kv: Tensor, inputs: AttentionInputs, scale: float, window: int | None = None) -> Tensor:
    """q [T, H, D] over kv [blocks, Hkv, 2, 16, D] -> [T, H, D]. The contract is `ops.Attention`."""
    if q.stride()[1:] != (q.shape[2], 1):
        q = q.contiguous()  # a view of a fused product has its heads side by side already
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = inputs.rows
    if inputs.decode is not None and rows:
        _decode(q[:rows], kv, inputs, inputs.decode, scale, window, out[:rows])
    if inputs.prefill is not None and q.shape[0] > rows:
        chunks = inputs.prefill
        attend_chunks(q[rows:], kv, chunks.start, chunks.context, chunks.block_table, scale, window, out[rows:])
    return out


def _decode(
    q: Tensor, kv: Tensor, inputs: AttentionInputs, decode: DecodeInputs, scale: float, window: int | None, out: Tensor
) -> None:
    prefix = None
    if decode.groups is not None:
        if window is not None:
            raise ValueError("prefix groups cannot be attended with a sliding window: send the rows alone")
        groups = decode.groups
        prefix = _prefix_state(q, kv.shape[1], groups.length.shape[0], inputs)
        attend_prefixes(q, kv, groups.start, groups.blocks, groups.length, scale, prefix)
    rows, table, length = decode.rows, decode.table, decode.length
    attend_rows(q, kv, rows, table, length, decode.skip, prefix, scale, window, decode.max_own, out)


def _prefix_state(q: Tensor, kv_heads: int, groups: int, inputs: AttentionInputs) -> PrefixState:
    """One buffer for all layers of a step."""
    key = ("triton prefix", q.shape)
    if key not in inputs.notes:
        inputs.notes[key] = PrefixState.of(q, kv_heads, groups)
    state: PrefixState = inputs.notes[key]
    return state

"""Attention over the paged cache in plain torch: decode rows with their prefix groups (decode.py), then chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import AttentionInputs
from penstock.kernels.reference.decode import attend_rows, plan_decode
from penstock.kernels.reference.prefill import attend_chunks


def attention(q: Tensor, kv: Tensor, inputs: AttentionInputs, scale: float, window: int | None = None) -> Tensor:
    """q [T, H, D] over kv [blocks, Hkv, 2, 16, D] -> [T, H, D]. The contract is `ops.Attention`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = inputs.rows
    if inputs.decode is not None and rows:
        key = ("decode", window, q.shape[1], kv.shape[1])
        if key not in inputs.notes:
            inputs.notes[key] = plan_decode(inputs.decode, q, kv, window)
        attend_rows(q[:rows], kv, inputs.notes[key], scale, out[:rows])
    if inputs.prefill is not None:
        attend_chunks(q[rows:], kv, inputs.prefill, scale, window, out[rows:])
    return out

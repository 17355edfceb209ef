"""Mixtures of experts in plain torch: which experts a token goes to, and what they make of it."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.reference.activation import silu_mul


def route(scores: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """scores [T, E] -> the softmax of the k best [T, k] float32, and which experts those are [T, k] int64.

    renormalise: a token's k weights add up to 1.
    """
    weights, experts = torch.softmax(scores.float(), -1).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), experts


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, d], weights, chosen [T, k], gate_up [E, 2F, d], down [E, d, F] -> sum of weight * expert(x), [T, d].

    Sums are float32. On a GPU every expert takes every token, and where one wasn't chosen its weight is 0: nothing is
    asked of the device, so that a step can be captured.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        mine = torch.where(chosen == expert, weights, 0.0).sum(-1)
        rows = mine.nonzero()[:, 0] if x.device.type == "cpu" else None
        if rows is not None and not rows.shape[0]:
            continue
        taken = x if rows is None else x.index_select(0, rows)
        made = silu_mul(taken @ gate_up[expert].T) @ down[expert].T
        if rows is None:
            out.addcmul_(made.float(), mine[:, None])
        else:
            out.index_add_(0, rows, made.float() * mine[rows, None])
    return out.to(x.dtype)

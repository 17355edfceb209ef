"""Mixtures of experts in plain torch: which experts a token goes to, and what they make of it."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.expert_matrix import ExpertMatrix, Experts
from penstock.kernels.reference.activation import silu_mul


def route(scores: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """scores [T, E] -> the softmax of the k best [T, k] float32, and which experts those are [T, k] int64: the best
    first, of equals the one with the lower number.

    renormalise: a token's k weights add up to 1.
    """
    weights = torch.softmax(scores.float(), -1)
    experts = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = weights.gather(1, experts)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), experts


def prepare_experts(experts: Experts) -> Experts:
    """Returns what `experts` takes: here they stay as they are."""
    return experts


def experts(x: Tensor, scores: Tensor, of: Experts) -> Tensor:
    """x [T, d], the router's scores [T, E] -> sum of weight * expert(x), [T, d].

    Sums are float32. On a GPU every expert takes every token, and where one wasn't chosen its weight is 0: nothing is
    asked of the device, so that a step can be captured.
    """
    weights, chosen = route(scores, of.top_k, of.renormalise)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(of.shape[0]):
        mine = torch.where(chosen == expert, weights, 0.0).sum(-1)
        rows = mine.nonzero()[:, 0] if x.device.type == "cpu" else None
        if rows is not None and not rows.shape[0]:
            continue
        taken = x if rows is None else x.index_select(0, rows)
        gate_up = _product(taken, of.gate_up, expert)
        middle = silu_mul(gate_up) if of.clamp is None else _clamped(gate_up, *of.clamp)
        made = _product(middle, of.down, expert)
        if rows is None:
            out.addcmul_(made.float(), mine[:, None])
        else:
            out.index_add_(0, rows, made.float() * mine[rows, None])
    return out.to(x.dtype)


def _product(x: Tensor, matrix: ExpertMatrix, expert: int) -> Tensor:
    """x [T, K] by an expert's matrix -> [T, N] of x's dtype. A row's scale comes behind its product."""
    if matrix.by_group or matrix.in_fp4 or matrix.integers:
        made = (x.float() @ matrix.widened(expert).T).to(x.dtype)
    else:
        made = x @ matrix.numbers[expert].to(x.dtype).T
        made = made if matrix.scale is None else (made.float() * matrix.scale[expert]).to(x.dtype)
    return made if matrix.bias is None else made.add_(matrix.bias[expert])


def _clamped(gate_up: Tensor, slope: float, most: float) -> Tensor:
    """gate_up [T, 2F] -> [T, F]: `Experts.clamp`. float32 inside."""
    gate, up = gate_up.float().chunk(2, -1)
    gate, up = gate.clamp(max=most), up.clamp(-most, most)
    return (gate * torch.sigmoid(gate * slope) * (up + 1)).to(gate_up.dtype)

"""Mixtures of experts in plain torch. T: tokens, E: experts, k: experts per token, d: hidden size,
F: inner size of an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.expert_matrix import ExpertMatrix, Experts, SharedOutput
from penstock.kernels.fp8_rows import wide
from penstock.kernels.reference.elementwise.activation import add_opened, gelu_mul, relu2, silu_mul
from penstock.kernels.routing import Routing


def route(scores: Tensor, by: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the weights of each token's k experts [T, k] float32 and the experts' numbers [T, k]
    int64, the best expert first; of equally good ones, the lower number. scores: [T, E].
    correction: see `Experts.correction`."""
    scores = scores.float()
    worth = torch.sigmoid(scores) if by.sigmoid else torch.softmax(scores, -1)
    # without correction and groups, experts are chosen by scores: sigmoid or softmax may round
    # different scores to equal values
    plain = correction is None and by.groups == 1
    choice = scores if plain else worth if correction is None else worth + correction
    if by.groups > 1:
        choice = _in_groups(choice, by)
    experts = _best(choice, by.top_k)
    weights = worth.gather(1, experts)
    if by.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True).clamp(min=by.least) + by.added)
    return weights * by.scale, experts


def _in_groups(choice: Tensor, by: Routing) -> Tensor:
    """Returns choice [T, E], the values by which experts are chosen, with -inf for experts whose
    group the token doesn't use."""
    grouped = choice.unflatten(1, (by.groups, -1))
    kept = _best(grouped.topk(2 if by.paired else 1, dim=-1).values.sum(-1), by.kept_groups)
    out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(
        1, kept, False
    )
    return grouped.masked_fill(out[..., None], float("-inf")).flatten(1)


def _best(values: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` largest values of each row, in falling order; equal values
    in order of their indices."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def prepare_experts(experts: Experts) -> Experts:
    """Returns the experts unchanged."""
    return experts


def experts(x: Tensor, scores: Tensor, of: Experts, shared: SharedOutput | None = None) -> Tensor:
    """Returns the sum of weight * expert(x), [T, d], summed in float32, plus the output of a shared
    expert. x: [T, d]. scores: the router's scores [T, E].

    On a GPU every expert processes every token, with weight 0 if it wasn't chosen. So the host
    doesn't wait for data from the device, and a step can be captured as a graph."""
    weights, chosen = route(scores, of.routing, of.correction)
    if of.answer_scale is not None:
        weights = weights * of.answer_scale[chosen]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(of.shape[0]):
        mine = torch.where(chosen == expert, weights, 0.0).sum(-1)
        rows = mine.nonzero()[:, 0] if x.device.type == "cpu" else None
        if rows is not None and not rows.shape[0]:
            continue
        taken = x if rows is None else x.index_select(0, rows)
        made = _product(_middle(_product(taken, of.gate_up, expert), of), of.down, expert)
        if rows is None:
            out.addcmul_(made.float(), mine[:, None])
        else:
            out.index_add_(0, rows, made.float() * mine[rows, None])
    if shared is None:
        return out.to(x.dtype)
    return add_opened(out.to(x.dtype), shared.made(), x, shared.gate, shared.scale)


def _product(x: Tensor, matrix: ExpertMatrix, expert: int) -> Tensor:
    """Multiplies x [T, K] by an expert's matrix [N, K]: [T, N] in x's dtype. If a row of the matrix
    has one scale, it is applied after the product."""
    if matrix.by_group or matrix.in_fp4 or matrix.integers:
        made = (x.float() @ matrix.widened(expert).T).to(x.dtype)
    else:
        made = x @ matrix.numbers[expert].to(x.dtype).T
        made = made if matrix.scale is None else (made.float() * matrix.scale[expert]).to(x.dtype)
    return made if matrix.bias is None else made.add_(matrix.bias[expert])


def _middle(gate_up: Tensor, of: Experts) -> Tensor:
    """Returns the activation of an expert, [T, F], the input of its down matrix. gate_up: [T, 2F],
    or [T, F] without a gate."""
    if of.clamp is not None:
        return _clamped(gate_up, *of.clamp)
    return wide({"silu": silu_mul, "gelu_tanh": gelu_mul, "none": relu2}[of.gate](gate_up))


def _clamped(gate_up: Tensor, slope: float, most: float) -> Tensor:
    """Returns the clamped activation [T, F] of gate_up [T, 2F], computed in float32. slope, most:
    the two numbers of `Experts.clamp`."""
    gate, up = gate_up.float().chunk(2, -1)
    gate, up = gate.clamp(max=most), up.clamp(-most, most)
    return (gate * torch.sigmoid(gate * slope) * (up + 1)).to(gate_up.dtype)

"""Mamba2's recurrence in plain torch, in float32. Decode rows are computed one token at a time,
chunks of prompts in blocks of 64 tokens by the dual form.

In a block, S0 is the state before it and G[i] the sum of dt * a up to token i. Token i's output has
S0 with the factor exp(G[i]), and what token j added to the state with the factor exp(G[i] - G[j])
(arXiv:2405.21060, section 6).

T: a step's tokens, R: decode rows, n: tokens of a block, H: heads, P: numbers of a head, N: width
of the state."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.inputs import StateInputs, StepInputs
from penstock.kernels.mamba2 import Mamba2Heads, Mamba2Weights
from penstock.kernels.reference.elementwise.activation import over_sigmoid
from penstock.kernels.reference.linear.fp8 import in_form
from penstock.kernels.reference.recurrent.delta_rule import BLOCK, softplus
from penstock.kernels.reference.recurrent.short_conv import convolved


def mamba2(
    given: Tensor,
    heads: Mamba2Heads,
    weights: Mamba2Weights,
    window: Tensor,
    matrix: Tensor,
    inputs: StepInputs,
) -> Tensor:
    """Returns [T, size]. given: [T, columns]: z, x, B, C, dt. window: [slots, taps, channels].
    matrix: [slots, heads, state_width, head_width]. The contract is `ops.Mamba2Scan`."""
    h, states, rows = heads, inputs.states, inputs.rows
    assert states is not None, "a layer with a recurrent matrix has slots"
    came = given[:, h.size : h.size + h.channels]
    mixed = convolved(came, weights.taps, weights.taps_bias, window, inputs)
    mixed = over_sigmoid(mixed, mixed).to(given.dtype).float()
    x, b, c = mixed.split((h.size, h.group_size, h.group_size), dim=1)
    x = x.view(-1, h.heads, h.head_width)
    b, c = (
        each.view(-1, h.groups, h.state_width).repeat_interleave(h.heads // h.groups, 1)
        for each in (b, c)
    )
    dt = softplus(given[:, h.columns - h.heads :].float() + weights.step_bias)
    decay = dt * weights.a  # logarithm of the decay
    out = torch.empty_like(x)
    if rows:
        out[:rows] = _rows(x[:rows], b[:rows], c[:rows], dt[:rows], decay[:rows], matrix, states)
    if inputs.prefill is not None:
        start = (inputs.prefill.start + rows).tolist()
        for chunk, slot in enumerate(states.chunk_slots.tolist()):
            state, last = matrix[slot].float(), start[chunk + 1]
            for first in range(start[chunk], last, BLOCK):
                at = slice(first, min(first + BLOCK, last))
                out[at], state = _block(x[at], b[at], c[at], dt[at], decay[at], state)
            if start[chunk] < last:
                matrix[slot] = state.to(matrix.dtype)
    return (out + weights.skip[:, None] * x).to(given.dtype).flatten(1)


def _rows(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, decay: Tensor, matrix: Tensor, states: StateInputs
) -> Tensor:
    """Returns the outputs of decode rows, [R, H, P]. Rows with `states.folds` update their state
    matrices. x: [R, H, P]. b, c: [R, H, N]. dt, decay: [R, H]."""
    slots = states.slots.long()
    held = matrix.index_select(0, slots).float()
    new = held * decay.exp()[:, :, None, None] + (b * dt[..., None])[..., None] * x[:, :, None]
    new = torch.where(states.folds[:, None, None, None], new, held)
    matrix.index_copy_(0, slots, new.to(matrix.dtype))
    return (new * c[..., None]).sum(-2)


def _block(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [n, H, P] of a block of tokens, and the state after it. x: [n, H, P]. b,
    c: [n, H, N]. dt, decay: [n, H]. state: [H, N, P]."""
    x, b, c, dt, decay = (each.transpose(0, 1) for each in (x, b, c, dt, decay))
    total = decay.cumsum(1)
    # [H, n, n]: product of the decays after token j, up to token i
    between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    scores = (c @ b.transpose(1, 2)) * between * dt[:, None]
    out = scores @ x + total.exp()[..., None] * (c @ state)
    left = ((total[:, -1:] - total).exp() * dt)[..., None]
    return out.transpose(0, 1), state * total[:, -1:, None].exp() + (left * b).transpose(1, 2) @ x


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, form: Form = "wide"
) -> Rows:
    """Returns the RMS norm of x * silu(gate) [T, F], in groups of F / groups neighbours, times
    weight. weight None: returns x * silu(gate). x, gate: [T, F]. weight: [F]."""
    wide = over_sigmoid(gate.float(), gate) * x.float()
    if weight is None:
        return in_form(wide.to(x.dtype), form)
    parts = wide.unflatten(1, (groups, -1))
    normed = (parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(1).to(x.dtype)
    return in_form(normed * weight, form)

"""Mamba2's recurrence in plain torch, in float32. Decode rows are computed one token at a time,
chunks of prompts in blocks of 64 tokens by the dual form.

In a block, S0 is the state before it and G[i] the sum of dt * a up to token i. Token i's output has
S0 with the factor exp(G[i]), and what token j added to the state with the factor exp(G[i] - G[j])
(arXiv:2405.21060, section 6).

T: a step's tokens, n: tokens of a block, H: heads, P: numbers of a head, N: width of the state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.inputs import StepInputs
from penstock.kernels.mamba2 import Mamba2Heads, Mamba2Weights
from penstock.kernels.reference.elementwise.activation import over_sigmoid
from penstock.kernels.reference.linear.fp8 import in_form
from penstock.kernels.reference.recurrent.delta_rule import BLOCK, softplus
from penstock.kernels.reference.recurrent.row_turns import At, RowTurns
from penstock.kernels.reference.recurrent.short_conv import convolved, convolved_again


def mamba2(
    given: Tensor,
    heads: Mamba2Heads,
    weights: Mamba2Weights,
    window: Tensor,
    matrix: Tensor,
    inputs: StepInputs,
) -> Tensor:
    """Returns [T, size]. given: [T, columns]: z, x, B, C, dt. window: [slots, width, channels or
    more]. matrix: [slots, heads, state_width, head_width]. The contract is `ops.Mamba2Scan`."""
    h, states, turns = heads, inputs.states, RowTurns.of(inputs)
    assert states is not None, "a layer with a recurrent matrix has slots"
    came, dt = given[:, h.size : h.size + window.shape[2]], given[:, h.columns - h.heads :]
    mixed = convolved(came, weights.taps, weights.taps_bias, window, inputs)
    if turns.again:
        old, kept = convolved_again(weights.taps, weights.taps_bias, window, turns)
        kept = kept[:, h.channels :][:, : h.heads]
        mixed, dt = torch.cat((old, mixed)), torch.cat((kept, dt))
    mixed = over_sigmoid(mixed, mixed).to(given.dtype).float()
    x, b, c = mixed.split((h.size, h.group_size, h.group_size), dim=1)
    x = x.view(-1, h.heads, h.head_width)
    b, c = (
        each.view(-1, h.groups, h.state_width).repeat_interleave(h.heads // h.groups, 1)
        for each in (b, c)
    )
    dt = softplus(dt.float() + weights.step_bias)
    decay = dt * weights.a  # logarithm of the decay
    out = torch.empty_like(x)

    def fold(states: Tensor, at: At) -> Tensor:
        added = (b[at] * dt[at][..., None])[..., None] * x[at][:, :, None]
        return states * decay[at].exp()[:, :, None, None] + added

    turns.scan(matrix, out, fold, lambda states, at: (states * c[at][..., None]).sum(-2))
    if inputs.prefill is not None:
        start = (inputs.prefill.start + turns.again + inputs.rows).tolist()
        for chunk, slot in enumerate(states.chunk_slots.tolist()):
            state, last = matrix[slot].float(), start[chunk + 1]
            for first in range(start[chunk], last, BLOCK):
                at = slice(first, min(first + BLOCK, last))
                out[at], state = _block(x[at], b[at], c[at], dt[at], decay[at], state)
            if start[chunk] < last:
                matrix[slot] = state.to(matrix.dtype)
    out += weights.skip[:, None] * x
    return out[turns.again :].to(given.dtype).flatten(1)


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
    normed = F.rms_norm(parts, parts.shape[-1:], None, eps).flatten(1).to(x.dtype)
    return in_form(normed * weight, form)

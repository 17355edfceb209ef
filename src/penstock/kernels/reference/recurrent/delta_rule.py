"""The gated delta rule in plain torch, in float32. Decode rows are computed one token at a time,
chunks of prompts in blocks of 64 tokens by the WY representation.

In a block, S0 is the state before it and G[i] the product of decays up to token i. Token i adds
k[i] u[i] to the state. u[i] depends on S0 and on the u of earlier tokens, which is a triangular
system of equations (arXiv:2412.06464, section 3.3).

T: a step's tokens, n: tokens of a block, H: value heads, K: numbers of a key, V: numbers of a
value."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.delta_rule import NORM_EPS, DeltaHeads, DeltaWeights
from penstock.kernels.inputs import StepInputs
from penstock.kernels.reference.elementwise.activation import over_sigmoid
from penstock.kernels.reference.recurrent.row_turns import At, RowTurns
from penstock.kernels.reference.recurrent.short_conv import convolved, convolved_again

BLOCK = 64  # tokens of a block
STEEP = 20.0  # softplus(x) equals x in float32 from here on


def delta_rule(
    given: Tensor,
    rates: Tensor,
    heads: DeltaHeads,
    weights: DeltaWeights,
    window: Tensor,
    matrix: Tensor,
    inputs: StepInputs,
) -> Tensor:
    """Returns [T, value_size]. given: [T, channels + value_size]: q, k, v, then z. rates: [T, 2 *
    value_heads]. window: [slots, width, channels or more]. matrix: [slots, value_heads, key_width,
    value_width]. The contract is `ops.DeltaRule`."""
    h, states, turns = heads, inputs.states, RowTurns.of(inputs)
    assert states is not None, "a layer with a recurrent matrix has slots"
    came, z = given[:, : h.channels], given[:, h.channels :]
    if window.shape[2] > h.channels:
        came = torch.cat((came, rates), 1)
    mixed = convolved(came, weights.taps, None, window, inputs)
    if turns.again:
        old, kept = convolved_again(weights.taps, None, window, turns)
        kept = kept[:, h.channels :][:, : rates.shape[1]]
        mixed, rates = torch.cat((old, mixed)), torch.cat((kept, rates))
    mixed = over_sigmoid(mixed, mixed).to(given.dtype).float()
    q, k, v = mixed.split((h.key_size, h.key_size, h.value_size), dim=1)
    q, k = (_unit(x.view(-1, h.key_heads, h.key_width)) for x in (q, k))
    q, k = (
        x.repeat_interleave(h.value_heads // h.key_heads, dim=1) for x in (q * h.key_width**-0.5, k)
    )
    v = v.view(-1, h.value_heads, h.value_width)
    wide = rates.float()
    rate, step = wide[:, : h.value_heads], wide[:, h.value_heads :] + weights.step_bias
    rate = over_sigmoid(torch.full_like(rate, weights.most_rate), rate)
    decay = weights.decay * softplus(step)  # logarithm of the decay
    out = torch.empty_like(v)

    def fold(states: Tensor, at: At) -> Tensor:
        decayed = states * decay[at].exp()[:, :, None, None]
        found = (decayed * k[at][..., None]).sum(-2)
        return decayed + ((v[at] - found) * rate[at][:, :, None])[:, :, None] * k[at][..., None]

    turns.scan(matrix, out, fold, lambda states, at: (states * q[at][..., None]).sum(-2))
    if inputs.prefill is not None:
        start = (inputs.prefill.start + turns.again + inputs.rows).tolist()
        for chunk, slot in enumerate(states.chunk_slots.tolist()):
            state, last = matrix[slot].float(), start[chunk + 1]
            for first in range(start[chunk], last, BLOCK):
                at = slice(first, min(first + BLOCK, last))
                out[at], state = _block(q[at], k[at], v[at], rate[at], decay[at], state)
            if start[chunk] < last:
                matrix[slot] = state.to(matrix.dtype)
    return _gated_norm(out[turns.again :].to(given.dtype), z, weights).flatten(1)


def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x)). Not torch's softplus, which computes some elements by another
    exponential, so a row's last bits would depend on the number of rows."""
    return torch.where(x > STEEP, x, x.clamp_max(STEEP).exp().log1p())


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _block(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [n, H, V] of a block of tokens, and the state after it. q, k: [n, H, K].
    v: [n, H, V]. rate, decay: [n, H]. state: [H, K, V]."""
    q, k, v, rate, decay = (x.transpose(0, 1) for x in (q, k, v, rate, decay))
    total = decay.cumsum(1)
    # [H, n, n]: product of the decays after token j, up to token i
    between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    # the diagonal is taken as 1, since the solver is told that it is unitriangular
    system = rate[..., None] * (k @ k.transpose(1, 2)) * between
    since = total.exp()[..., None]
    right = rate[..., None] * (v - since * (k @ state))
    writes = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = since * (q @ state) + (q @ k.transpose(1, 2) * between) @ writes
    left = (total[:, -1:] - total).exp()[..., None]
    return out.transpose(0, 1), state * since[:, -1:] + (left * k).transpose(1, 2) @ writes


def _gated_norm(x: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """Returns the norm of each head of x [T, H, V], times silu(z). Results in between are rounded
    as in transformers. z: [T, H * V]."""
    normed = F.rms_norm(x, x.shape[-1:], None, weights.eps)
    gate = z.reshape(x.shape).float()
    return ((weights.norm * normed) * over_sigmoid(gate, gate)).to(x.dtype)

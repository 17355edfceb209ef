"""Gated short convolution in plain torch: each channel's last few tokens, weighted, between two gates (LFM2).

A sum is taken tap by tap, the oldest first, in float32: a token's answer is the same in a chunk and by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import StepInputs


def short_conv(given: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs) -> Tensor:
    """given [T, 3c]: the gate of what comes in, the gate of what goes out, the values; weight [c, taps]; window
    [slots, c, taps], the tokens that each slot saw last -> [T, c]. The contract is `ops.GatedConvolution`."""
    gate_in, gate_out, values = given.chunk(3, dim=1)
    came, states, rows = gate_in * values, inputs.states, inputs.rows
    assert states is not None, "a layer with a window has slots"
    mixed = torch.empty(came.shape, dtype=torch.float32, device=given.device)
    if rows:
        slots = states.slots.long()
        held = window.index_select(0, slots)
        held = torch.where(states.folds[:, None, None], torch.cat((held[:, :, 1:], came[:rows, :, None]), 2), held)
        window.index_copy_(0, slots, held)
        mixed[:rows] = _weighed([held[:, :, tap] for tap in range(weight.shape[1])], weight, bias)
    if inputs.prefill is not None:
        start = (inputs.prefill.start + rows).tolist()
        for chunk, slot in enumerate(states.chunk_slots.tolist()):
            first, stop = start[chunk], start[chunk + 1]
            if first < stop:
                _chunk(came[first:stop], weight, bias, window[slot], mixed[first:stop])
    return gate_out * mixed.to(given.dtype)


def _chunk(came: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, mixed: Tensor) -> None:
    """came, mixed [n, c] of one chunk; window [c, taps], which is moved on."""
    taps, count = weight.shape[1], came.shape[0]
    seen = torch.cat((window[:, 1:].T, came))
    mixed.copy_(_weighed([seen[tap : tap + count] for tap in range(taps)], weight, bias))
    window.copy_(torch.cat((window.T, came))[-taps:].T)


def _weighed(taps: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """taps: [n, c] each, the oldest token's first."""
    total = taps[0].float() * weight[:, 0].float()
    for tap, seen in enumerate(taps[1:], 1):
        total += seen.float() * weight[:, tap].float()
    return total if bias is None else total + bias.float()

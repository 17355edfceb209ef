"""Short causal convolutions per channel in plain torch, and LFM2's with its two gates.

A window is a ring: the token at position p is at p % taps. A row's newest token is read from the
input, so that a row that doesn't fold gives the same output again. Sums go tap by tap, the oldest
first, in float32, so a token's output is the same in a chunk and in a decode row."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import StateInputs, StepInputs


def short_conv(
    given: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs
) -> Tensor:
    """Returns [T, c]. given: [T, 3c]: gate of the input, gate of the output, the values. weight:
    [c, taps]. window: [slots, taps, c]. The contract is `ops.GatedConvolution`."""
    gate_in, gate_out, values = given.chunk(3, dim=1)
    return gate_out * convolved(gate_in * values, weight, bias, window, inputs).to(given.dtype)


def convolved(
    came: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs
) -> Tensor:
    """Returns the convolution [T, c] float32 of came [T, c], and stores the tokens in window
    [slots, taps, c]. weight: [c, taps]. bias: [c] or None."""
    states, rows = inputs.states, inputs.rows
    assert states is not None, "a layer with a window has slots"
    mixed = torch.empty(came.shape, dtype=torch.float32, device=came.device)
    if rows:
        seen = _rows(came[:rows], weight.shape[1], window, states, inputs.positions[:rows])
        mixed[:rows] = _weighed(seen, weight, bias)
    if inputs.prefill is not None:
        start, context = (inputs.prefill.start + rows).tolist(), inputs.prefill.context.tolist()
        for chunk, slot in enumerate(states.chunk_slots.tolist()):
            first, stop = start[chunk], start[chunk + 1]
            if first < stop:
                _chunk(
                    came[first:stop], context[chunk], weight, bias, window[slot], mixed[first:stop]
                )
    return mixed


def _rows(
    came: Tensor, taps: int, window: Tensor, states: StateInputs, positions: Tensor
) -> list[Tensor]:
    """Returns the inputs of each tap [rows, c], and stores the newest tokens of rows that fold in
    their windows."""
    slots = states.slots.long()
    held = window.index_select(0, slots)
    every = torch.arange(slots.shape[0], device=slots.device)
    seen = [held[every, (positions - back) % taps] for back in range(taps - 1, 0, -1)]
    at = positions % taps
    window[slots, at] = torch.where(states.folds[:, None], came, held[every, at])
    return [*seen, came]


def _chunk(
    came: Tensor, context: int, weight: Tensor, bias: Tensor | None, window: Tensor, mixed: Tensor
) -> None:
    """Convolves one chunk came [n, c], after `context` tokens, into mixed [n, c]. window: [taps,
    c]."""
    taps, count = weight.shape[1], came.shape[0]
    before = window[[(context - back) % taps for back in range(taps - 1, 0, -1)]]
    seen = torch.cat((before, came))
    mixed.copy_(_weighed([seen[tap : tap + count] for tap in range(taps)], weight, bias))
    new = min(taps, count)
    window[[(context + count - back) % taps for back in range(new, 0, -1)]] = came[count - new :]


def _weighed(taps: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the weighted sum over taps, [n, c] float32. taps: [n, c] each, the oldest token's
    first."""
    total = taps[0].float() * weight[:, 0].float()
    for tap, seen in enumerate(taps[1:], 1):
        total += seen.float() * weight[:, tap].float()
    return total if bias is None else total + bias.float()

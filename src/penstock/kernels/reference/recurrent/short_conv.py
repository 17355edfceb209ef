"""Short causal convolutions per channel in plain torch. They include LFM2's with its two gates.

A window has a sequence's last inputs as a ring: the token at position p is at index p % taps. A
row's newest token is read from the input, not the window, so a step that repeats it gives the same
output. Sums are made in float32, one tap after the other, the oldest first, so a token's output is
the same in a chunk and in a decode row.

T: a step's tokens, c: channels, n: tokens of a chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import StateInputs, StepInputs


def short_conv(
    given: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs
) -> Tensor:
    """Returns [T, c]. given: [T, 3c]: gate of the values, gate of the output, the values. weight:
    [c, taps]. window: [slots, taps, c]. The contract is `ops.GatedConvolution`."""
    gate_in, gate_out, values = given.chunk(3, dim=1)
    return gate_out * convolved(gate_in * values, weight, bias, window, inputs).to(given.dtype)


def convolved(
    came: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs
) -> Tensor:
    """Returns the convolution [T, c] float32 of the inputs came [T, c], and stores the inputs in
    window [slots, taps, c]. weight: [c, taps]. bias: [c] or None."""
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
    """Returns each tap's inputs for decode rows, [rows, c] each, and stores the newest inputs of
    rows with `states.folds` in their windows. came: [rows, c]."""
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
    """Writes the convolution of a chunk's inputs came [n, c] to mixed [n, c]. context: tokens of
    the prompt before the chunk. window: [taps, c], updated."""
    taps, count = weight.shape[1], came.shape[0]
    before = window[[(context - back) % taps for back in range(taps - 1, 0, -1)]]
    seen = torch.cat((before, came))
    mixed.copy_(_weighed([seen[tap : tap + count] for tap in range(taps)], weight, bias))
    new = min(taps, count)
    window[[(context + count - back) % taps for back in range(new, 0, -1)]] = came[count - new :]


def _weighed(taps: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the weighted sum over taps, [n, c] float32. taps: each tap's inputs [n, c], the
    oldest tokens' first."""
    total = taps[0].float() * weight[:, 0].float()
    for tap, seen in enumerate(taps[1:], 1):
        total += seen.float() * weight[:, tap].float()
    return total if bias is None else total + bias.float()

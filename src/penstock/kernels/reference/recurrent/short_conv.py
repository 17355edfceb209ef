"""Short causal convolutions per channel in plain torch. They include LFM2's with its two gates.

A window has a sequence's last inputs as a ring of `width` entries: the token at position p is at
index p % width. A query's own input is read from the step's inputs, not the window, so a step that
repeats it gives the same output. Sums are made in float32, one tap after the other, the oldest
first, so a token's output is the same in a chunk and in a decode row.

T: a step's tokens, c: channels, n: tokens of a chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import StateInputs, StepInputs
from penstock.kernels.reference.recurrent.row_turns import RowTurns


def short_conv(
    given: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs
) -> Tensor:
    """Returns [T, c]. given: [T, 3c]: gate of the values, gate of the output, the values. weight:
    [c, taps]. window: [slots, width, c]. The contract is `ops.GatedConvolution`."""
    gate_in, gate_out, values = given.chunk(3, dim=1)
    return gate_out * convolved(gate_in * values, weight, bias, window, inputs).to(given.dtype)


def convolved(
    came: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, inputs: StepInputs
) -> Tensor:
    """Returns the convolution [T, c] float32 of the first c numbers of the inputs came [T, w], and
    stores the inputs in window [slots, width, w or more]. weight: [c, taps]. bias: [c] or None."""
    states, rows, channels = inputs.states, inputs.rows, weight.shape[0]
    assert states is not None, "a layer with a window has slots"
    mixed = torch.empty((came.shape[0], channels), dtype=torch.float32, device=came.device)
    if rows:
        seen = _rows(came[:rows], weight.shape[1], window, states, inputs.positions[:rows])
        mixed[:rows] = _weighed(seen, weight, bias)
    if inputs.prefill is not None:
        start, context = (inputs.prefill.start + rows).tolist(), inputs.prefill.context.tolist()
        for chunk, slot in enumerate(states.chunk_slots.tolist()):
            own = slice(start[chunk], start[chunk + 1])
            if own.start < own.stop:
                held = window[slot, :, :channels]
                _chunk(came[own, :channels], context[chunk], weight, bias, held, mixed[own])
    return mixed


def convolved_again(
    weight: Tensor, bias: Tensor | None, window: Tensor, turns: RowTurns
) -> tuple[Tensor, Tensor]:
    """Returns the convolution [A, c] float32 of the A tokens that are folded again, and their
    entries of the window [A, w or more]."""
    slots, positions = turns.again_slots, turns.again_positions
    seen = _seen(weight.shape[1], window, slots, positions)
    seen.append(window[slots, positions % window.shape[1]])
    return _weighed(seen, weight, bias), seen[-1]


def _rows(
    came: Tensor, taps: int, window: Tensor, states: StateInputs, positions: Tensor
) -> list[Tensor]:
    """Returns each tap's inputs for the queries of decode rows, [rows, w] each. Stores the queries'
    inputs in their windows, except of tokens that `states.folded` counts. came: [rows, w]."""
    slots, at, width = states.slots.long(), positions % window.shape[1], came.shape[1]
    stored = (states.folded <= positions)[:, None]
    window[slots, at, :width] = torch.where(stored, came, window[slots, at, :width])
    return [*_seen(taps, window, slots, positions), came]


def _seen(taps: int, window: Tensor, slots: Tensor, positions: Tensor) -> list[Tensor]:
    """Returns the inputs of the `taps` - 1 tokens before the positions [n], [n, w] each, the oldest
    first."""
    return [window[slots, (positions - back) % window.shape[1]] for back in range(taps - 1, 0, -1)]


def _chunk(
    came: Tensor, context: int, weight: Tensor, bias: Tensor | None, window: Tensor, mixed: Tensor
) -> None:
    """Writes the convolution of a chunk's inputs came [n, c] to mixed [n, c]. context: tokens of
    the prompt before the chunk. window: [width, c], updated."""
    taps, count, width = weight.shape[1], came.shape[0], window.shape[0]
    before = window[[(context - back) % width for back in range(taps - 1, 0, -1)]]
    seen = torch.cat((before, came))
    mixed.copy_(_weighed([seen[tap : tap + count] for tap in range(taps)], weight, bias))
    new = min(taps, count)
    window[[(context + count - back) % width for back in range(new, 0, -1)]] = came[count - new :]


def _weighed(taps: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the weighted sum over taps, [n, c] float32. taps: each tap's inputs [n, w], the
    oldest tokens' first."""
    channels = weight.shape[0]
    total = taps[0][:, :channels].float() * weight[:, 0].float()
    for tap, seen in enumerate(taps[1:], 1):
        total += seen[:, :channels].float() * weight[:, tap].float()
    return total if bias is None else total + bias.float()

"""Short causal convolutions per channel in plain torch. They include LFM2's with its two gates.

A window has a sequence's last inputs as a ring of `width` entries: the token at position p is at
index p % width. A query's own input is read from the step's inputs, not the window, so a step that
repeats it gives the same output. Sums are made in float32, one tap after the other, the oldest
first, so a token's output is the same in a chunk and in a decode row.

T: a step's tokens, c: channels, n: tokens of a chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.reference.recurrent.row_turns import RowTurns


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Entries of the windows that a step's R decode queries read and write, in all layers alike."""

    taps: int
    width: int  # entries of a window
    slots: Tensor  # [R] int64: slot of each query's row
    at: Tensor  # [R] int64: entry of the query's own input
    before: Tensor  # [taps - 1, R] int64: entries of the inputs before it, the oldest first
    stored: Tensor | None  # [R, 1] bool: True where the query's input is stored; None: all are

    @classmethod
    def of(cls, inputs: StepInputs, taps: int, width: int) -> RowPlaces:
        """Returns the places of a step, which are made once and kept in `inputs.states`."""
        states, positions = inputs.states, inputs.positions[: inputs.rows]
        assert states is not None, "a layer with a window has slots"
        made = states.places
        if made is None or (made.taps, made.width) != (taps, width):
            back = torch.arange(taps - 1, 0, -1, device=positions.device)[:, None]
            stored = (states.folded <= positions)[:, None]
            made = states.places = cls(
                taps,
                width,
                states.slots.long(),
                positions % width,
                (positions - back) % width,
                None if bool(stored.all()) else stored,
            )
        places: RowPlaces = made
        return places


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
    by_tap = weight.float().t().contiguous()
    if rows:
        places = RowPlaces.of(inputs, weight.shape[1], window.shape[1])
        of_rows = _rows(came[:rows], by_tap, bias, window, places)
        if inputs.prefill is None and rows == came.shape[0]:
            return of_rows
    mixed = torch.empty((came.shape[0], channels), dtype=torch.float32, device=came.device)
    if rows:
        mixed[:rows] = of_rows
    if inputs.prefill is not None:
        start, context = (inputs.prefill.start + rows).tolist(), inputs.prefill.context.tolist()
        for chunk, slot in enumerate(states.chunk_slots.tolist()):
            own = slice(start[chunk], start[chunk + 1])
            if own.start < own.stop:
                held = window[slot, :, :channels]
                _chunk(came[own, :channels], context[chunk], by_tap, bias, held, mixed[own])
    return mixed


def convolved_again(
    weight: Tensor, bias: Tensor | None, window: Tensor, turns: RowTurns
) -> tuple[Tensor, Tensor]:
    """Returns the convolution [A, c] float32 of the A tokens that are folded again, and their
    entries of the window [A, w or more]."""
    slots, positions, width = turns.again_slots, turns.again_positions, window.shape[1]
    back = range(weight.shape[1] - 1, -1, -1)
    seen = [window[slots, (positions - each) % width] for each in back]
    return _weighed(seen, weight.float().t().contiguous(), bias), seen[-1]


def _rows(
    came: Tensor, by_tap: Tensor, bias: Tensor | None, window: Tensor, places: RowPlaces
) -> Tensor:
    """Returns the convolution of the inputs of decode rows came [R, w], [R, c] float32. Stores the
    inputs in their windows, except of tokens that `StateInputs.folded` counts."""
    slots, at, width = places.slots, places.at, came.shape[1]
    kept = came
    if places.stored is not None:
        kept = torch.where(places.stored, came, window[slots, at, :width])
    window[slots, at, :width] = kept
    return _weighed([*window[slots, places.before], came], by_tap, bias)


def _chunk(
    came: Tensor, context: int, by_tap: Tensor, bias: Tensor | None, window: Tensor, mixed: Tensor
) -> None:
    """Writes the convolution of a chunk's inputs came [n, c] to mixed [n, c]. context: tokens of
    the prompt before the chunk. by_tap: [taps, c]. window: [width, c], updated."""
    taps, count, width = by_tap.shape[0], came.shape[0], window.shape[0]
    before = window[[(context - back) % width for back in range(taps - 1, 0, -1)]]
    seen = torch.cat((before, came))
    mixed.copy_(_weighed([seen[tap : tap + count] for tap in range(taps)], by_tap, bias))
    new = min(taps, count)
    window[[(context + count - back) % width for back in range(new, 0, -1)]] = came[count - new :]


def _weighed(taps: list[Tensor], by_tap: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the weighted sum over taps, [n, c] float32. taps: each tap's inputs [n, w], the
    oldest tokens' first. by_tap: [taps, c] float32, contiguous: torch multiplies by the strided
    rows of a weight's transpose number by number."""
    channels = by_tap.shape[1]
    total = taps[0][:, :channels].float() * by_tap[0]
    for seen, weight in zip(taps[1:], by_tap[1:], strict=True):
        total += seen[:, :channels].float() * weight
    return total if bias is None else total + bias.float()

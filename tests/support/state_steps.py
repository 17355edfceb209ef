"""Steps of layers with recurrent state, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.inputs import PrefillInputs, StateInputs, StepInputs


def step(
    rows: list[tuple[int, int, bool]], chunks: list[tuple[int, int, int]], device: str = "cpu"
) -> StepInputs:
    """rows: slot, position, and whether it folds; chunks: slot, tokens before it, tokens."""
    nothing: Any = None
    positions = [position for _, position, _ in rows]
    positions += [context + token for _, context, count in chunks for token in range(count)]
    start = torch.tensor([0, *(count for _, _, count in chunks)]).cumsum(0).to(device, torch.int32)
    context = torch.tensor([context for _, context, _ in chunks], dtype=torch.int32, device=device)
    prefill = PrefillInputs(start, context, nothing) if chunks else None
    states = StateInputs(
        slots=torch.tensor([slot for slot, *_ in rows], dtype=torch.int32, device=device),
        folds=torch.tensor([folds for *_, folds in rows], dtype=torch.bool, device=device),
        chunk_slots=torch.tensor([slot for slot, *_ in chunks], dtype=torch.int64, device=device),
    )
    return StepInputs(
        torch.tensor(positions, device=device), nothing, len(rows), None, prefill, states=states
    )


Given = tuple[Tensor, ...]  # what a layer is given of each token of a sequence


def in_pieces(
    layer: Callable[..., Tensor],
    sequences: list[Given],
    cuts: list[tuple[int, ...]],
    device: str = "cpu",
) -> list[Tensor]:
    """Sequences in slots 1, 2, ...: first as chunks, at each step one of so many tokens of each,
    then as rows.

    layer: given of the step's tokens, step -> answers."""
    tokens, at = len(sequences[0][0]), [0] * len(sequences)
    found: list[list[Tensor]] = [[] for _ in sequences]

    def fed(counts: dict[int, int], asked: StepInputs) -> None:
        parts = [[part[at[s] : at[s] + n] for part in sequences[s]] for s, n in counts.items()]
        answers = layer(*(torch.cat(each) for each in zip(*parts, strict=True)), asked)
        for (sequence, count), piece in zip(
            counts.items(), answers.split(list(counts.values())), strict=True
        ):
            found[sequence].append(piece)
            at[sequence] += count

    for sizes in cuts:
        asked = step([], [(s + 1, at[s], size) for s, size in enumerate(sizes)], device)
        fed(dict(enumerate(sizes)), asked)
    while min(at) < tokens:
        here = [s for s in reversed(range(len(at))) if at[s] < tokens]
        fed(dict.fromkeys(here, 1), step([(s + 1, at[s], True) for s in here], [], device))
    return [torch.cat(each) for each in found]

"""Steps of layers with recurrent state, by hand."""

from __future__ import annotations

from typing import Any

import torch

from penstock.kernels.inputs import PrefillInputs, StateInputs, StepInputs


def step(rows: list[tuple[int, int, bool]], chunks: list[tuple[int, int, int]], device: str = "cpu") -> StepInputs:
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
    return StepInputs(torch.tensor(positions, device=device), nothing, len(rows), None, prefill, states=states)

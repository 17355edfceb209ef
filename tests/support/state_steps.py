"""Steps of layers with recurrent state, by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.inputs import ENDED, PrefillInputs, StateInputs, StepInputs


def step(
    rows: list[tuple[int, int, bool]], chunks: list[tuple[int, int, int]], device: str = "cpu"
) -> StepInputs:
    """rows: slot, position, and whether it folds; chunks: slot, tokens before it, tokens."""
    alone = [(slot, at, at if folds else at + 1, 1) for slot, at, folds in rows]
    return step_with_drafts(alone, chunks, device)


def step_with_drafts(
    rows: list[tuple[int, int, int, int]], chunks: list[tuple[int, int, int]], device: str = "cpu"
) -> StepInputs:
    """rows: slot, position of the newest token, tokens that the state holds, queries; chunks as
    above."""
    nothing: Any = None
    queries = [
        (slot, at + number, held, number)
        for slot, at, held, count in rows
        for number in range(count)
    ]
    positions = [at for _, at, *_ in queries]
    positions += [context + token for _, context, count in chunks for token in range(count)]
    start = torch.tensor([0, *(count for _, _, count in chunks)]).cumsum(0).to(device, torch.int32)
    context = torch.tensor([context for _, context, _ in chunks], dtype=torch.int32, device=device)
    prefill = PrefillInputs(start, context, nothing) if chunks else None
    states = StateInputs(
        slots=torch.tensor([slot for slot, *_ in queries], dtype=torch.int32, device=device),
        folded=torch.tensor([held for _, _, held, _ in queries], dtype=torch.int32, device=device),
        offset=torch.tensor([at for *_, at in queries], dtype=torch.int32, device=device),
        chunk_slots=torch.tensor([slot for slot, *_ in chunks], dtype=torch.int64, device=device),
    )
    return StepInputs(
        torch.tensor(positions, device=device), nothing, len(queries), None, prefill, states=states
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


def with_drafts(
    layer: Callable[..., Tensor],
    sequences: list[Given],
    most: int,
    seed: int = 0,
    device: str = "cpu",
) -> list[Tensor]:
    """Sequences in slots 1, 2, ..., as rows with up to `most` drafts a step, of which some are
    wrong; now and then a step is made again. Beside them, in slot 0, a row that has ended.

    layer: given of the step's tokens, step -> answers."""
    draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, at = len(sequences[0][0]), [0] * len(sequences)
    held, found = [0] * len(sequences), [list[Tensor]() for _ in sequences]
    while min(at) < tokens:
        here = [s for s in range(len(at)) if at[s] < tokens]
        drafts = [draw.randint(0, min(most, tokens - at[s] - 1)) for s in here]
        right = [draw.randint(0, count) for count in drafts]
        fed = []
        for s, count, good in zip(here, drafts, right, strict=True):
            fed.append([part[at[s] : at[s] + 1 + count].clone() for part in sequences[s]])
            for part in fed[-1]:
                part[1 + good :] = torch.randn(part[1 + good :].shape, generator=noise).to(device)
        ended = [torch.ones_like(part[:2]) for part in sequences[0]]
        rows = [
            (s + 1, at[s], held[s], 1 + count) for s, count in zip(here, drafts, strict=True)
        ] + [(0, 3, ENDED, 2)]
        given = (torch.cat(parts) for parts in zip(*fed, ended, strict=True))
        answers = layer(*given, step_with_drafts(rows, [], device))
        again = draw.random() < 0.2
        for s, good, piece in zip(
            here, right, answers.split([count for *_, count in rows])[:-1], strict=True
        ):
            held[s] = at[s] + 1
            if not again:
                found[s].append(piece[: 1 + good])
                at[s] += 1 + good
    return [torch.cat(each) for each in found]

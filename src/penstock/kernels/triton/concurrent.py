"""Work beside other work, in CUDA graphs: small launches that depend on each other leave the GPU's
memory idle, and launches of another branch of the graph use it meanwhile.

Outside of a graph the host's launches bound such steps, and tensors that two streams share would
have to be kept for longer; there one runs after the other, on the current stream. Branches must not
sum over ranks: all such sums share their memory and run in one order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.reference.concurrent import concurrent as one_after_the_other

_BESIDE: dict[torch.cuda.Stream, torch.cuda.Stream] = {}  # stream -> the one beside it


def concurrent(
    work: Callable[[Callable[[], Tensor]], Tensor], other: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns what `work` and `other` return. If a graph is being captured, `other` is launched on
    a stream beside the current one, which waits for it in the end. `work` is given a function that
    waits for it earlier, and returns what `other` returned."""
    if not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return one_after_the_other(work, other)
    here = torch.cuda.current_stream()
    beside = _beside(here)
    beside.wait_stream(here)
    is_open = True
    try:
        with torch.cuda.stream(beside):
            made = other()

        def met() -> Tensor:
            nonlocal is_open
            here.wait_stream(beside)
            is_open = False
            return made

        return work(met), made
    finally:
        # After an error too: the end of a capture with an open branch would hide it.
        if is_open:
            here.wait_stream(beside)


def _beside(here: torch.cuda.Stream) -> torch.cuda.Stream:
    """Returns the stream beside `here`. torch hands out a ring of streams, so another than `here`
    may have to be asked for twice."""
    while (beside := _BESIDE.get(here, here)) == here:
        _BESIDE[here] = torch.cuda.Stream(here.device)
    return beside

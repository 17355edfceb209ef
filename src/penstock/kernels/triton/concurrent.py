"""Work beside other work, in CUDA graphs: small launches that depend on each other leave the GPU's
memory idle, and launches of another branch of the graph use it meanwhile.

Outside of a graph the host's launches bound such steps, and tensors that two streams share would
have to be kept for longer; there `work` runs at once, on the current stream. Branches must not sum
over ranks: all such sums share their memory and run in one order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BESIDE: dict[torch.cuda.Stream, torch.cuda.Stream] = {}  # stream -> the one beside it


def concurrent(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Runs `work` on a stream beside the current one if a graph is being captured. Returns a
    function that makes the current stream wait for `work` and returns what `work` returned; call
    that function before the graph ends."""
    if not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        made = work()
        return lambda: made
    here = torch.cuda.current_stream()
    beside = _beside(here)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        made = work()

    def joined() -> Tensor:
        here.wait_stream(beside)
        return made

    return joined


def _beside(here: torch.cuda.Stream) -> torch.cuda.Stream:
    """Returns the stream beside `here`. torch hands out a ring of streams, so another than `here`
    may have to be asked for twice."""
    while (beside := _BESIDE.get(here, here)) == here:
        _BESIDE[here] = torch.cuda.Stream(here.device)
    return beside

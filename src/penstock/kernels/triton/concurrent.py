"""Work beside other work, in CUDA graphs: small launches that depend on each other leave the GPU's
memory idle, and launches of another branch of the graph use it meanwhile.

Outside of a graph the host's launches bound such steps, and tensors that two streams share would
have to be kept for longer; there `work` runs at once, on the current stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def concurrent(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Runs `work` on a stream beside the current one if a graph is being captured. Returns a
    function that makes the current stream wait for it and returns its result; call it before the
    graph ends."""
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        made = work()
        return lambda: made
    here = torch.cuda.current_stream()
    beside = _beside(here.device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        made = work()

    def joined() -> Tensor:
        here.wait_stream(beside)
        return made

    return joined


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

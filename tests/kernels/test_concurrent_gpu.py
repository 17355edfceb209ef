"""Work beside other work in CUDA graphs: the same numbers as one launch after another."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


def test_branches_of_a_graph_give_what_one_stream_gives():
    """Layers whose branches read the same input, with buffers that each layer gives back."""
    from penstock.kernels.triton.concurrent import concurrent

    torch.manual_seed(1)
    weights = torch.randn(2, 8, 512, 512, device="cuda") / 512**0.5
    given = torch.randn(64, 512, device="cuda")

    def forward() -> torch.Tensor:
        x = given
        for one, other in zip(*weights, strict=True):
            made = concurrent(lambda x=x, one=one: (x @ one).tanh())
            mine = ((x @ other).sin() @ other).cos()
            x = mine + made()
        return x

    wanted, graph = forward(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward()
    for _ in range(20):
        given.copy_(torch.randn_like(given))
        graph.replay()
        torch.testing.assert_close(got, forward(), rtol=1e-5, atol=1e-5)
    assert wanted.shape == got.shape

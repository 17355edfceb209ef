"""Work beside other work in CUDA graphs: experts with a shared expert give the same bits as one
launch after another, by the kernels that serve them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

LAYERS, TURNS = 6, 3000


@pytest.mark.parametrize("tokens", [1, 8, 128, 512])
@pytest.mark.parametrize("kind", [None, "fp8", "nvfp4"])
def test_a_shared_expert_beside_the_experts(kind: str | None, tokens: int) -> None:
    from penstock.kernels.choose import choose
    from penstock.kernels.reference.concurrent import concurrent as in_turn
    from penstock.kernels.routing import Routing
    from penstock.layers.maker import Maker
    from penstock.layers.moe_maker import make_moe, make_shared_expert
    from penstock.quant.choose import MADE
    from penstock.quant.scheme import PLAIN

    device, size = torch.device("cuda"), (512, 256)
    schemes = (lambda name: PLAIN) if kind is None else lambda name: MADE[kind]
    make = Maker(torch.bfloat16, device, 16, scheme_of=schemes)
    plain = Maker(torch.bfloat16, device, 16)
    ops = choose(device, torch.bfloat16)
    streams: list[torch.cuda.Stream] = []

    def seen(work: Callable[..., Tensor], other: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        def noted() -> Tensor:
            streams.append(torch.cuda.current_stream())
            return other()

        return ops.concurrent(work, noted)

    layers = []
    for number in range(LAYERS):
        shared = make_shared_expert(make, f"{number}.s", *size)
        routing = Routing(top_k=4, renormalise=True, sigmoid=True)
        moe = make_moe(make, str(number), size[0], size[1], 16, routing, shared=shared)
        moe.router = plain.linear(f"{number}.gate", 16, size[0])
        generator = torch.Generator(device).manual_seed(number)
        for weight in moe.weights():
            weight._drawn = (-0.1, 0.1)
            weight.draw(generator, torch.bfloat16)
        moe.prepare(ops)
        layers.append(moe)
    given = torch.randn(tokens, size[0], device=device, dtype=torch.bfloat16)

    def captured(of: Callable[..., tuple[Tensor, Tensor]]):
        used = replace(ops, concurrent=of)

        def forward() -> Tensor:
            x = given
            for layer in layers:
                x = ops.rms_norm(layer(used, x) + x, torch.ones_like(x[0]), 1e-6, "wide")
            return x

        forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outer, made = torch.cuda.current_stream(), forward()
        return graph, made, outer

    with torch.inference_mode():
        plain_graph, wanted, _ = captured(in_turn)
        graph, got, outer = captured(seen)
        assert len(streams) == 2 * LAYERS and outer not in streams[LAYERS:]
        for turn in range(TURNS):
            if turn % 500 == 0:
                given.normal_()
                plain_graph.replay()
            graph.replay()
            if turn % 100 == 0:
                assert torch.isfinite(got).all() and torch.equal(got, wanted), turn


def test_an_error_in_a_branch_is_the_captures_error() -> None:
    from penstock.kernels.triton.concurrent import concurrent

    x = torch.ones(4, device="cuda")

    def fails() -> Tensor:
        raise MemoryError("here")

    for pair in ((lambda met: fails(), lambda: x + 1), (lambda met: x + 1, fails)):
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="relaxed")
            with pytest.raises(MemoryError, match="here"):
                try:
                    concurrent(*pair)
                finally:
                    graph.capture_end()

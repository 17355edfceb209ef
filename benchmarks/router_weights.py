"""Router weights of a random model, drawn so that experts differ: engines draw them so small that
nothing tells one expert from another. It knows both engines' module names.
"""

from __future__ import annotations

from typing import Any


def spread_experts(engine: str, llm: Any) -> None:
    """Draws routers' weights from N(0, 1): as engines draw them, all but nothing tells one expert
    from another."""
    if engine == "vllm":
        llm.apply_model(_spread_modules)
        return
    # a model's first ones may be dense; Gemma 4's experts are beside its MLP
    blocks = llm.engine.runner._model.blocks
    parts = [
        block.mlp if getattr(block, "routed", None) is None else block.routed.moe
        for block in blocks
    ]
    matrices = [part.router.product.matrix for part in parts if hasattr(part, "router")]
    # a GPU's has room for its products beside it
    _draw([getattr(matrix, "weight", matrix) for matrix in matrices])


def _spread_modules(model: Any) -> None:
    of_routers = (".mlp.gate", ".mlp.router", ".router.proj")  # the last Gemma 4's
    routers = [module for name, module in model.named_modules() if name.endswith(of_routers)]
    _draw([module.weight.data for module in routers])
    for module in routers:
        if hasattr(module, "weight_scale"):  # of one in float8
            module.weight_scale.data.fill_(1.0)


def _draw(weights: list[Any]) -> None:
    import torch

    with torch.inference_mode():  # which they were made in
        for weight in weights:
            weight.copy_(torch.randn(weight.shape, device=weight.device))

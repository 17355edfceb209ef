"""Router weights of a random model, drawn so that experts differ: engines draw them so small that
nothing tells one expert from another. It knows both engines' module names.
"""

from __future__ import annotations

from typing import Any


def spread_experts(engine: str, llm: Any) -> None:
    """Draws routers' weights from N(0, 1): the engines' own random weights make all experts nearly
    equal."""
    if engine == "vllm":
        llm.apply_model(_spread_modules)
        return
    # a model's first blocks may be dense; Gemma 4's experts are beside its MLP
    blocks = llm.engine.runner._model.blocks
    parts = [
        block.mlp if getattr(block, "routed", None) is None else block.routed.moe
        for block in blocks
    ]
    matrices = [part.router.product.matrix for part in parts if hasattr(part, "router")]
    # a prepared matrix of a GPU holds its weight in an attribute
    _draw([getattr(matrix, "weight", matrix) for matrix in matrices])


def _spread_modules(model: Any) -> None:
    of_routers = (".mlp.gate", ".mlp.router", ".router.proj")  # Gemma 4 has the last one
    routers = [module for name, module in model.named_modules() if name.endswith(of_routers)]
    _draw([module.weight.data for module in routers])
    for module in routers:
        if hasattr(module, "weight_scale"):  # a float8 router has a scale
            module.weight_scale.data.fill_(1.0)


def _draw(weights: list[Any]) -> None:
    import torch

    with torch.inference_mode():  # the tensors were made in inference mode
        for weight in weights:
            weight.copy_(torch.randn(weight.shape, device=weight.device))

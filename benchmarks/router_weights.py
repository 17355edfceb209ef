"""Router weights of a random model, drawn so that tokens differ in their experts. It knows both
engines' module names.

An engine's own random weights give all experts nearly the same score. Sigmoids of such scores are
equal in bfloat16, and a correction of some 1e-3 then sends every token to the same experts: another
work, of fewer bytes, in one engine than in the other.
"""

from __future__ import annotations

from typing import Any

_SPREAD = 4.0  # deviation of a score, for a normed input of unit mean square


def spread_experts(engine: str, llm: Any) -> None:
    """Draws routers' weights, so that scores are normal with a deviation of _SPREAD. Sets norms to
    one, and corrections of the choice to zero."""
    if engine == "vllm":
        llm.apply_model(_spread_modules)
        return
    model = llm.engine.runner._model
    # a model's first blocks may be dense; Gemma 4's experts are beside its MLP
    parts = [
        block.mlp if getattr(block, "routed", None) is None else block.routed.moe
        for block in model.blocks
    ]
    routed = [part for part in parts if hasattr(part, "router")]
    matrices = [part.router.product.matrix for part in routed]
    # a prepared matrix of a GPU holds its weight in an attribute
    _draw([getattr(matrix, "weight", matrix) for matrix in matrices])
    norms = [each for each in model.weights() if each.parts[0].name.endswith("norm.weight")]
    # an earlier Penstock's experts have no such attribute
    corrections = [
        part.correction for part in routed if getattr(part, "correction", None) is not None
    ]
    _fill([weight.value for weight in norms], 1.0)
    _fill([weight.value for weight in corrections], 0.0)


def _spread_modules(model: Any) -> None:
    of_routers = (".mlp.gate", ".mlp.router", ".router.proj")  # Gemma 4 has the last one
    routers = [module for name, module in model.named_modules() if name.endswith(of_routers)]
    _draw([module.weight.data for module in routers])
    for module in routers:
        if hasattr(module, "weight_scale"):  # a float8 router has a scale
            module.weight_scale.data.fill_(1.0)
    for module in model.modules():
        kind, weight = type(module).__name__, getattr(module, "weight", None)
        if kind.endswith("RMSNorm") and weight is not None:
            # Gemma's norms multiply by one more than their weight
            _fill([weight.data], 0.0 if kind == "GemmaRMSNorm" else 1.0)
    named = model.named_parameters()
    _fill([value.data for name, value in named if "correction_bias" in name], 0.0)


def _draw(weights: list[Any]) -> None:
    import torch

    with torch.inference_mode():  # the tensors were made in inference mode
        for weight in weights:
            by = _SPREAD / weight.shape[1] ** 0.5
            weight.copy_(by * torch.randn(weight.shape, device=weight.device))


def _fill(weights: list[Any], value: float) -> None:
    import torch

    with torch.inference_mode():
        for weight in weights:
            weight.fill_(value)

"""Command A+ and North: Command A with experts. All but the first layers have experts, chosen by
their scores alone, and shared experts."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.kernels.routing import Routing
from penstock.models.cohere2 import read_cohere, ropes
from penstock.models.dense import given_window, read_windows
from penstock.models.experts import (
    MOST_EXPERTS,
    MoeConfig,
    build_moe,
    drafting_layers,
    read_experts,
    read_listed,
)
from penstock.models.model_config import MOST_OF, Windows

ARCHITECTURE = "Cohere2MoeForCausalLM"
build = build_moe


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    layer_norms = keys.rest.get("rms_norm_eps") is None
    if not layer_norms:
        keys.take("layer_norm_eps", None)  # eps of layer norms; this model has RMS norms
    fields = read_cohere(
        keys, named, "layer_norm_eps" if layer_norms else "rms_norm_eps", head_dim=128
    )
    layers, expert_size = fields["num_layers"], fields["intermediate_size"]
    first = min(keys.count("first_k_dense_replace", 0, low=0), layers)
    every_first = keys.count("prefix_dense_sliding_window_pattern", 1)
    windows, sparse = _windows(keys, layers, first, every_first), read_listed(keys, layers, first)
    turns = [
        window is not None or (n not in sparse and every_first == 1)
        for n, window in enumerate(windows)
    ]
    experts, each = read_experts(keys, 8, 2)
    shared = keys.count("num_shared_experts", 0, low=0, high=MOST_EXPERTS)
    part = 0.5 if _is_mean(keys) and shared else 1.0
    dense = keys.count(
        "prefix_dense_intermediate_size", expert_size, high=MOST_OF["intermediate_size"]
    )
    return MoeConfig(
        **fields | {"intermediate_size": dense},
        windows=windows,
        ropes=ropes(fields["rope"], turns),
        experts=experts,
        routing=_routing(keys, each, part),
        expert_size=expert_size,
        expert_layers=sparse,
        shared_size=expert_size * shared,
        shared_scale=part,
        left_out=drafting_layers(keys, layers, 0),
    )


def _windows(keys: Keys, layers: int, first: int, every_first: int) -> Windows:
    """Reads the window of each layer. Of each period of layers, all but the last have a window.
    every_first: the period among the `first` layers."""
    every = keys.count("sliding_window_pattern", 4)

    def slides(layer: int) -> bool:
        return (layer + 1) % every_first != 0 if layer < first else (layer - first + 1) % every != 0

    return read_windows(keys, layers, given_window(keys, 4096), slides)


def _routing(keys: Keys, each: int, scale: float) -> Routing:
    """Reads how the outputs of a token's experts are weighted: by a softmax over the chosen
    experts' scores, or by their sigmoids. each: experts per token. scale: factor of the weights."""
    said, renormalise = (
        keys.text("expert_selection_fn", "softmax"),
        keys.flag("norm_topk_prob", True),
    )
    if said not in ("softmax", "sigmoid"):
        raise keys.fail(
            f"expert_selection_fn {said!r} is not supported: supported are softmax and sigmoid"
        )
    return Routing(
        top_k=each,
        renormalise=renormalise or said == "softmax",
        sigmoid=said == "sigmoid",
        scale=scale,
    )


def _is_mean(keys: Keys) -> bool:
    """Returns True if a layer's output is the mean of the experts' and the shared experts' outputs,
    False if it is their sum."""
    said = keys.text("shared_expert_combination_strategy", "average")
    if said not in ("average", "sum"):
        raise keys.fail(
            f"shared_expert_combination_strategy {said!r} is not supported: supported are average"
            " and sum"
        )
    return bool(said == "average")

"""Qwen2-MoE (arXiv:2407.10671): Qwen2 with experts, and a shared one beside them whose answer a sigmoid multiplies."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.kernels.routing import Routing
from penstock.models.dense import given_window, read_dense, read_layer_types
from penstock.models.experts import MoeConfig, build_moe, read_experts, read_sparse
from penstock.models.keys import MOST, Keys
from penstock.models.model_config import Windows

ARCHITECTURE = "Qwen2MoeForCausalLM"
build = partial(build_moe, shared="shared_expert", shared_gate="shared_expert_gate")


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Reads config.json."""
    fields = read_dense(keys, named, kv_heads_default_to_heads=True)
    experts, each = read_experts(keys, 60, 4, low=0)
    layers = fields["num_layers"]
    return MoeConfig(
        **fields,
        windows=_windows(keys, layers),
        qkv_bias=keys.flag("qkv_bias", True),
        experts=experts,
        routing=Routing(top_k=each, renormalise=keys.flag("norm_topk_prob")),
        expert_size=keys.count("moe_intermediate_size", 1408, high=MOST),
        expert_layers=read_sparse(keys, layers, experts),
        shared_size=keys.count("shared_expert_intermediate_size", 5632, high=MOST),
    )


def _windows(keys: Keys, layers: int) -> Windows:
    """Reads windows, which every second of the first `max_window_layers` has where `use_sliding_window` is true; where
    false, transformers 5 writes 0 for `sliding_window`."""
    used = keys.flag("use_sliding_window")
    window = given_window(keys, 4096) if used else None
    keys.take("sliding_window", None)
    last = keys.count("max_window_layers", 28, low=0)
    types = read_layer_types(keys, layers, lambda layer: used and layer < last and layer % 2 == 0)
    if window is None and "sliding_attention" in types:
        raise keys.fail("layer_types asks for sliding_attention but use_sliding_window is false or sliding_window null")
    return tuple(window if kind == "sliding_attention" else None for kind in types)

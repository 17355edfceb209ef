"""Qwen3-MoE: Qwen3 with experts instead of MLPs, in all layers or some."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.routing import Routing
from penstock.models.dense import given_window, read_dense
from penstock.models.experts import MoeConfig, build_moe, read_experts, read_sparse

ARCHITECTURE = "Qwen3MoeForCausalLM"
build = build_moe


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named, head_dim=128)
    experts, each = read_experts(keys, 128, 8, low=0)
    layers = fields["num_layers"]
    bias, window = keys.flag("attention_bias"), given_window(keys, 4096)
    if not keys.flag(
        "use_sliding_window"
    ):  # all layers have the window; unlike Qwen3 there is no max_window_layers
        keys.take("max_window_layers", None)
        keys.past(layer_types=["full_attention"] * layers)
        window = None
    # keys that only Qwen3-Coder's configs have
    keys.past(use_qk_norm=True, qkv_bias=False, shared_expert_intermediate_size=0)
    return MoeConfig(
        **fields,
        windows=(window,) * layers,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        expert_size=keys.count("moe_intermediate_size", 768, high=MOST),
        experts=experts,
        routing=Routing(top_k=each, renormalise=keys.flag("norm_topk_prob")),
        expert_layers=read_sparse(keys, layers, experts),
    )

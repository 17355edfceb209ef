"""dots.llm1 (arXiv:2506.05767): Qwen3's attention and GLM-4.5's experts. The first layers have
MLPs."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import MOST, REQUIRED, Keys
from penstock.models.dense import given_window, read_dense, read_windows
from penstock.models.experts import MoeConfig, build_moe, read_experts, read_grouped

ARCHITECTURE = "Dots1ForCausalLM"
build = partial(build_moe, correction="gate.e_score_correction_bias")


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named, kv_heads_default_to_heads=True)
    layers, bias = fields["num_layers"], keys.flag("attention_bias")
    window, first = given_window(keys, 4096), keys.count("max_window_layers", 62, low=0)
    windows = read_windows(
        keys, layers, window, lambda layer: window is not None and layer >= first
    )
    names = ("num_local_experts", "n_routed_experts")
    experts, each = read_experts(keys, REQUIRED, REQUIRED, names=names)
    size = keys.count("moe_intermediate_size", 1408, high=MOST)
    return MoeConfig(
        **fields,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        experts=experts,
        routing=read_grouped(keys, experts, each, renormalise=False),
        expert_size=size,
        expert_layers=frozenset(range(keys.count("first_k_dense_replace", 0, low=0), layers)),
        shared_size=size * keys.count("n_shared_experts"),
    )

"""Qwen2-MoE (arXiv:2407.10671): Qwen2 with experts. A shared expert's output is multiplied by a
sigmoid gate."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.routing import Routing
from penstock.models.dense import read_dense, switched_windows
from penstock.models.experts import MoeConfig, build_moe, read_experts, read_sparse

ARCHITECTURE = "Qwen2MoeForCausalLM"
build = partial(build_moe, shared="shared_expert", shared_gate="shared_expert_gate")


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named, kv_heads_default_to_heads=True)
    experts, each = read_experts(keys, 60, 4, low=0)
    layers, last = fields["num_layers"], keys.count("max_window_layers", 28, low=0)
    return MoeConfig(
        **fields,
        windows=switched_windows(keys, layers, lambda layer: layer < last and layer % 2 == 0),
        qkv_bias=keys.flag("qkv_bias", True),
        experts=experts,
        routing=Routing(top_k=each, renormalise=keys.flag("norm_topk_prob")),
        expert_size=keys.count("moe_intermediate_size", 1408, high=MOST),
        expert_layers=read_sparse(keys, layers, experts),
        shared_size=keys.count("shared_expert_intermediate_size", 5632, high=MOST),
    )

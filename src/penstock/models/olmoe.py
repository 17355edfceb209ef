"""OLMoE (arXiv:2409.02060): Llama with experts instead of MLPs. q and k are normed over all heads;
q, k and v may be clipped."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.kernels.routing import Routing
from penstock.models.dense import read_dense
from penstock.models.experts import MoeConfig, build_moe, read_experts

ARCHITECTURE = "OlmoeForCausalLM"
build = build_moe


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named, kv_heads_default_to_heads=True, eps=1e-5)
    experts, each = read_experts(keys, 64, 8)
    layers, bias = fields["num_layers"], keys.flag("attention_bias")
    return MoeConfig(
        **fields,
        windows=(None,) * layers,
        qkv_bias=bias,
        o_bias=bias,
        whole_qk_norm=True,
        clip_qkv=keys.positive("clip_qkv", None),
        expert_size=fields["intermediate_size"],
        experts=experts,
        routing=Routing(top_k=each, renormalise=keys.flag("norm_topk_prob")),
        expert_layers=frozenset(range(layers)),
    )

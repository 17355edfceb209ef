"""Mistral Small 4: latent attention and experts. Attention is that of DeepSeek, with Ministral 3's
factor of queries beyond the original context length. Experts are chosen by a softmax."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.latent import LatentSizes
from penstock.kernels.routing import Routing
from penstock.models.experts import GROUPED_ADDED, in_groups, read_experts
from penstock.models.ministral3 import check_growth, take_growth
from penstock.models.mla import MlaConfig, build_mla, read_mla
from penstock.models.rope_keys import need_rope

ARCHITECTURE = "Mistral4ForCausalLM"
build = partial(build_mla, correction=None)
SIZES = LatentSizes(rank=256, turning=64, still=64, value=128)


def read(keys: Keys, named: dict[str, Any]) -> MlaConfig:
    """Returns the model's config, read from the keys of config.json."""
    need_rope(keys)
    growth = take_growth(keys)
    fields = read_mla(keys, named, SIZES, 1024, whole_heads=True)
    check_growth(keys, growth, fields["rope"])
    layers = fields["num_layers"]
    experts, each = read_experts(keys, 128, 4, names=("num_local_experts", "n_routed_experts"))
    size = keys.count("moe_intermediate_size", 2048, high=MOST)
    routing = Routing(
        top_k=each,
        renormalise=keys.flag("norm_topk_prob", True),
        scale=keys.positive("routed_scaling_factor", 1.0),
    )
    return MlaConfig(
        **fields,
        windows=(None,) * layers,
        query_growth=growth,
        pairs=keys.flag("rope_interleave", True),
        experts=experts,
        routing=in_groups(keys, experts, replace(routing, added=GROUPED_ADDED)),
        expert_size=size,
        expert_layers=frozenset(range(keys.count("first_k_dense_replace", 0, low=0), layers)),
        shared_size=size * keys.count("n_shared_experts", 1),
    )

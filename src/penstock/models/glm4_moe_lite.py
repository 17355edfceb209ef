"""GLM-4.7-Flash: DeepSeek-V3's attention and experts.
config.json lists which layers have experts."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.latent import LatentSizes
from penstock.models.experts import read_experts, read_grouped, read_listed, read_mtp
from penstock.models.mla import MlaConfig, build_mla, read_mla

ARCHITECTURE = "Glm4MoeLiteForCausalLM"
SIZES = LatentSizes(rank=512, turning=64, still=192, value=256)
build = build_mla


def read(keys: Keys, named: dict[str, Any]) -> MlaConfig:
    """Returns the model's config, read from the keys of config.json."""
    keys.past(topk_method="noaux_tc", scoring_func="sigmoid")
    fields = read_mla(keys, named, SIZES, 768, eps=1e-5)
    layers = fields["num_layers"]
    experts, each = read_experts(keys, 64, 4, names=("num_local_experts", "n_routed_experts"))
    size = keys.count("moe_intermediate_size", 1536, high=MOST)
    return MlaConfig(
        **fields,
        windows=(None,) * layers,
        pairs=keys.flag("rope_interleave", True),
        experts=experts,
        routing=read_grouped(keys, experts, each, scale=1.8),
        expert_size=size,
        expert_layers=read_listed(keys, layers, keys.count("first_k_dense_replace", 1, low=0)),
        shared_size=size * keys.count("n_shared_experts", 1),
        **read_mtp(keys, layers),
    )

"""DeepSeek-V3, R1, Moonlight and Kimi K2's text. They have latent attention, and experts in groups,
chosen by sigmoids plus a bias (arXiv:2412.19437)."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.latent import LatentSizes
from penstock.models.dense import past_own_code
from penstock.models.experts import read_experts, read_grouped, read_mtp
from penstock.models.mla import MlaConfig, build_mla, read_mla

ARCHITECTURE = "DeepseekV3ForCausalLM"
SIZES = LatentSizes(rank=512, turning=64, still=128, value=128)
build = build_mla


def read(keys: Keys, named: dict[str, Any]) -> MlaConfig:
    """Returns the model's config, read from the keys of config.json."""
    past_own_code(keys, "modeling_deepseek.DeepseekV3ForCausalLM")
    keys.past(topk_method="noaux_tc", scoring_func="sigmoid")
    fields = read_mla(keys, named, SIZES, 1536)
    layers = fields["num_layers"]
    experts, each = read_experts(keys, 256, 8, names=("num_local_experts", "n_routed_experts"))
    size = keys.count("moe_intermediate_size", 2048, high=MOST)
    return MlaConfig(
        **fields,
        windows=(None,) * layers,
        pairs=keys.flag("rope_interleave", True),
        experts=experts,
        routing=read_grouped(keys, experts, each, groups=8, kept=4, scale=2.5),
        expert_size=size,
        expert_layers=frozenset(range(keys.count("first_k_dense_replace", 3, low=0), layers)),
        shared_size=size * keys.count("n_shared_experts", 1),
        **read_mtp(keys, layers),
    )

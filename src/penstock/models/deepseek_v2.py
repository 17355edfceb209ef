"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434): latent attention and experts. Experts are chosen by a
softmax. If they are in groups, only the groups with the best single experts are used."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.latent import LatentSizes
from penstock.kernels.routing import Routing
from penstock.models.dense import past_own_code
from penstock.models.experts import in_groups, read_experts
from penstock.models.mla import MlaConfig, build_mla, read_mla

ARCHITECTURE = "DeepseekV2ForCausalLM"
SIZES = LatentSizes(rank=512, turning=64, still=128, value=128)
METHODS = ("greedy", "group_limited_greedy")
build = partial(build_mla, correction=None)


def read(keys: Keys, named: dict[str, Any]) -> MlaConfig:
    """Returns the model's config, read from the keys of config.json."""
    past_own_code(keys, "modeling_deepseek.DeepseekV2ForCausalLM")
    keys.past(scoring_func="softmax", norm_topk_prob=False)
    fields = read_mla(keys, named, SIZES, 1536)
    layers = fields["num_layers"]
    experts, each = read_experts(keys, 64, 6, names=("num_experts", "n_routed_experts"))
    size = keys.count("moe_intermediate_size", 1407, high=MOST)
    routing = Routing(
        top_k=each,
        renormalise=False,
        paired=False,
        scale=keys.positive("routed_scaling_factor", 1.0),
    )
    method = keys.text("topk_method", METHODS[0])
    if method not in METHODS:
        raise keys.fail(
            f"topk_method {method!r} is not supported: supported are {' and '.join(METHODS)}"
        )
    grouped = in_groups(keys, experts, routing)
    return MlaConfig(
        **fields,
        windows=(None,) * layers,
        pairs=True,
        experts=experts,
        routing=routing if method == METHODS[0] else grouped,
        expert_size=size,
        expert_layers=frozenset(range(keys.count("first_k_dense_replace", 0, low=0), layers)),
        shared_size=size * keys.count("n_shared_experts", 2),
    )

"""Mixtral (arXiv:2401.04088): Mistral with experts instead of MLPs."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import Keys
from penstock.kernels.routing import Routing
from penstock.models.dense import given_window, read_dense
from penstock.models.experts import MoeConfig, build_moe, read_experts
from penstock.models.rope_keys import read_rope

ARCHITECTURE = "MixtralForCausalLM"
THETA = 1_000_000.0
build = partial(build_moe, part="block_sparse_moe", names=("w1", "w3", "w2"))


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    rope_of = partial(read_rope, theta=THETA)
    fields = read_dense(keys, named, kv_heads_default_to_heads=True, eps=1e-5, rope_of=rope_of)
    experts, each = read_experts(keys, 8, 2)
    layers = fields["num_layers"]
    return MoeConfig(
        **fields,
        windows=(given_window(keys, None),) * layers,
        expert_size=fields["intermediate_size"],
        experts=experts,
        routing=Routing(top_k=each, renormalise=True),
        expert_layers=frozenset(range(layers)),
    )

"""GLM-4.5 to 4.7 (arXiv:2508.06471): experts in all but the first layers. Experts are in groups and
chosen by sigmoids of their scores plus a bias; a shared expert processes every token. Only some of
each head's numbers rotate."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.models.dense import read_dense
from penstock.models.experts import (
    MoeConfig,
    build_moe,
    read_experts,
    read_grouped,
    read_mtp,
)
from penstock.models.rope_keys import read_rope

ARCHITECTURE = "Glm4MoeForCausalLM"
PART = 0.5  # share of a head's numbers that rotary positions rotate
build = partial(build_moe, correction="gate.e_score_correction_bias")


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named, eps=1e-5, rope_of=partial(read_rope, part=PART))
    layers = fields["num_layers"]
    experts, each = read_experts(keys, 128, 8, names=("num_local_experts", "n_routed_experts"))
    size = keys.count("moe_intermediate_size", 1408, high=MOST)
    return MoeConfig(
        **fields,
        windows=(None,) * layers,
        qkv_bias=keys.flag("attention_bias"),
        qk_norm=keys.flag("use_qk_norm"),
        experts=experts,
        routing=read_grouped(keys, experts, each),
        expert_size=size,
        expert_layers=frozenset(range(keys.count("first_k_dense_replace", 1, low=0), layers)),
        shared_size=size * keys.count("n_shared_experts", 1),
        **read_mtp(keys, layers),
    )

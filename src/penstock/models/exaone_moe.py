"""K-EXAONE: EXAONE 4 with experts in most layers. Experts are in groups and chosen by sigmoids;
shared experts process every token."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.models.exaone4 import read_exaone
from penstock.models.experts import (
    DRAFTING,
    MoeConfig,
    build_moe,
    read_experts,
    read_grouped,
    read_listed,
)

ARCHITECTURE = "ExaoneMoeForCausalLM"
build = partial(build_moe, correction="e_score_correction_bias")


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_exaone(keys, named)
    keys.take("num_nextn_predict_layers", None)  # used for drafting only
    experts, each = read_experts(keys, 64, 8)
    size = keys.count("moe_intermediate_size", 1024, high=MOST)
    return MoeConfig(
        **fields,
        experts=experts,
        routing=read_grouped(keys, experts, each, scale=2.5),
        expert_size=size,
        expert_layers=read_listed(
            keys, fields["num_layers"], keys.count("first_k_dense_replace", 1, low=0)
        ),
        shared_size=size * keys.count("num_shared_experts", 1),
        left_out=(DRAFTING,),
    )

"""Qwen3.5 with experts instead of MLPs.
A shared expert's output is multiplied by a sigmoid gate."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.models.delta_hybrid import (
    DeltaMoeConfig,
    build_with_experts,
    read_hybrid,
    read_hybrid_experts,
)

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
build = build_with_experts


def read(keys: Keys, named: dict[str, Any]) -> DeltaMoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    experts = read_hybrid_experts(keys, 256, 8, renormalise=True)
    keys.past(mlp_only_layers=[], decoder_sparse_step=1, norm_topk_prob=True)
    # any value does, since no layer has an MLP
    keys.rest.setdefault("intermediate_size", experts["expert_size"])
    fields = read_hybrid(keys, named)
    return DeltaMoeConfig(**fields, **experts, expert_layers=frozenset(range(fields["num_layers"])))

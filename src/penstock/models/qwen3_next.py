"""Qwen3-Next: Qwen3.5's predecessor, with experts in all or some layers. The delta rule layers'
fused checkpoint matrices are stored head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.models.delta_hybrid import (
    DeltaMoeConfig,
    build_with_experts,
    read_hybrid,
    read_hybrid_experts,
)
from penstock.models.experts import read_sparse

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder

ARCHITECTURE = "Qwen3NextForCausalLM"


def read(keys: Keys, named: dict[str, Any]) -> DeltaMoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields, renormalise = read_hybrid(keys, named), keys.flag("norm_topk_prob", True)
    experts = read_hybrid_experts(keys, 512, 10, renormalise=renormalise)
    return DeltaMoeConfig(
        **fields,
        **experts,
        expert_layers=read_sparse(keys, fields["num_layers"], experts["experts"]),
    )


def build(config: DeltaMoeConfig, make: Maker) -> Decoder:
    """Makes the model; its weights are not loaded yet."""
    return build_with_experts(config, make, tensors="by_head")

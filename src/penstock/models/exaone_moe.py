"""K-EXAONE: EXAONE 4's attention behind its norms, experts behind grouped sigmoids and shared ones on most layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.models.exaone4 import read_exaone
from penstock.models.experts import MoeConfig, build_moe, read_experts, read_grouped
from penstock.models.keys import MOST, Keys

ARCHITECTURE = "ExaoneMoeForCausalLM"
DRAFTING = "mtp."  # how names of tensors begin that draft tokens
build = partial(build_moe, correction="e_score_correction_bias")


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Reads config.json."""
    fields = read_exaone(keys, named)
    keys.take("num_nextn_predict_layers", None)  # of drafts
    experts, each = read_experts(keys, 64, 8)
    size = keys.count("moe_intermediate_size", 1024, high=MOST)
    return MoeConfig(
        **fields,
        experts=experts,
        routing=read_grouped(keys, experts, each, scale=2.5),
        expert_size=size,
        expert_layers=_sparse(keys, fields["num_layers"]),
        shared_size=size * keys.count("num_shared_experts", 1),
        left_out=(DRAFTING,),
    )


def _sparse(keys: Keys, layers: int) -> frozenset[int]:
    """Reads which layers have experts: by `mlp_layer_types`, else all but the first `first_k_dense_replace`."""
    first, types = keys.count("first_k_dense_replace", 1, low=0), keys.take("mlp_layer_types", None)
    if types is None:
        return frozenset(range(first, layers))
    if not isinstance(types, list) or len(types) != layers or any(kind not in ("dense", "sparse") for kind in types):
        raise keys.fail(f"mlp_layer_types must say of {layers} layers each whether it is dense or sparse")
    return frozenset(number for number, kind in enumerate(types) if kind == "sparse")

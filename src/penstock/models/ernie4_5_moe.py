"""ERNIE 4.5 with experts in a range of layers; the others have MLPs. Experts are chosen by a
softmax plus a bias; a shared expert processes every token."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.routing import Routing
from penstock.models.dense import past_own_code
from penstock.models.ernie4_5 import read_ernie
from penstock.models.experts import MoeConfig, build_moe, read_experts

ARCHITECTURE = "Ernie4_5_MoeForCausalLM"
DRAFTING = "model.mtp_"  # prefix of the names of tensors for drafting, which are not loaded
build = partial(build_moe, correction="moe_statics.e_score_correction_bias", alone=True)


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    past_own_code(keys, "modeling_ernie4_5_moe.Ernie4_5_MoeForCausalLM")
    keys.past(moe_gate="topk", moe_use_aux_free=True, use_bias=False, use_rmsnorm=True)
    for name in ("moe_capacity", "num_nextn_predict_layers"):  # keys for training and for drafting
        keys.take(name, None)
    fields = read_ernie(keys, named, head_dim=None)
    layers = fields["num_layers"]
    experts, each = read_experts(
        keys, 64, 6, names=("num_experts", "moe_num_experts"), per_token="moe_k"
    )
    size, shared = (
        keys.count("moe_intermediate_size", 1536, high=MOST),
        keys.count("moe_num_shared_experts", 2, low=0),
    )
    first, last = (
        keys.count("moe_layer_start_index", 1, low=0),
        keys.count("moe_layer_end_index", -1, low=-1),
    )
    every, end = keys.count("moe_layer_interval", 1), layers if last == -1 else last + 1
    return MoeConfig(
        **fields,
        windows=(None,) * layers,
        experts=experts,
        routing=Routing(
            top_k=each, renormalise=True, least=keys.number("moe_norm_min", 1e-12, low=0.0)
        ),
        expert_size=size,
        expert_layers=frozenset(n for n in range(first, min(end, layers)) if (n + 1) % every == 0),
        shared_size=size * shared,
        left_out=(DRAFTING,),
    )

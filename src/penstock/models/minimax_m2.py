"""MiniMax-M2: experts in all layers. They are chosen by sigmoids of their scores plus a bias. q and
k are normed over all heads together, and only some of each head's numbers rotate."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import Keys
from penstock.kernels.routing import Routing
from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import past_own_code, read_dense
from penstock.models.experts import MoeConfig, build_moe, read_experts
from penstock.models.rope_keys import read_rope

ARCHITECTURE = "MiniMaxM2ForCausalLM"
THETA = 5_000_000.0
# Keys that don't change results: they are for MiniMax-Text-01's layers or for drafting.
_NOTHING = (
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "shared_moe_mode",
    "use_mtp",
)
build = partial(
    build_moe,
    part="block_sparse_moe",
    names=("w1", "w3", "w2"),
    correction="e_score_correction_bias",
)


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    past_own_code(keys, "modeling_minimax_m2.MiniMaxM2ForCausalLM")
    for name in _NOTHING:
        keys.take(name, None)

    def rope_of(keys: Keys, positions: int, width: int) -> RopeConfig:
        part = keys.count("rotary_dim", width, high=width) / width
        return read_rope(keys, positions, width, theta=THETA, part=part)

    fields = read_dense(keys, named, head_dim=128, rope_of=rope_of)
    layers = fields["num_layers"]
    keys.past(
        attn_type_list=[1] * layers,
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        shared_intermediate_size=0,
        use_qk_norm=True,
        use_routing_bias=True,
    )
    experts, each = read_experts(keys, 256, 8)
    return MoeConfig(
        **fields,
        windows=(None,) * layers,
        whole_qk_norm=True,
        experts=experts,
        routing=Routing(top_k=each, renormalise=True, sigmoid=True),
        expert_size=fields["intermediate_size"],
        expert_layers=frozenset(range(layers)),
    )

"""Qwen3-MoE: Qwen3 with experts in the place of the MLP, in all layers or some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.models.dense import DenseConfig, build_dense, qwen_windows, read_dense
from penstock.models.keys import MOST, Keys

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.layers.mlp import FeedForward
    from penstock.models.decoder import Decoder

ARCHITECTURE = "Qwen3MoeForCausalLM"
MOST_EXPERTS = 2**14
NOTHING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # training's


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DenseConfig):
    """expert_layers: those that have experts.   renormalise: a token's weights over its experts add up to 1."""

    experts: int
    experts_a_token: int
    expert_size: int
    renormalise: bool
    expert_layers: frozenset[int]


def read(keys: Keys, named: dict[str, Any]) -> Qwen3MoeConfig:
    """Reads config.json."""
    fields = read_dense(keys, named, head_dim=128)
    layers = fields["num_layers"]
    bias, windows = keys.flag("attention_bias"), qwen_windows(keys, layers)
    new, old = (keys.count(name, None, low=0, high=MOST_EXPERTS) for name in ("num_local_experts", "num_experts"))
    experts = next((count for count in (new, old) if count is not None), 128)
    each = keys.count("num_experts_per_tok", 8)
    if experts and each > experts:
        raise keys.fail(f"num_experts_per_tok ({each}) is above num_experts ({experts})")
    step, alone = keys.count("decoder_sparse_step", 1), keys.take("mlp_only_layers", [])
    if not isinstance(alone, list) or any(type(layer) is not int for layer in alone):
        raise keys.fail(f"mlp_only_layers must be a list of layers, not {alone!r}")
    for name in NOTHING:
        keys.take(name, None)
    return Qwen3MoeConfig(
        **fields,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        experts=experts,
        experts_a_token=each,
        expert_size=keys.count("moe_intermediate_size", 768, high=MOST),
        renormalise=keys.flag("norm_topk_prob"),
        expert_layers=frozenset(n for n in range(layers) if experts and n not in alone and (n + 1) % step == 0),
    )


def build(config: Qwen3MoeConfig, make: Maker) -> Decoder:
    """Makes the decoder."""
    c = config

    def feed_forward(layer: int, at: str) -> FeedForward:
        if layer not in c.expert_layers:
            return make.mlp(at, c.hidden_size, c.intermediate_size)
        size, count = c.expert_size, c.experts
        return make.moe(at, c.hidden_size, size, count, c.experts_a_token, renormalise=c.renormalise)

    return build_dense(c, make, feed_forward)

"""Trinity (AFMoE): gated attention and many experts. Attention and feed-forward part have a norm
before and one after. Layers without a sliding window have no rotary embedding. All but the first
layers have experts, chosen by sigmoids of their scores plus a bias, and shared experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.layers.gate_form import GateForm
from penstock.layers.rope_config import NO_ROPE
from penstock.models.dense import given_window, past_own_code, read_dense, read_windows
from penstock.models.experts import GROUPED_ADDED, MoeConfig, build_moe, read_experts, read_sigmoids

ARCHITECTURE = "AfmoeForCausalLM"
build = partial(
    build_moe,
    router="router.gate",
    correction="expert_bias",
    around=("post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
)


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    past_own_code(keys, "modeling_afmoe.AfmoeForCausalLM")
    keys.past(
        n_group=1,
        num_expert_groups=1,
        num_limited_groups=1,
        topk_group=1,
        route_norm=True,
        score_func="sigmoid",
    )
    for name in ("load_balance_coeff", "use_grouped_mm"):  # used in training only
        keys.take(name, None)
    fields = read_dense(keys, named, kv_heads_default_to_heads=True, head_dim=128, eps=1e-5)
    layers, every = fields["num_layers"], keys.count("global_attn_every_n_layers", 4)
    windows = read_windows(
        keys, layers, given_window(keys, 1024), lambda layer: (layer + 1) % every != 0
    )
    bias, scaled = keys.flag("attention_bias"), keys.flag("mup_enabled")
    experts, each = read_experts(keys, 64, 6)
    size = keys.count("moe_intermediate_size", 1408, high=MOST)
    return MoeConfig(
        **fields,
        windows=windows,
        ropes=tuple(NO_ROPE if window is None else fields["rope"] for window in windows),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        norms_around=True,
        wide_norms=True,
        gate=GateForm(name="gate_proj"),
        embedding_scale=fields["hidden_size"] ** 0.5 if scaled else 1.0,
        experts=experts,
        routing=read_sigmoids(keys, each, added=GROUPED_ADDED, scale_named="route_scale"),
        expert_size=size,
        expert_layers=frozenset(range(keys.count("num_dense_layers", 1, low=0), layers)),
        shared_size=size * keys.count("num_shared_experts", 2, low=0),
    )

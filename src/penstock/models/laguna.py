"""Laguna: attention gated by softplus, and experts. Layers may differ in their number of query
heads, and have one of two ropes. All layers but the first have experts, chosen by sigmoids of their
scores plus a bias, and a shared expert."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.routing import Routing
from penstock.layers.gate_form import GateForm
from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import given_window, read_dense, read_windows
from penstock.models.experts import MoeConfig, build_moe, read_experts, read_listed
from penstock.models.model_config import MOST_OF
from penstock.models.rope_keys import read_two_ropes

ARCHITECTURE = "LagunaForCausalLM"
ROPES = {
    "full_attention": {
        "rope_type": "default",
        "rope_theta": 500_000.0,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 1.0,
    },
}
build = partial(build_moe, correction="experts.e_score_correction_bias", shared="shared_expert")


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    local = RopeConfig()
    if keys.rest.get("rope_parameters") is None:
        keys.rest["rope_parameters"] = ROPES
    told = keys.rest["rope_parameters"]

    def rope_of(keys: Keys, positions: int, width: int) -> RopeConfig:
        nonlocal local
        full, local = read_two_ropes(keys, positions, width, theta=10_000.0, part=1.0)
        return full

    fields = read_dense(keys, named, head_dim=128, rope_of=rope_of)
    layers, bias = fields["num_layers"], keys.flag("attention_bias")
    windows = read_windows(keys, layers, given_window(keys, 512), lambda layer: False)
    for kind, needed in (("full_attention", None in windows), ("sliding_attention", any(windows))):
        if needed and (not isinstance(told, dict) or kind not in told):
            raise keys.fail(
                f"rope_parameters must have an object for {kind}, which layer_types asks for"
            )
    gating = keys.take("gating", True)
    if gating is not True and gating not in ("per-head", "per-element"):
        raise keys.fail(f"gating must be true, 'per-head' or 'per-element', not {gating!r}")
    keys.past(
        moe_apply_router_weight_on_input=False,
        moe_router_score_func="sigmoid",
        moe_router_use_sigmoid=True,
        norm_topk_prob=True,
    )
    experts, each = read_experts(keys, 256, 8)
    expert_layers = read_listed(keys, layers, first=1)
    # these keys repeat which layers have experts
    keys.past(decoder_sparse_step=1, mlp_only_layers=sorted({*range(layers)} - expert_layers))
    return MoeConfig(
        **fields,
        windows=windows,
        ropes=tuple(fields["rope"] if window is None else local for window in windows),
        layer_heads=_heads(keys, fields["heads"], fields["kv_heads"], layers),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        gate=GateForm(name="g_proj", softplus=True, a_head=gating != "per-element"),
        experts=experts,
        routing=Routing(
            top_k=each,
            renormalise=True,
            sigmoid=True,
            scale=keys.positive("moe_routed_scaling_factor", 1.0),
        ),
        expert_size=keys.count("moe_intermediate_size", 512, high=MOST),
        expert_layers=expert_layers,
        score_cap=keys.number("moe_router_logit_softcapping", 0.0, low=0.0) or None,
        shared_size=keys.count("shared_expert_intermediate_size", 512, high=MOST),
    )


def _heads(keys: Keys, heads: int, kv_heads: int, layers: int) -> tuple[int, ...]:
    """Reads the number of query heads of each layer."""
    name, rule = "num_attention_heads_per_layer", f"list {layers} whole numbers, one a layer"
    listed = keys.listed(name, [heads] * layers, layers, rule, lambda each: type(each) is int)
    most = MOST_OF["num_attention_heads"]
    for each in listed:
        if not 0 < each <= most or each % kv_heads:
            raise keys.fail(
                f"{name} holds {each}, which is no multiple of num_key_value_heads ({kv_heads}) up"
                f" to {most}"
            )
    return tuple(listed)

"""Hunyuan-A13B: Hunyuan with experts and a shared expert. Experts are chosen by a softmax."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import Keys
from penstock.kernels.routing import Routing
from penstock.models.experts import MoeConfig, build_moe, read_experts
from penstock.models.hunyuan_v1_dense import QK, read_hunyuan

ARCHITECTURE = "HunYuanMoEV1ForCausalLM"
build = partial(build_moe, router="gate.wg", shared="shared_mlp", qk=QK)
# Keys that may list a value per layer. transformers supports lists of the first two; of the other
# keys it reads a single number.
_OF_LAYERS = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")


def read(keys: Keys, named: dict[str, Any]) -> MoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_hunyuan(keys, named)
    layers, size = fields["num_layers"], fields["intermediate_size"]
    for name in _OF_LAYERS:
        _one_of(keys, name, layers)
    keys.past(
        num_shared_expert=1,
        moe_intermediate_size=size,
        use_mixed_mlp_moe=True,
        moe_layer_num_skipped=0,
    )
    experts, each = read_experts(keys, 1, 1, per_token="moe_topk")
    return MoeConfig(
        **fields,
        experts=experts,
        routing=Routing(top_k=each, renormalise=True),
        expert_size=size,
        expert_layers=frozenset(range(layers)),
        shared_size=size,
    )


def _one_of(keys: Keys, name: str, layers: int) -> None:
    """Replaces the value of a key that lists a value per layer, all of them equal, by that one
    value."""
    listed = keys.rest.get(name)
    if not isinstance(listed, list):
        return
    if len(listed) != layers or any(each != listed[0] for each in listed):
        raise keys.fail(
            f"{name} must be one number, or the same for each of {layers} layers, not {listed!r}"
        )
    keys.rest[name] = listed[0]

"""LFM2 with experts in all but the first layers. Experts are chosen by sigmoids of their scores
plus a bias, and weighted by the sigmoids alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.routing import Routing
from penstock.models import lfm2
from penstock.models.experts import read_experts, read_sigmoids
from penstock.models.model_config import some_attend

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.layers.mlp import FeedForward
    from penstock.models.decoder import Decoder

ARCHITECTURE = "Lfm2MoeForCausalLM"
ADDED = 1e-6  # added to the sum by which a token's expert weights are divided


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvMoeConfig(lfm2.ConvConfig):
    """Config of LFM2 with experts. dense_layers: number of first layers that have an MLP instead.
    corrected: True if a bias is added to choose experts."""

    experts: int
    routing: Routing
    expert_size: int
    dense_layers: int
    corrected: bool


def read(keys: Keys, named: dict[str, Any]) -> ConvMoeConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = lfm2.read_conv(keys, named)
    if not fields["attends"]:
        raise keys.fail("key 'layer_types' is missing: take the model's complete config.json")
    fields["attends"] = some_attend(keys, fields["attends"])
    experts, each = read_experts(keys, 32, 4)
    return ConvMoeConfig(
        **fields,
        experts=experts,
        routing=read_sigmoids(keys, each, added=ADDED),
        expert_size=keys.count("moe_intermediate_size", 1792, high=MOST),
        dense_layers=keys.count("num_dense_layers", 2, low=0),
        corrected=keys.flag("use_expert_bias", True),
    )


def build(config: ConvMoeConfig, make: Maker) -> Decoder:
    """Makes the model; its weights are not loaded yet."""
    from penstock.layers.moe_maker import make_moe
    from penstock.parallel.sharded_weight import Part

    c, hidden = config, config.hidden_size

    def feed_forward(layer: int, at: str) -> FeedForward:

        if layer < c.dense_layers:
            return make.mlp(at, hidden, c.intermediate_size, names=lfm2.NAMES)
        correction = Part(f"{at}.expert_bias", (c.experts,)) if c.corrected else None
        return make_moe(
            make,
            at,
            hidden,
            c.expert_size,
            c.experts,
            c.routing,
            names=lfm2.NAMES,
            correction=correction,
        )

    return lfm2.build(config, make, feed_forward)

"""Qwen3.5: three of four layers have a gated delta rule, every fourth has gated attention. All
layers have an MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.models.delta_hybrid import DeltaConfig, build_hybrid, read_hybrid

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder

ARCHITECTURE = "Qwen3_5ForCausalLM"


def read(keys: Keys, named: dict[str, Any]) -> DeltaConfig:
    """Returns the model's config, read from the keys of config.json."""
    keys.past(mlp_only_layers=[])
    return DeltaConfig(**read_hybrid(keys, named))


def build(config: DeltaConfig, make: Maker) -> Decoder:
    """Makes the model; its weights are not loaded yet."""
    return build_hybrid(
        config, make, lambda _, at: make.mlp(at, config.hidden_size, config.intermediate_size)
    )

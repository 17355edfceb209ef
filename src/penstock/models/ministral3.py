"""Ministral 3: Mistral with YaRN and scaled queries. Beyond the original context length, queries
are multiplied by a factor that grows with the logarithm of their position (Llama 4's method)."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import DenseConfig, build_dense, given_window, read_dense
from penstock.models.rope_keys import need_rope

ARCHITECTURE = "Ministral3ForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    need_rope(keys)
    growth = take_growth(keys)
    fields = read_dense(keys, named, head_dim=128, eps=1e-5)
    check_growth(keys, growth, fields["rope"])
    windows = (given_window(keys, None),) * fields["num_layers"]
    return DenseConfig(**fields, windows=windows, query_growth=growth)


def take_growth(keys: Keys) -> float:
    """Returns DenseConfig.query_growth, read from the key rope_parameters."""
    given = keys.rest.get("rope_parameters")
    if not isinstance(given, dict):
        return 0.0
    rope = Keys(given, keys.where)
    growth: float = rope.number("llama_4_scaling_beta", 0.0, low=0.0)
    rope.take("max_position_embeddings", None)  # the same number as the context
    keys.rest["rope_parameters"] = rope.rest
    return growth


def check_growth(keys: Keys, growth: float, rope: RopeConfig) -> None:
    """Raises CheckpointError if growth is not 0 and the rope has no original context, which
    query_growth needs."""
    if growth and not rope.original_context:
        raise keys.fail(
            f"llama_4_scaling_beta needs original_max_position_embeddings: rope_type {rope.kind}"
            " has none"
        )

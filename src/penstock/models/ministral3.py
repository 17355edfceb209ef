"""Ministral 3: Mistral's form with yarn, and queries that grow with the logarithm of their position beyond the original
context (Llama 4's way).
"""

from __future__ import annotations

from typing import Any

from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import DenseConfig, build_dense, given_window, read_dense
from penstock.models.keys import Keys
from penstock.models.rope_keys import need_rope, read_rope

ARCHITECTURE = "Ministral3ForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Reads config.json."""
    growth = 0.0

    def rope_of(keys: Keys, positions: int, width: int) -> RopeConfig:
        nonlocal growth
        given = keys.rest.get("rope_parameters")
        if isinstance(given, dict):
            rope = Keys(given, keys.where)
            growth = rope.number("llama_4_scaling_beta", 0.0, low=0.0)
            rope.take("max_position_embeddings", None)  # once more
            keys.rest["rope_parameters"] = rope.rest
        return read_rope(keys, positions, width)

    need_rope(keys)
    fields = read_dense(keys, named, head_dim=128, eps=1e-5, rope_of=rope_of)
    rope = fields["rope"]
    if growth and not rope.original_context:
        raise keys.fail(f"llama_4_scaling_beta needs original_max_position_embeddings: rope_type {rope.kind} has none")
    windows = (given_window(keys, None),) * fields["num_layers"]
    return DenseConfig(**fields, windows=windows, query_growth=growth)

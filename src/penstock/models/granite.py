"""Granite 3: Llama with four constant multipliers. They scale embeddings, attention scores, what
each part adds to the residual stream, and logits."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, read_dense

ARCHITECTURE = "GraniteForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named, kv_heads_default_to_heads=True)
    bias = keys.flag("attention_bias")
    return DenseConfig(
        **fields,
        windows=(None,) * fields["num_layers"],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        **read_scales(keys),
    )


def read_scales(keys: Keys) -> dict[str, Any]:
    """Reads the multipliers of embeddings, attention scores, additions to the residual stream, and
    logits. Returns fields of DenseConfig."""
    return {
        "embedding_scale": keys.positive("embedding_multiplier", 1.0),
        "score_scale": keys.positive("attention_multiplier", 1.0),
        "residual_scale": keys.positive("residual_multiplier", 1.0),
        "logits_scale": 1.0 / keys.positive("logits_scaling", 1.0),
    }

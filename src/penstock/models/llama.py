"""Llama 1 to 3.x, and other models saved as llama. With attention_bias and mlp_bias, matrix
products have biases."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, read_dense

ARCHITECTURE = "LlamaForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named, kv_heads_default_to_heads=True)
    bias, mlp_bias = keys.flag("attention_bias"), keys.flag("mlp_bias")
    windows = (None,) * fields["num_layers"]
    return DenseConfig(**fields, windows=windows, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)

"""Seed-OSS: Llama with optional biases."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, given_width, read_dense

ARCHITECTURE = "SeedOssForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(
        keys, named, head_dim=given_width(keys, 128), kv_heads_default_to_heads=True
    )
    keys.take("residual_dropout", None)  # used in training only
    return DenseConfig(
        **fields,
        windows=(None,) * fields["num_layers"],
        qkv_bias=keys.flag("attention_bias", True),
        o_bias=keys.flag("attention_out_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )

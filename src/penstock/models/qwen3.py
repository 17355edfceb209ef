"""Qwen3: Llama with q and k normed head by head. Heads have 128 numbers by default. Some layers may
have sliding windows."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, qwen_windows, read_dense

ARCHITECTURE = "Qwen3ForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named, head_dim=128)
    bias, windows = keys.flag("attention_bias"), qwen_windows(keys, fields["num_layers"])
    return DenseConfig(**fields, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True)

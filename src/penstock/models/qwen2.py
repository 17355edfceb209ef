"""Qwen2 and 2.5: Llama with biases on q, k and v. Some layers may have windows."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, qwen_windows, read_dense

ARCHITECTURE = "Qwen2ForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named)
    return DenseConfig(**fields, windows=qwen_windows(keys, fields["num_layers"]), qkv_bias=True)

"""Mistral: Llama with an optional window. All layers have the same sliding window."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, given_window, read_dense

ARCHITECTURE = "MistralForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named)
    return DenseConfig(**fields, windows=(given_window(keys, 4096),) * fields["num_layers"])

"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP. q and k are normed over all heads. The
rest is like Llama."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, read_dense

ARCHITECTURE = "Olmo2ForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(keys, named, kv_heads_default_to_heads=True, eps=1e-5)
    bias = keys.flag("attention_bias")
    windows = (None,) * fields["num_layers"]
    return DenseConfig(**fields | NORMS, windows=windows, qkv_bias=bias, o_bias=bias)


NORMS = {"whole_qk_norm": True, "norms_behind": True, "wide_norms": True}

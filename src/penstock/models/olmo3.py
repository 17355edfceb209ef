"""OLMo 3: OLMo 2 with sliding windows in three of four layers. The rotary embedding of layers with
a window is not scaled for long contexts."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import DenseConfig, build_dense, given_window, read_dense, read_windows
from penstock.models.olmo2 import NORMS
from penstock.models.rope_keys import read_two_ropes

ARCHITECTURE = "Olmo3ForCausalLM"
THETA = 500_000.0
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    local = RopeConfig(theta=THETA)

    def rope_of(keys: Keys, positions: int, width: int) -> RopeConfig:
        nonlocal local
        full, local = read_two_ropes(keys, positions, width, theta=THETA)
        return full

    fields = read_dense(keys, named, kv_heads_default_to_heads=True, eps=1e-5, rope_of=rope_of)
    bias, window = keys.flag("attention_bias"), given_window(keys, 4096)
    windows = read_windows(keys, fields["num_layers"], window, lambda layer: (layer + 1) % 4 != 0)
    return DenseConfig(
        **fields | NORMS,
        windows=windows,
        ropes=tuple(fields["rope"] if window is None else local for window in windows),
        qkv_bias=bias,
        o_bias=bias,
    )

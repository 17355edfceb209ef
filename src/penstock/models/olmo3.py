"""OLMo 3: OLMo 2 with a window on three layers of four, whose rotary embedding is never stretched."""

from __future__ import annotations

from typing import Any

from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import DenseConfig, build_dense, given_window, read_dense, read_layer_types
from penstock.models.keys import Keys
from penstock.models.olmo2 import NORMS
from penstock.models.rope_keys import read_two_ropes

ARCHITECTURE = "Olmo3ForCausalLM"
THETA = 500_000.0
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Reads config.json."""
    local = RopeConfig(theta=THETA)

    def rope_of(keys: Keys, positions: int, width: int) -> RopeConfig:
        nonlocal local
        full, local = read_two_ropes(keys, positions, width, theta=THETA)
        return full

    fields = read_dense(keys, named, kv_heads_default_to_heads=True, eps=1e-5, rope_of=rope_of)
    bias, window = keys.flag("attention_bias"), given_window(keys, 4096)
    slides = [kind == "sliding_attention" for kind in read_layer_types(keys, fields["num_layers"], every_fourth)]
    if window is None and any(slides):
        raise keys.fail("layer_types asks for sliding_attention but sliding_window is null: set one right")
    return DenseConfig(
        **fields | NORMS,
        windows=tuple(window if each else None for each in slides),
        ropes=tuple(local if each else fields["rope"] for each in slides),
        qkv_bias=bias,
        o_bias=bias,
    )


def every_fourth(layer: int) -> bool:
    """Whether a layer has a window where the file doesn't say: all but every fourth."""
    return (layer + 1) % 4 != 0

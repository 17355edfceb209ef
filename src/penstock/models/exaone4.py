"""EXAONE 4 (arXiv:2507.11407): norms behind attention and MLP, q and k normed head by head; where some layers have a
window the others turn nothing.
"""

from __future__ import annotations

from typing import Any

from penstock.layers.rope_config import NO_ROPE
from penstock.models.dense import DenseConfig, build_dense, given_window, read_dense, read_layer_types
from penstock.models.keys import Keys

ARCHITECTURE = "Exaone4ForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Reads config.json."""
    return DenseConfig(**read_exaone(keys, named), norms_behind=True)


def read_exaone(keys: Keys, named: dict[str, Any]) -> dict[str, Any]:
    """Reads the fields of DenseConfig but for the order of norms."""
    fields = read_dense(keys, named, eps=1e-5)
    window = given_window(keys, 4096)
    slides = _slides(keys, fields["num_layers"], window)
    turns = (each or window is None for each in slides)
    return fields | {
        "windows": tuple(window if each else None for each in slides),
        "ropes": tuple(fields["rope"] if each else NO_ROPE for each in turns),
        "qk_norm": True,
    }


def _slides(keys: Keys, layers: int, window: int | None) -> list[bool]:
    """Reads which layers have a window: by `layer_types`, else all but the last of each
    `sliding_window_pattern`, where there is a window."""
    told = isinstance(keys.rest.get("layer_types"), list)
    pattern = keys.take("sliding_window_pattern", 4) if told else keys.count("sliding_window_pattern", 4)
    types = read_layer_types(keys, layers, lambda layer: window is not None and (layer + 1) % pattern != 0)
    if window is None and "sliding_attention" in types:
        raise keys.fail("layer_types asks for sliding_attention but sliding_window is null: set one right")
    return [kind == "sliding_attention" for kind in types]

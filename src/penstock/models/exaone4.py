"""EXAONE 4 (arXiv:2507.11407): norms after attention and MLP. q and k are normed head by head. If
some layers have a window, the others have no rotary embedding."""

from __future__ import annotations

from typing import Any

from penstock.json_keys import Keys
from penstock.layers.rope_config import NO_ROPE
from penstock.models.dense import DenseConfig, build_dense, given_window, read_dense, read_windows
from penstock.models.model_config import Windows

ARCHITECTURE = "Exaone4ForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    return DenseConfig(**read_exaone(keys, named), norms_behind=True)


def read_exaone(keys: Keys, named: dict[str, Any]) -> dict[str, Any]:
    """Reads the fields of DenseConfig except the order of norms."""
    fields = read_dense(keys, named, eps=1e-5)
    window = given_window(keys, 4096)
    windows = _windows(keys, fields["num_layers"], window)
    return fields | {
        "windows": windows,
        "ropes": tuple(fields["rope"] if each == window else NO_ROPE for each in windows),
        "qk_norm": True,
    }


def _windows(keys: Keys, layers: int, window: int | None) -> Windows:
    """Reads the window of each layer from `layer_types`. If that is missing, all have the window
    except the last of each `sliding_window_pattern` layers."""
    told = isinstance(keys.rest.get("layer_types"), list)
    pattern = (
        keys.take("sliding_window_pattern", 4) if told else keys.count("sliding_window_pattern", 4)
    )
    return read_windows(
        keys, layers, window, lambda layer: window is not None and (layer + 1) % pattern != 0
    )

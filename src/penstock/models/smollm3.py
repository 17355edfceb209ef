"""SmolLM3: Llama without rotary embedding in some layers (NoPE, arXiv:2501.18795), by default in
every fourth."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import Keys
from penstock.layers.rope_config import NO_ROPE
from penstock.models.dense import DenseConfig, build_dense, read_dense, switched_windows
from penstock.models.rope_keys import read_rope

ARCHITECTURE = "SmolLM3ForCausalLM"
THETA = 2_000_000.0
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_dense(
        keys,
        named,
        kv_heads_default_to_heads=True,
        tied=True,
        rope_of=partial(read_rope, theta=THETA),
    )
    layers, turns = fields["num_layers"], _turns(keys, fields["num_layers"])
    keys.take("max_window_layers", None)  # published configs have this key; nothing uses it
    bias = keys.flag("attention_bias")
    return DenseConfig(
        **fields,
        windows=switched_windows(keys, layers, lambda layer: not turns[layer], absent=None),
        ropes=tuple(fields["rope"] if turn else NO_ROPE for turn in turns),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
    )


def _turns(keys: Keys, layers: int) -> list[bool]:
    """Returns for each layer True if it has a rotary embedding. Despite its name, a 1 in
    `no_rope_layers` means that the layer has one."""
    every = keys.count("no_rope_layer_interval", 4)
    listed = keys.take("no_rope_layers", None)
    if listed is None:
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if (
        not isinstance(listed, list)
        or len(listed) < layers
        or any(turn not in (0, 1) for turn in listed)
    ):
        raise keys.fail(f"no_rope_layers must list {layers} layers, each 1 (it turns) or 0")
    return [bool(turn) for turn in listed[:layers]]

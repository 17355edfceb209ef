"""Command R7B and Command A: attention and MLP in parallel, both on the output of the same layer
norm. In layers with a sliding window, numbers 2n and 2n + 1 of a head rotate together; the other
layers have no rotary embedding."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import Keys
from penstock.layers.rope_config import NO_ROPE, RopeConfig
from penstock.models.dense import DenseConfig, build_dense, given_window, read_dense, read_windows
from penstock.models.rope_keys import read_rope

ARCHITECTURE = "Cohere2ForCausalLM"
build = build_dense
# Keys of Cohere's own code with the one value that this implementation serves.
_ANYWAY = {
    "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
_NOTHING = ("use_embedding_sharing", "use_parallel_embedding")


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_cohere(keys, named, "layer_norm_eps")
    every, window = keys.count("sliding_window_pattern", 4), given_window(keys, 4096)
    windows = read_windows(
        keys, fields["num_layers"], window, lambda layer: (layer + 1) % every != 0
    )
    return DenseConfig(
        **fields, windows=windows, ropes=ropes(fields["rope"], [w is not None for w in windows])
    )


def read_cohere(
    keys: Keys, named: dict[str, Any], eps_named: str, head_dim: int | None = None
) -> dict[str, Any]:
    """Reads the fields of DenseConfig except windows and ropes. eps_named: key of the norms' eps,
    from which the kind of norm follows: RMS norms or layer norms. head_dim: see read_dense."""
    keys.past(**_ANYWAY)
    for name in _NOTHING:
        keys.take(name, None)
    rope_of = partial(read_rope, neighbours=True)
    fields = read_dense(
        keys,
        named,
        head_dim=head_dim,
        kv_heads_default_to_heads=True,
        eps=1e-5,
        eps_named=eps_named,
        tied=True,
        rope_of=rope_of,
    )
    bias, layer_norms = keys.flag("attention_bias"), eps_named == "layer_norm_eps"
    return fields | {
        "qkv_bias": bias,
        "o_bias": bias,
        "parallel": True,
        "layer_norms": layer_norms,
        "wide_norms": layer_norms,
        "logits_scale": keys.positive("logit_scale", 0.0625),
    }


def ropes(rope: RopeConfig, turns: list[bool]) -> tuple[RopeConfig, ...]:
    """Returns each layer's rope. turns: for each layer, True if it has a rotary embedding."""
    return tuple(rope if turn else NO_ROPE for turn in turns)

"""ERNIE 4.5: Llama with another rotary embedding.
Numbers 2n and 2n + 1 of a head rotate together."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, given_width, read_dense
from penstock.models.rope_keys import read_rope

ARCHITECTURE = "Ernie4_5ForCausalLM"
THETA = 500_000.0
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields, bias = read_ernie(keys, named, head_dim=given_width(keys, 128)), keys.flag("use_bias")
    windows = (None,) * fields["num_layers"]
    return DenseConfig(**fields, windows=windows, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def read_ernie(keys: Keys, named: dict[str, Any], *, head_dim: int | None) -> dict[str, Any]:
    """Reads the fields of DenseConfig except windows and biases. head_dim: see read_dense."""
    rope_of = partial(read_rope, theta=THETA, neighbours=True)
    return read_dense(
        keys,
        named,
        head_dim=head_dim,
        kv_heads_default_to_heads=True,
        eps=1e-5,
        tied=True,
        rope_of=rope_of,
    )

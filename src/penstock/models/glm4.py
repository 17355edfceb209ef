"""GLM-4 and GLM-Z1 of 2025-04. Attention and MLP have a norm before and one after. Half of each
head's numbers rotate, numbers 2n and 2n + 1 together."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, given_width, read_dense
from penstock.models.rope_keys import read_rope

ARCHITECTURE = "Glm4ForCausalLM"
PART = 0.5  # share of a head's numbers that rotary positions rotate
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    rope_of = partial(read_rope, part=PART, neighbours=True)
    fields = read_dense(
        keys, named, head_dim=given_width(keys, 128), eps=1.5625e-7, rope_of=rope_of
    )
    return DenseConfig(
        **fields,
        windows=(None,) * fields["num_layers"],
        qkv_bias=keys.flag("attention_bias", True),
        norms_around=True,
        fused_gate_up=True,
    )

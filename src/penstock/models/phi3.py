"""Phi-3, Phi-4 and Phi-4-mini: Llama with fused checkpoint tensors. q, k and v are one tensor, gate
and up another. In Phi-4-mini (arXiv:2503.01743) only some of each head's numbers rotate. The rope
may be of type longrope."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, given_window, past_own_code, read_dense
from penstock.models.rope_keys import read_rope

ARCHITECTURE = "Phi3ForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Reads config.json. Published files have an `auto_map`, from before transformers supported the
    model type."""
    past_own_code(keys, "modeling_phi3.Phi3ForCausalLM")
    scaling = keys.rest.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") in (
        "su",
        "yarn",
    ):  # older names of the kind longrope
        keys.rest["rope_scaling"] = scaling | {"type": "longrope"}
    fields = read_dense(
        keys, named, kv_heads_default_to_heads=True, eps=1e-5, rope_of=partial(read_rope, part=1.0)
    )
    # the rope's reader has used it for longrope
    keys.take("original_max_position_embeddings", None)
    window = given_window(keys, None)
    sees_all = window is None or window >= fields["context"]
    return DenseConfig(
        **fields,
        windows=(None if sees_all else window,) * fields["num_layers"],
        fused_qkv=True,
        fused_gate_up=True,
    )

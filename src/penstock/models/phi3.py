"""Phi-3, Phi-4 and Phi-4-mini: Llama's form with q, k and v in one checkpoint tensor, gate and up
in another. Optionally only a part of each head rotates (Phi-4-mini, arXiv:2503.01743), stretched by
longrope."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.models.dense import DenseConfig, build_dense, given_window, past_own_code, read_dense
from penstock.models.keys import Keys
from penstock.models.rope_keys import read_rope

ARCHITECTURE = "Phi3ForCausalLM"
build = build_dense


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Reads config.json. Published files name code from before transformers had its own
    (`auto_map`)."""
    past_own_code(keys, "modeling_phi3.Phi3ForCausalLM")
    scaling = keys.rest.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") in (
        "su",
        "yarn",
    ):  # older names of longrope
        keys.rest["rope_scaling"] = scaling | {"type": "longrope"}
    fields = read_dense(
        keys, named, kv_heads_default_to_heads=True, eps=1e-5, rope_of=partial(read_rope, part=1.0)
    )
    keys.take("original_max_position_embeddings", None)  # read as part of longrope
    window = given_window(keys, None)
    sees_all = window is None or window >= fields["context"]
    return DenseConfig(
        **fields,
        windows=(None if sees_all else window,) * fields["num_layers"],
        fused_qkv=True,
        fused_gate_up=True,
    )

"""HyperCLOVA X SEED Think: Granite's four multipliers, and a norm before and after each part
(Peri-LN, arXiv:2502.02732). Logits are multiplied by their factor, not divided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, build_dense, past_own_code, read_dense

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder

ARCHITECTURE = "HyperCLOVAXForCausalLM"
NORMS = ("post_norm1", "post_attention_layernorm", "post_norm2")


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Reads config.json. A multiplier that is null or missing changes nothing."""
    past_own_code(keys, "modeling_hyperclovax.HyperCLOVAXForCausalLM")
    fields = read_dense(keys, named, kv_heads_default_to_heads=True)
    bias = keys.flag("attention_bias")
    return DenseConfig(
        **fields,
        windows=(None,) * fields["num_layers"],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        norms_around=keys.flag("use_post_norm", True),
        embedding_scale=keys.positive("embedding_multiplier", 1.0),
        score_scale=keys.positive("attention_multiplier", None),
        residual_scale=keys.positive("residual_multiplier", 1.0),
        logits_scale=keys.positive("logits_scaling", 1.0),
    )


def build(config: DenseConfig, make: Maker) -> Decoder:
    """Makes the decoder."""
    return build_dense(config, make, around=NORMS)

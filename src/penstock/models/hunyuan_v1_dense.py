"""Hunyuan 0.5B to 7B: Llama whose heads of q and k are normed after rotation. A rope of type
"dynamic" with an `alpha` has a larger base, the same for all lengths."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from penstock.json_keys import Keys
from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import DenseConfig, build_dense, read_dense
from penstock.models.rope_keys import read_rope

ARCHITECTURE = "HunYuanDenseV1ForCausalLM"
QK = ("query_layernorm", "key_layernorm")
MOST_ALPHA = 1e9
build = partial(build_dense, qk=QK)
_BESIDE_ALPHA = (
    "alpha",
    "beta_fast",
    "beta_slow",
    "factor",
    "mscale",
    "mscale_all_dim",
    "rope_type",
    "type",
)
# Keys that don't change results: they belong to the authors' other models, the tokenizer or a
# classifier.
_NOTHING = (
    "add_classification_head",
    "class_num",
    "cla_share_factor",
    "dense_list",
    "eod_token_id",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "mask_init_id",
    "norm_type",
    "org_vocab_size",
    "pad_id",
    "pool_type",
    "sep_token_id",
    "text_end_id",
    "text_start_id",
)


def read(keys: Keys, named: dict[str, Any]) -> DenseConfig:
    """Returns the model's config, read from the keys of config.json."""
    fields = read_hunyuan(keys, named)
    return DenseConfig(**fields)


def read_hunyuan(keys: Keys, named: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of DenseConfig, read from config.json."""
    for name in _NOTHING:
        keys.take(name, None)
    fields = read_dense(keys, named, kv_heads_default_to_heads=True, eps=1e-5, rope_of=_rope)
    keys.past(
        attention_head_dim=fields["head_dim"],
        use_cla=False,
        use_qk_norm=True,
        use_rotary_pos_emb=True,
        position_embedding_xdrope=False,
    )
    bias = keys.flag("attention_bias")
    windows = (None,) * fields["num_layers"]
    return fields | {
        "windows": windows,
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "turned_first": True,
    }


def _rope(keys: Keys, positions: int, width: int) -> RopeConfig:
    """Reads the rope. With an alpha its base is theta * alpha ** (width / (width - 2)). width: of a
    head."""
    alphas = []
    for name in ("rope_parameters", "rope_scaling"):
        given = keys.rest.get(name)
        if not isinstance(given, dict) or given.get("alpha") is None:
            continue
        kind = given.get("rope_type", given.get("type"))
        if kind != "dynamic" or width <= 2:
            raise keys.fail(f"alpha belongs to a rope_type 'dynamic', not to {kind!r}")
        alphas.append(Keys(given, keys.where).number("alpha", above=0.0, high=MOST_ALPHA))
        rest = {key: value for key, value in given.items() if key not in _BESIDE_ALPHA}
        keys.rest[name] = rest | {"rope_type": "default"}
    rope = read_rope(keys, positions, width)
    return replace(rope, theta=rope.theta * alphas[0] ** (width / (width - 2))) if alphas else rope

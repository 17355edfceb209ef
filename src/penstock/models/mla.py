"""Common code of DeepSeek-V2, V3 and GLM-4.7-Flash. They have multi-head latent attention and
experts; the rest is like Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.kernels.latent import LatentSizes
from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import read_dense
from penstock.models.experts import MoeConfig, build_moe
from penstock.models.rope_keys import read_rope

if TYPE_CHECKING:
    from penstock.layers.block import Mixer
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder

MOST_RANK = 2**14
# Keys about training and about the placement of experts on devices, which don't change results.
_TRAINED = ("ep_size", "aux_loss_alpha", "seq_aux")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig(MoeConfig):
    """Config with latent attention. query_rank: size of the query latent; None: queries are
    computed from the layer's input directly. pairs: True if neighbours in a head rotate together.
    bias: True if attention's products that read the layer's input, and the last one, have biases.
    """

    latent: LatentSizes
    query_rank: int | None
    pairs: bool
    bias: bool


def read_mla(
    keys: Keys,
    named: dict[str, Any],
    absent: LatentSizes,
    query_rank: int,
    *,
    eps: float = 1e-6,
    whole_heads: bool = False,
) -> dict[str, Any]:
    """Reads the fields of MlaConfig except experts, windows and pairs. absent: default widths.
    query_rank: default size of the query latent; a null in the file means none. whole_heads: True
    if the key head_dim is the width of a whole query head, False if it is the width of its rotating
    part."""
    keys.past(moe_layer_freq=1)
    for name in _TRAINED:
        keys.take(name, None)
    sizes = LatentSizes(
        rank=keys.count("kv_lora_rank", absent.rank, high=MOST_RANK),
        turning=keys.count("qk_rope_head_dim", absent.turning, high=MOST_RANK),
        still=keys.count("qk_nope_head_dim", absent.still, high=MOST_RANK),
        value=keys.count("v_head_dim", absent.value, high=MOST_RANK),
    )
    if sizes.turning % 2:
        raise keys.fail(f"qk_rope_head_dim ({sizes.turning}) is odd: rotary positions need pairs")
    keys.past(head_dim=sizes.head if whole_heads else sizes.turning, qk_head_dim=sizes.head)
    if whole_heads and isinstance(keys.rest.get("rope_parameters"), dict):
        rope = Keys(keys.rest["rope_parameters"], keys.where)
        rope.past(partial_rotary_factor=sizes.turning / sizes.head)
        keys.rest["rope_parameters"] = rope.rest
    rank = keys.count(
        "q_lora_rank", None if "q_lora_rank" in keys.rest else query_rank, high=MOST_RANK
    )
    fields = read_dense(
        keys,
        named,
        head_dim=sizes.turning,
        kv_heads_default_to_heads=True,
        eps=eps,
        rope_of=partial(_rope, sizes),
    )
    if fields["kv_heads"] != fields["heads"]:
        raise keys.fail(
            f"num_key_value_heads ({fields['kv_heads']}) is not num_attention_heads"
            f" ({fields['heads']}): all heads read one vector a token"
        )
    bias = keys.flag("attention_bias")
    if bias and rank is None:
        raise keys.fail(
            "attention_bias is true and q_lora_rank is null, a form that no model here has"
        )
    return fields | {
        "latent": sizes,
        "query_rank": rank,
        "bias": bias,
        "score_scale": sizes.head**-0.5 * _stretched(fields["rope"]) ** 2,
    }


def _rope(sizes: LatentSizes, keys: Keys, positions: int, width: int) -> RopeConfig:
    return read_rope(keys, positions, sizes.turning)


def _stretched(rope: RopeConfig) -> float:
    """Returns yarn's factor of both queries and keys, from mscale_all_dim; 1 if yarn doesn't
    stretch the context or the key is missing."""
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def build_mla(
    config: MlaConfig, make: Maker, *, correction: str | None = "gate.e_score_correction_bias"
) -> Decoder:
    """Makes the model; its weights are not loaded yet. correction: see experts_or_mlp."""
    from penstock.layers.latent_attention import make_latent_attention

    c = config

    def mixer(at: str) -> Mixer:
        assert c.score_scale is not None, "read_mla says it"
        return make_latent_attention(
            make,
            at,
            c.hidden_size,
            c.heads,
            c.latent,
            c.rope,
            scale=c.score_scale,
            query_rank=c.query_rank,
            pairs=c.pairs,
            bias=c.bias,
            query_growth=c.query_growth,
        )

    return build_moe(c, make, mixer=mixer, correction=correction)

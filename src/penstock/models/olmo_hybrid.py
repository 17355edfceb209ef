"""OLMo Hybrid: three of four layers have a gated delta rule, with norms before each part as in
Llama. Every fourth layer is an attention layer of OLMo 3, which may have no rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.kernels.delta_rule import DeltaHeads
from penstock.layers.rope_config import NO_ROPE, RopeConfig
from penstock.models.delta_hybrid import KINDS, DeltaConfig, read_heads
from penstock.models.dense import listed_types, read_dense
from penstock.models.mamba_keys import MOST_TAPS
from penstock.models.model_config import some_attend
from penstock.models.olmo2 import NORMS
from penstock.models.rope_keys import read_rope

if TYPE_CHECKING:
    from penstock.layers.block import Block
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder

ARCHITECTURE = "OlmoHybridForCausalLM"
NORM_EPS = 1e-5  # eps of the norm inside the delta rule; the config's eps is for other norms
# pairs: part of a tensor's name in published checkpoints, transformers' name
RENAMES = (
    ("attention_layer_norm", "input_layernorm"),
    ("feedforward_layer_norm", "post_attention_layernorm"),
)
# Keys about initialisation, which don't change results.
_DRAWN = (
    "linear_a_log_min",
    "linear_a_log_max",
    "linear_dt_min",
    "linear_dt_max",
    "linear_dt_init_floor",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoHybridConfig(DeltaConfig):
    """Config of OLMo Hybrid. most_rate: upper end of the rate b (kernels/delta_rule.py)."""

    most_rate: float


def read(keys: Keys, named: dict[str, Any]) -> OlmoHybridConfig:
    """Returns the model's config, read from the keys of config.json."""
    for name in _DRAWN:
        keys.take(name, None)
    fields = read_dense(keys, named, kv_heads_default_to_heads=True, rope_of=_rope)
    layers, heads = fields["num_layers"], fields["heads"]
    types = listed_types(keys, layers, KINDS)
    attends = (
        [layer % 4 == 3 for layer in range(layers)]
        if types is None
        else [kind == KINDS[1] for kind in types]
    )
    if types is None and not any(attends):
        attends[-1] = True
    bias, width = keys.flag("attention_bias"), int(0.75 * fields["hidden_size"] / heads)
    return OlmoHybridConfig(
        **fields | NORMS,
        windows=(None,) * layers,
        renames=RENAMES,
        qkv_bias=bias,
        o_bias=bias,
        attends=some_attend(keys, attends),
        delta=read_heads(keys, DeltaHeads(heads, heads, width, 2 * width)),
        state_dtype="float32",
        taps=keys.count("linear_conv_kernel_dim", 4, low=2, high=MOST_TAPS),
        most_rate=2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0,
    )


def _rope(keys: Keys, positions: int, width: int) -> RopeConfig:
    """Reads the rope; if rope_theta is null, there is no rotary embedding."""
    given = keys.rest.get("rope_parameters")
    if isinstance(given, dict) and "rope_theta" in given and given["rope_theta"] is None:
        keys.past(rope_parameters={"rope_theta": None, "rope_type": "default"})
        return NO_ROPE
    return read_rope(keys, positions, width)


def build(config: OlmoHybridConfig, make: Maker) -> Decoder:
    """Makes the model; its weights are not loaded yet."""
    import torch

    from penstock.layers.decoder_layer import DecoderLayer, NormsBehindLayer
    from penstock.layers.delta_maker import make_delta_net
    from penstock.layers.maker import Heads
    from penstock.layers.norm import Norm
    from penstock.models.decoder import Decoder

    c, hidden, eps = config, config.hidden_size, config.rms_norm_eps
    shape = Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim)

    def norm(name: str) -> Norm:
        return make.norm(f"{name}.weight", hidden, eps, wide=True)

    def layer(number: int, attends: bool) -> Block:
        at = f"model.layers.{number}"
        mlp = make.mlp(f"{at}.mlp", hidden, c.intermediate_size)
        if not attends:
            state = getattr(torch, c.state_dtype)
            mixer = make_delta_net(
                make,
                f"{at}.linear_attn",
                hidden,
                c.delta,
                c.taps,
                NORM_EPS,
                state,
                "apart",
                most_rate=c.most_rate,
            )
            return DecoderLayer(
                norm(f"{at}.input_layernorm"), mixer, norm(f"{at}.post_attention_layernorm"), mlp
            )
        names = [f"{at}.self_attn.{n}_norm" for n in "qk"]
        attention = make.attention(
            f"{at}.self_attn",
            hidden,
            shape,
            c.rope,
            qkv_bias=c.qkv_bias,
            out_bias=c.o_bias,
            between=make.whole_norms(names, shape, eps, wide=True),
        )
        behind = norm(f"{at}.post_feedforward_layernorm")
        return NormsBehindLayer(attention, norm(f"{at}.post_attention_layernorm"), mlp, behind)

    return Decoder(
        config, make, [layer(*each) for each in enumerate(c.attends)], norm("model.norm")
    )

"""Muse Glimmer's text model: gated attention with Gemma 2's order of norms. The norms after
attention and MLP have an eps of their own. Embeddings, queries and keys are normed without weights.
Every fourth layer has no rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.layers.gate_form import GateForm
from penstock.layers.rope_config import NO_ROPE
from penstock.models.dense import DenseConfig, given_window, read_dense, read_windows

if TYPE_CHECKING:
    from penstock.layers.decoder_layer import DecoderLayer
    from penstock.layers.maker import Maker
    from penstock.layers.norm import Norm
    from penstock.models.decoder import Decoder

ARCHITECTURE = "MuseGlimmerTextModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class MuseConfig(DenseConfig):
    """Config of Muse Glimmer. post_norm_eps: eps of the norms after attention and MLP. logits_cap:
    see Decoder."""

    post_norm_eps: float
    logits_cap: float


def read(keys: Keys, named: dict[str, Any]) -> MuseConfig:
    """Returns the model's config, read from the keys of config.json."""
    keys.past(hidden_activation="silu")
    fields = read_dense(keys, named, head_dim=128, eps=1e-5)
    layers, rope, bias = fields["num_layers"], fields["rope"], keys.flag("attention_bias")
    slides = [(layers - 1 - layer) % 4 != 0 for layer in range(layers)]
    usual = [rope.theta if each else 0 for each in slides]
    rule = f"say of {layers} layers each 0 or rope_theta ({rope.theta:g})"
    thetas = keys.listed(
        "layer_rope_theta", usual, layers, rule, lambda theta: theta in (0, rope.theta)
    )
    return MuseConfig(
        **fields,
        windows=read_windows(keys, layers, given_window(keys, 2048), lambda layer: slides[layer]),
        ropes=tuple(rope if theta else NO_ROPE for theta in thetas),
        qkv_bias=bias,
        o_bias=bias,
        gate=GateForm(name="gate_proj"),
        score_scale=keys.positive("qk_scale_factor", 3.87) * fields["head_dim"] ** -0.5,
        logits_scale=keys.positive("output_multiplier", 256**0.5 / 6656**0.5),
        post_norm_eps=keys.positive("post_norm_eps", 1e-8),
        logits_cap=keys.positive("final_logit_softcapping", 20.0),
    )


def build(config: MuseConfig, make: Maker) -> Decoder:
    """Makes the model from its config."""
    from penstock.layers.decoder_layer import DecoderLayer
    from penstock.layers.maker import Heads
    from penstock.models.decoder import Decoder

    c, hidden, eps = config, config.hidden_size, config.rms_norm_eps
    shape = Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim)

    def behind(number: int, part: str) -> Norm:
        name = f"model.layers.{number}.post_{part}_layernorm.weight"
        return make.norm(name, hidden, c.post_norm_eps, one_plus=True)

    def before(name: str, first: Norm | None) -> Norm:
        return make.norm(f"{name}_layernorm.weight", hidden, eps, one_plus=True, first=first)

    def layer(number: int, window: int | None) -> DecoderLayer:
        at = f"model.layers.{number}"
        attention = make.attention(
            f"{at}.self_attn",
            hidden,
            shape,
            c.ropes[number],
            window=window,
            scale=c.score_scale,
            qkv_bias=c.qkv_bias,
            out_bias=c.o_bias,
            gate=c.gate,
            norms=(make.bare_norm(c.head_dim, eps), make.bare_norm(c.head_dim, eps)),
        )
        return DecoderLayer(
            mixer_norm=before(f"{at}.input", behind(number - 1, "feedforward") if number else None),
            mixer=attention,
            mlp_norm=before(f"{at}.pre_feedforward", behind(number, "attention")),
            mlp=make.mlp(f"{at}.mlp", hidden, c.intermediate_size),
        )

    layers = [layer(number, window) for number, window in enumerate(c.windows)]
    last = make.norm(
        "model.norm.weight", hidden, eps, wide=True, first=behind(len(layers) - 1, "feedforward")
    )
    return Decoder(
        config,
        make,
        layers,
        last,
        embedding_norm=make.bare_norm(hidden, eps),
        logits_scale=c.logits_scale,
        logits_cap=c.logits_cap,
    )

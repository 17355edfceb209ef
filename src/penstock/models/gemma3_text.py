"""Gemma 3's text model: five of six layers have a sliding window. Attention and MLP have a norm
before and one after. Norms multiply by 1 + w for a stored weight w. Layers with and without a
window have different rotary tables. Sources: the technical report (arXiv:2503.19786) and the
published code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import read_windows
from penstock.models.model_config import ModelConfig, check_heads, read_common, size
from penstock.models.rope_keys import read_two_ropes

if TYPE_CHECKING:
    from penstock.layers.decoder_layer import DecoderLayer
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder

ARCHITECTURE = "Gemma3ForCausalLM"
GLOBAL_THETA, LOCAL_THETA, PATTERN, CONTEXT = 1_000_000.0, 10_000.0, 6, 131_072
GELU = ("gelu_pytorch_tanh", "gelu_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """Shapes and switches of Gemma 2 and 3.

    rope, local_rope: ropes of layers without and with a window. score_scale: factor of attention
    scores. score_cap, logits_cap: cap c of scores and logits, which become c * tanh(x / c); None:
    no cap."""

    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    local_rope: RopeConfig
    rms_norm_eps: float
    bias: bool
    score_scale: float
    score_cap: float | None
    logits_cap: float | None
    qk_norm: bool


def read(keys: Keys, named: dict[str, Any]) -> GemmaConfig:
    """Returns the model's config, read from the keys of config.json."""
    spelt = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = keys.same(**{name: keys.count(name, None) for name in spelt}) or PATTERN
    caps = {
        "score_cap": keys.positive("attn_logit_softcapping", None),
        "logits_cap": keys.positive("final_logit_softcapping", None),
    }

    def ropes(keys: Keys, positions: int, width: int) -> dict[str, Any]:
        local = ("rope_local_base_freq", LOCAL_THETA)
        both = read_two_ropes(keys, positions, width, theta=GLOBAL_THETA, local=local)
        return dict(zip(("rope", "local_rope"), both, strict=True))

    return read_gemma(keys, named | caps, ropes, context=CONTEXT, pattern=pattern, qk_norm=True)


def read_gemma(
    keys: Keys,
    fields: dict[str, Any],
    ropes: Callable[[Keys, int, int], dict[str, Any]],
    *,
    context: int,
    pattern: int,
    qk_norm: bool,
) -> GemmaConfig:
    """Reads the keys that Gemma 2 and 3 share. fields: fields of the config that the caller has
    read. ropes: function (keys, context, head width) that reads `rope` and `local_rope`. context:
    default of max_position_embeddings. pattern: by default the last of each `pattern` layers has no
    window. qk_norm: True if q and k are normed."""
    common = read_common(keys, tied=True)
    heads, kv_heads = size(keys, "num_attention_heads", 8), size(keys, "num_key_value_heads", 4)
    width, positions = size(keys, "head_dim", 256), size(keys, "max_position_embeddings", context)
    check_heads(keys, common["hidden_size"], heads, kv_heads, width)
    act = keys.text("hidden_activation", "gelu_pytorch_tanh")
    if act not in GELU:
        raise keys.fail(
            f"hidden_activation {act!r} is not supported: only {' and '.join(map(repr, GELU))} are"
        )
    if keys.flag("use_bidirectional_attention"):
        raise keys.fail(
            "use_bidirectional_attention is not supported: text is made from left to right"
        )
    window = keys.count("sliding_window", 4096)
    return GemmaConfig(
        **fields,
        **common,
        **ropes(keys, positions, width),
        context=positions,
        intermediate_size=size(keys, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        rms_norm_eps=keys.positive("rms_norm_eps", 1e-6),
        windows=read_windows(
            keys, common["num_layers"], window, lambda layer: (layer + 1) % pattern != 0
        ),
        bias=keys.flag("attention_bias"),
        score_scale=keys.positive("query_pre_attn_scalar", 256) ** -0.5,
        qk_norm=qk_norm,
    )


def build(config: GemmaConfig, make: Maker) -> Decoder:
    """Makes the model from its config."""
    from penstock.layers.decoder_layer import DecoderLayer
    from penstock.layers.maker import Heads
    from penstock.layers.norm import Norm
    from penstock.models.decoder import Decoder

    c, hidden = config, config.hidden_size
    shape = Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim)

    def norm(name: str, length: int = hidden, first: Norm | None = None) -> Norm:
        return make.norm(f"{name}.weight", length, c.rms_norm_eps, one_plus=True, first=first)

    def behind_mlp(number: int) -> Norm | None:
        return norm(f"model.layers.{number}.post_feedforward_layernorm") if number >= 0 else None

    def layer(number: int, window: int | None) -> DecoderLayer:
        at = f"model.layers.{number}"
        attention = make.attention(
            f"{at}.self_attn",
            hidden,
            shape,
            c.rope if window is None else c.local_rope,
            window=window,
            scale=c.score_scale,
            softcap=c.score_cap,
            qkv_bias=c.bias,
            out_bias=c.bias,
            norms=(
                norm(f"{at}.self_attn.q_norm", c.head_dim),
                norm(f"{at}.self_attn.k_norm", c.head_dim),
            )
            if c.qk_norm
            else None,
        )
        return DecoderLayer(
            mixer_norm=norm(f"{at}.input_layernorm", first=behind_mlp(number - 1)),
            mixer=attention,
            mlp_norm=norm(
                f"{at}.pre_feedforward_layernorm", first=norm(f"{at}.post_attention_layernorm")
            ),
            mlp=make.mlp(f"{at}.mlp", hidden, c.intermediate_size, activation="gelu_tanh"),
        )

    layers = [layer(number, window) for number, window in enumerate(c.windows)]
    scale = float(hidden) ** 0.5
    last = norm("model.norm", first=behind_mlp(len(layers) - 1))
    return Decoder(config, make, layers, last, embedding_scale=scale, logits_cap=c.logits_cap)

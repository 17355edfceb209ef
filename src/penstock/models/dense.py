"""Dense decoders in Llama's form: what llama, mistral, qwen2, qwen3 and their kin have in common.

DenseConfig is read without torch; `build` makes attention and an MLP for each layer. A family that has another
feed-forward part gives its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.layers.rope_config import RopeConfig
from penstock.models.keys import REQUIRED, Keys
from penstock.models.model_config import ModelConfig, Windows, check_heads, read_common, size
from penstock.models.rope_keys import read_rope, stretched_context

if TYPE_CHECKING:
    from penstock.layers.block import Block
    from penstock.layers.maker import Maker
    from penstock.layers.mlp import FeedForward
    from penstock.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(ModelConfig):
    """Shapes and switches of a dense decoder.

    qk_norm, whole_qk_norm: q and k are normed head by head, or all heads of each together.
    turned_first: q and k are turned before they are normed, not then.
    norms_behind: norms stand behind attention and MLP, and none before.   norms_around: before and behind.
    wide_norms: weights of norms are multiplied by before the answer is rounded.
    fused_qkv, fused_gate_up: the checkpoint has one tensor for q, k and v, and one for gate and up.
    ropes: each layer's, where they aren't all `rope`.   clip_qkv: the most that q, k and v may be.
    score_scale: of queries and keys, None: head_dim ** -0.5.   query_growth: queries at position p are multiplied by
        1 + query_growth * log(1 + p // rope.original_context).
    residual_scale: of what attention and MLP add to the stream.   embedding_scale, logits_scale: multiply those.
    sinks: each head has a score that takes part in the softmax and brings no value.
    """

    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    rms_norm_eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    turned_first: bool = False
    norms_behind: bool = False
    norms_around: bool = False
    wide_norms: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    ropes: tuple[RopeConfig, ...] = ()
    clip_qkv: float | None = None
    score_scale: float | None = None
    query_growth: float = 0.0
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    sinks: bool = False


def read_dense(
    keys: Keys,
    named: dict[str, Any],
    *,
    head_dim: int | None = None,
    kv_heads_default_to_heads: bool = False,
    eps: float = 1e-6,
    tied: bool = False,
    rope_of: Callable[[Keys, int, int], RopeConfig] = read_rope,
) -> dict[str, Any]:
    """Reads the fields of DenseConfig but for windows and switches.

    head_dim: where config.json doesn't say, None: hidden_size / heads. kv_heads_default_to_heads: where it doesn't say
    those; False: it must. eps, tied: where it doesn't say. rope_of: reads the rope from keys, positions, head's width.
    """
    common = read_common(keys, tied=tied)
    hidden, heads = common["hidden_size"], size(keys, "num_attention_heads")
    kv_heads = size(keys, "num_key_value_heads", heads if kv_heads_default_to_heads else REQUIRED)
    width = size(keys, "head_dim", head_dim if head_dim is not None else hidden // heads)
    middle, positions = size(keys, "intermediate_size"), size(keys, "max_position_embeddings")
    check_heads(keys, hidden, heads, kv_heads, width)
    rope = rope_of(keys, positions, width)
    eps = keys.positive("rms_norm_eps", eps)
    act = keys.text("hidden_act", "silu")
    if act not in ("silu", "swish"):  # two names of one function
        raise keys.fail(f"hidden_act {act!r} is not supported: only 'silu' is")
    return named | common | {
        "intermediate_size": middle,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": width,
        "rope": rope,
        "rms_norm_eps": eps,
        "context": max(positions, stretched_context(rope)),
    }  # fmt: skip


def past_own_code(keys: Keys, named: str) -> None:
    """Passes over the name of code that published a model type before transformers had its own (`auto_map`)."""
    code = keys.rest.get("auto_map")
    if isinstance(code, dict) and code.get("AutoModelForCausalLM") == named:
        del keys.rest["auto_map"]


def given_width(keys: Keys, absent: int) -> int | None:
    """Returns what read_dense takes for `head_dim`, where a null means hidden_size / heads and silence `absent`."""
    return None if "head_dim" in keys.rest else absent


def given_window(keys: Keys, absent: int | None) -> int | None:
    """Reads `sliding_window`: a key that isn't there has the model type's own default, a null means no window."""
    return keys.count("sliding_window", None if "sliding_window" in keys.rest else absent)  # type: ignore[no-any-return]


def qwen_windows(keys: Keys, num_layers: int) -> Windows:
    """Reads windows as Qwen2 and Qwen3 configure them: by `layer_types`, or from layer `max_window_layers` on.

    `sliding_window` counts only where `use_sliding_window` is true; where false, transformers 5 writes null for it.
    """
    used = keys.flag("use_sliding_window")
    window = given_window(keys, 4096)
    first = keys.count("max_window_layers", 28, low=0)
    types = read_layer_types(keys, num_layers, lambda layer: used and layer >= first)
    if "sliding_attention" in types and not used:
        raise keys.fail("layer_types asks for sliding_attention but use_sliding_window is false: set one right")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_layer_types(keys: Keys, num_layers: int, slides: Callable[[int], bool]) -> list[str]:
    """Reads `layer_types`; where they aren't given, `slides` says of each layer whether it has a window."""
    types = listed_types(keys, num_layers, ("full_attention", "sliding_attention"))
    if types is None:
        return ["sliding_attention" if slides(layer) else "full_attention" for layer in range(num_layers)]
    return types


def listed_types(keys: Keys, num_layers: int, kinds: tuple[str, ...]) -> list[str] | None:
    """Reads `layer_types`, of which there are these kinds; None where they aren't given."""
    types = keys.take("layer_types", None)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise keys.fail(f"layer_types must list {num_layers} layers, one for each of num_hidden_layers")
    for kind in types:
        if kind not in kinds:
            raise keys.fail(f"layer_types holds {kind!r}: only {' and '.join(kinds)} are supported")
    return types


def build_dense(
    config: DenseConfig, make: Maker, feed_forward: Callable[[int, str], FeedForward] | None = None, *,
    qk: tuple[str, str] = ("q_norm", "k_norm"),
) -> Decoder:  # fmt: skip
    """Makes the decoder. feed_forward: layer, the name of its part -> the part; None: an MLP.   qk: names of norms of q
    and k behind their attention's."""
    from penstock.layers.decoder_layer import DecoderLayer, NormsBehindLayer
    from penstock.layers.maker import Heads
    from penstock.layers.norm import Norm
    from penstock.models.decoder import Decoder

    c, hidden = config, config.hidden_size
    shape = Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim)

    def norm(name: str, length: int = hidden, first: Norm | None = None) -> Norm:
        return make.norm(f"{name}.weight", length, c.rms_norm_eps, wide=c.wide_norms, first=first)

    def behind(number: int, part: str) -> Norm | None:
        around = c.norms_around and number >= 0
        return norm(f"model.layers.{number}.post_{part}_layernorm") if around else None

    def layer(number: int, window: int | None) -> Block:
        at = f"model.layers.{number}"
        names = [f"{at}.self_attn.{name}" for name in qk]
        attention = make.attention(
            f"{at}.self_attn", hidden, shape, c.ropes[number] if c.ropes else c.rope, window=window,
            scale=c.score_scale, qkv_bias=c.qkv_bias, out_bias=c.o_bias, fused=c.fused_qkv, query_growth=c.query_growth,
            sinks=c.sinks, turned_first=c.turned_first,
            norms=(norm(names[0], c.head_dim), norm(names[1], c.head_dim)) if c.qk_norm else None,
            between=make.whole_norms(names, shape, c.rms_norm_eps, wide=c.wide_norms, clip=c.clip_qkv)
            if c.whole_qk_norm else None,
        )  # fmt: skip
        if feed_forward is None:
            mlp: FeedForward = make.mlp(
                f"{at}.mlp", hidden, c.intermediate_size, bias=c.mlp_bias, fused=c.fused_gate_up
            )
        else:
            mlp = feed_forward(number, f"{at}.mlp")
        between = norm(f"{at}.post_attention_layernorm", first=behind(number, "self_attn"))
        if c.norms_behind:
            return NormsBehindLayer(attention, between, mlp, norm(f"{at}.post_feedforward_layernorm"))
        before = norm(f"{at}.input_layernorm", first=behind(number - 1, "mlp"))
        return DecoderLayer(before, attention, between, mlp, c.residual_scale)

    layers = [layer(number, window) for number, window in enumerate(c.windows)]
    scales = {"embedding_scale": c.embedding_scale, "logits_scale": c.logits_scale}
    return Decoder(config, make, layers, norm("model.norm", first=behind(len(layers) - 1, "mlp")), **scales)

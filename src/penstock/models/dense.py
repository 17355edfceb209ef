"""Common code of dense decoders like Llama, such as qwen3.

DenseConfig is read without torch. `build_dense` makes attention and an MLP for each layer; a model
type may pass another feed-forward part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.json_keys import REQUIRED, Keys
from penstock.layers.gate_form import GateForm
from penstock.layers.rope_config import RopeConfig
from penstock.models.model_config import ModelConfig, Windows, check_heads, read_common, size
from penstock.models.rope_keys import read_rope, stretched_context

if TYPE_CHECKING:
    from penstock.layers.block import Block, Mixer
    from penstock.layers.maker import Maker
    from penstock.layers.mlp import FeedForward
    from penstock.models.decoder import Decoder

AROUND = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(ModelConfig):
    """Shapes and switches of a dense decoder.

    qk_norm, whole_qk_norm: norm q and k head by head, or over all heads of each. turned_first:
    rotate q and k before norming them, not after. norms_behind: norms after attention and MLP, and
    none before. norms_around: norms before and after. parallel: attention and MLP read one norm.
    layer_norms: norms subtract the mean first. wide_norms: norms multiply by their weight before
    rounding. fused_qkv, fused_gate_up: the checkpoint has one tensor for q, k and v, and one for
    gate and up. ropes: each layer's rope; empty: all have `rope`. clip_qkv: bound of the magnitudes
    of q, k and v. gate: gate of attention's output; None: no gate. layer_heads: query heads of each
    layer; empty: all have `heads`. score_scale: factor of attention scores; None: head_dim ** -0.5.
    query_growth: queries at position p are multiplied by 1 + query_growth * log(1 + p //
    rope.original_context). residual_scale: factor of what attention and MLP add to the stream.
    embedding_scale, logits_scale: factors of embeddings and logits. sinks: each head has a learned
    score that takes part in the softmax, without a value."""

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
    parallel: bool = False
    layer_norms: bool = False
    wide_norms: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    ropes: tuple[RopeConfig, ...] = ()
    gate: GateForm | None = None
    layer_heads: tuple[int, ...] = ()
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
    eps_named: str = "rms_norm_eps",
    tied: bool = False,
    rope_of: Callable[[Keys, int, int], RopeConfig] = read_rope,
) -> dict[str, Any]:
    """Reads the fields of DenseConfig except windows and switches.

    head_dim: default width of a head; None: hidden_size / heads. kv_heads_default_to_heads: True: a
    missing number of KV heads means as many as query heads; False: the key is required. eps, tied:
    defaults of the norms' eps and of tie_word_embeddings. eps_named: the key of eps. rope_of:
    function (keys, context, head width) that reads the rope."""
    common = read_common(keys, tied=tied)
    hidden, heads = common["hidden_size"], size(keys, "num_attention_heads")
    kv_heads = size(keys, "num_key_value_heads", heads if kv_heads_default_to_heads else REQUIRED)
    width = size(keys, "head_dim", head_dim if head_dim is not None else hidden // heads)
    middle, positions = size(keys, "intermediate_size"), size(keys, "max_position_embeddings")
    check_heads(keys, hidden, heads, kv_heads, width)
    rope = rope_of(keys, positions, width)
    eps = keys.positive(eps_named, eps)
    act = keys.text("hidden_act", "silu")
    if act not in ("silu", "swish"):  # silu and swish are the same function
        raise keys.fail(f"hidden_act {act!r} is not supported: only 'silu' is")
    return (
        named
        | common
        | {
            "intermediate_size": middle,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": width,
            "rope": rope,
            "rms_norm_eps": eps,
            "context": max(positions, stretched_context(rope)),
        }
    )


def past_own_code(keys: Keys, named: str) -> None:
    """Skips the key `auto_map` if it names the model's own code, which was published before
    transformers supported the model type. named: that code's class."""
    code = keys.rest.get("auto_map")
    if isinstance(code, dict) and code.get("AutoModelForCausalLM") == named:
        del keys.rest["auto_map"]


def given_width(keys: Keys, absent: int) -> int | None:
    """Returns the default `head_dim` for read_dense: None (hidden_size / heads) if the file has the
    key, which may be null; `absent` if the key is missing."""
    return None if "head_dim" in keys.rest else absent


def given_window(keys: Keys, absent: int | None) -> int | None:
    """Reads `sliding_window`; null means no window. absent: the window if the key is missing."""
    return keys.count("sliding_window", None if "sliding_window" in keys.rest else absent)  # type: ignore[no-any-return]


def read_windows(
    keys: Keys,
    num_layers: int,
    window: int | None,
    slides: Callable[[int], bool],
    *,
    lacks: str = "sliding_window is null",
) -> Windows:
    """Reads each layer's window from `layer_types`. slides: function that returns True for layers
    with a window, used if the key is missing. window: its size. Raises CheckpointError if a layer
    has a window and `window` is None; lacks: the reason that the error gives."""
    types = listed_types(keys, num_layers, ("full_attention", "sliding_attention"))
    slide = (
        [slides(layer) for layer in range(num_layers)]
        if types is None
        else [t != "full_attention" for t in types]
    )
    if window is None and any(slide):
        raise keys.fail(f"layer_types asks for sliding_attention but {lacks}: set one right")
    return tuple(window if each else None for each in slide)


def switched_windows(
    keys: Keys, num_layers: int, slides: Callable[[int], bool], absent: int | None = 4096
) -> Windows:
    """Reads each layer's window if `use_sliding_window` is true; see read_windows. absent: the
    window's default size. If the key is false, transformers 5 writes null or 0 as the window."""
    used = keys.flag("use_sliding_window")
    window = given_window(keys, absent) if used else None
    keys.take("sliding_window", None)
    lacks = "use_sliding_window is false or sliding_window null"
    return read_windows(
        keys, num_layers, window, lambda layer: window is not None and slides(layer), lacks=lacks
    )


def qwen_windows(keys: Keys, num_layers: int) -> Windows:
    """Reads the windows of Qwen2 and Qwen3. Layers from `max_window_layers` on have one, unless
    `layer_types` is given."""
    first = keys.count("max_window_layers", 28, low=0)
    return switched_windows(keys, num_layers, lambda layer: layer >= first)


def listed_types(keys: Keys, num_layers: int, kinds: tuple[str, ...]) -> list[str] | None:
    """Reads `layer_types`, whose entries must be in `kinds`; None if missing."""
    rule = f"list {num_layers} layers, one for each of num_hidden_layers"
    types: list[str] | None = keys.listed("layer_types", None, num_layers, rule)
    for kind in types or ():
        if kind not in kinds:
            raise keys.fail(f"layer_types holds {kind!r}: only {' and '.join(kinds)} are supported")
    return types


def build_dense(
    config: DenseConfig,
    make: Maker,
    feed_forward: Callable[[int, str], FeedForward] | None = None,
    *,
    qk: tuple[str, str] = ("q_norm", "k_norm"),
    around: tuple[str, str, str] = AROUND,
    mixer: Callable[[str], Mixer] | None = None,
) -> Decoder:
    """Makes the decoder. feed_forward: function (layer, name of its feed-forward part) -> the part;
    None: an MLP. qk: names of q's and k's norms, after the attention's name. around: names of the
    norms after attention, before the MLP and after it. mixer: function from an attention's name to
    a mixer that replaces it; None: attention."""
    from penstock.layers.decoder_layer import DecoderLayer, NormsBehindLayer, ParallelLayer
    from penstock.layers.maker import Heads
    from penstock.layers.mtp_layer import DEEPSEEK, make_mtp_layer
    from penstock.layers.norm import Norm
    from penstock.models.decoder import Decoder

    c, hidden = config, config.hidden_size
    behind_mixer, before_mlp, behind_mlp = around
    assert sum((c.parallel, c.norms_behind, c.norms_around)) <= 1, "a layer has one order"
    assert c.residual_scale == 1.0 or not (c.parallel or c.norms_behind), "not in that order"

    def norm(
        name: str, length: int = hidden, first: Norm | None = None, scale: float = 1.0
    ) -> Norm:
        return make.norm(
            f"{name}.weight",
            length,
            c.rms_norm_eps,
            wide=c.wide_norms,
            first=first,
            centred=c.layer_norms,
            scale=scale,
        )

    def behind(number: int, name: str) -> Norm | None:
        if not c.norms_around or number < 0:
            return None
        return norm(f"model.layers.{number}.{name}", scale=c.residual_scale)

    def layer(number: int, window: int | None) -> Block:
        at = f"model.layers.{number}"
        names = [f"{at}.self_attn.{name}" for name in qk]
        heads = c.layer_heads[number] if c.layer_heads else c.heads
        shape = Heads(heads=heads, kv_heads=c.kv_heads, width=c.head_dim)
        attention: Mixer = (
            mixer(f"{at}.self_attn")
            if mixer is not None
            else make.attention(
                f"{at}.self_attn",
                hidden,
                shape,
                c.ropes[number] if c.ropes else c.rope,
                window=window,
                scale=c.score_scale,
                qkv_bias=c.qkv_bias,
                out_bias=c.o_bias,
                fused=c.fused_qkv,
                query_growth=c.query_growth,
                sinks=c.sinks,
                turned_first=c.turned_first,
                gate=c.gate,
                norms=(
                    (norm(names[0], c.head_dim), norm(names[1], c.head_dim)) if c.qk_norm else None
                ),
                between=(
                    make.whole_norms(
                        names, shape, c.rms_norm_eps, wide=c.wide_norms, clip=c.clip_qkv
                    )
                    if c.whole_qk_norm
                    else None
                ),
            )
        )
        if feed_forward is None:
            mlp: FeedForward = make.mlp(
                f"{at}.mlp", hidden, c.intermediate_size, bias=c.mlp_bias, fused=c.fused_gate_up
            )
        else:
            mlp = feed_forward(number, f"{at}.mlp")
        if c.parallel:
            return ParallelLayer(norm(f"{at}.input_layernorm"), attention, mlp)
        between = norm(f"{at}.{before_mlp}", first=behind(number, behind_mixer))
        if c.norms_behind:
            return NormsBehindLayer(
                attention, between, mlp, norm(f"{at}.post_feedforward_layernorm")
            )
        before = norm(f"{at}.input_layernorm", first=behind(number - 1, behind_mlp))
        # norms behind the parts undo a factor of their input, and have it themselves
        scale = 1.0 if c.norms_around else c.residual_scale
        return DecoderLayer(before, attention, between, mlp, scale)

    layers = [layer(number, window) for number, window in enumerate(c.windows)]
    last, drafter = norm("model.norm", first=behind(len(layers) - 1, behind_mlp)), None
    if make.predicts:
        after = len(layers)
        at = f"model.layers.{after}"
        drafter = make_mtp_layer(make, at, DEEPSEEK, hidden, norm, layer(after, None))
    return Decoder(
        config,
        make,
        layers,
        last,
        embedding_scale=c.embedding_scale,
        logits_scale=c.logits_scale,
        drafter=drafter,
    )

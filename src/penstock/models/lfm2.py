"""LFM2: layers of gated short convolutions and of attention. Attention's q and k are normed head by
head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import DenseConfig, listed_types, read_dense
from penstock.models.model_config import some_attend
from penstock.models.rope_keys import read_rope

if TYPE_CHECKING:
    from penstock.layers.block import Block
    from penstock.layers.maker import Maker
    from penstock.layers.mlp import FeedForward
    from penstock.models.decoder import Decoder

ARCHITECTURE = "Lfm2ForCausalLM"
THETA = 1_000_000.0
MOST_TAPS = 16
NAMES = ("w1", "w3", "w2")  # names of an MLP's gate, up and down matrices
KINDS = ("conv", "full_attention")
# Keys about initialisation, which don't change results.
_DRAWN = (
    "block_mlp_init_scale",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_use_xavier_init",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig(DenseConfig):
    """Config of LFM2. attends: for each layer, True if it has attention. taps: tokens that a
    convolution sees. conv_bias: True if the convolution and its products have biases."""

    attends: tuple[bool, ...]
    taps: int
    conv_bias: bool


def read(keys: Keys, named: dict[str, Any]) -> ConvConfig:
    """Returns the model's config, read from the keys of config.json."""
    given, numbers = keys.rest, keys.take("full_attn_idxs", None)
    if given.get("block_ff_dim") is not None:
        given["intermediate_size"] = given.pop("block_ff_dim")
    fields = read_conv(keys, named)
    _same_sizes(keys, fields)
    fields["intermediate_size"] = _middle(keys, fields["intermediate_size"])
    attends = fields["attends"] or _attends(keys, numbers, fields["num_layers"])
    return ConvConfig(**fields | {"attends": some_attend(keys, attends)})


def read_conv(keys: Keys, named: dict[str, Any]) -> dict[str, Any]:
    """Reads the fields of ConvConfig; `attends` is empty without `layer_types`."""
    if keys.rest.get("tie_embedding") is not None:
        keys.rest["tie_word_embeddings"] = keys.rest.pop("tie_embedding")

    def rope_of(keys: Keys, positions: int, width: int) -> RopeConfig:
        return read_rope(keys, positions, width, theta=THETA)

    fields = read_dense(
        keys, named, eps=keys.positive("norm_eps", 1e-5), tied=True, rope_of=rope_of
    )
    layers = fields["num_layers"]
    return fields | {
        "windows": (None,) * layers,
        "qk_norm": True,
        "attends": tuple(
            kind == "full_attention" for kind in listed_types(keys, layers, KINDS) or ()
        ),
        "taps": keys.count("conv_L_cache", 3, low=2, high=MOST_TAPS),
        "conv_bias": keys.flag("conv_bias"),
    }


def _attends(keys: Keys, numbers: Any, layers: int) -> tuple[bool, ...]:
    """Returns for each layer True if it has attention. numbers: the value of `full_attn_idxs`, a
    list of layers; None: all layers have attention."""
    if numbers is None:
        return (True,) * layers
    if not isinstance(numbers, list) or not all(
        isinstance(n, int) and 0 <= n < layers for n in numbers
    ):
        raise keys.fail(f"full_attn_idxs must be numbers of the {layers} layers, not {numbers!r}")
    return tuple(layer in numbers for layer in range(layers))


def _middle(keys: Keys, size: int) -> int:
    """Returns the MLP's inner size. With block_auto_adjust_ff_dim it is two thirds of `size`, times
    a factor, rounded up to a multiple; else it is `size`."""
    multiple = keys.count("block_multiple_of", 256)
    factor = keys.positive("block_ffn_dim_multiplier", 1.0)
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return size
    adjusted = int(factor * int(2 * size / 3))
    rounded: int = multiple * -(-adjusted // multiple)
    return rounded


def _same_sizes(keys: Keys, fields: dict[str, Any]) -> None:
    """Marks keys of published configs that repeat a size as read. A key with another size stays
    unread and is refused later."""
    hidden, eps = fields["hidden_size"], fields["rms_norm_eps"]
    keys.past(
        block_dim=hidden,
        conv_dim=hidden,
        conv_dim_out=hidden,
        block_norm_eps=eps,
        num_heads=fields["heads"],
        use_pos_enc=True,
        block_use_swiglu=True,
    )
    for name in _DRAWN:
        keys.rest.pop(name, None)


def build(
    config: ConvConfig, make: Maker, feed_forward: Callable[[int, str], FeedForward] | None = None
) -> Decoder:
    """Makes the model; its weights are not loaded yet. feed_forward: function (layer, name of its
    feed-forward part) -> the part; None: an MLP."""
    from penstock.layers.decoder_layer import DecoderLayer
    from penstock.layers.maker import Heads
    from penstock.models.decoder import Decoder

    c, hidden = config, config.hidden_size
    shape = Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim)

    def layer(number: int, attends: bool) -> Block:
        at = f"model.layers.{number}"
        before, between = (
            make.norm(f"{at}.{name}_norm.weight", hidden, c.rms_norm_eps)
            for name in ("operator", "ffn")
        )
        if attends:
            names = [f"{at}.self_attn.{n}_layernorm.weight" for n in "qk"]
            norms = (
                make.norm(names[0], c.head_dim, c.rms_norm_eps),
                make.norm(names[1], c.head_dim, c.rms_norm_eps),
            )
            mixer: Any = make.attention(
                f"{at}.self_attn", hidden, shape, c.rope, norms=norms, out="out_proj"
            )
        else:
            mixer = make.short_conv(f"{at}.conv", hidden, c.taps, bias=c.conv_bias)
        part = f"{at}.feed_forward"
        if feed_forward is None:
            mlp: FeedForward = make.mlp(part, hidden, c.intermediate_size, names=NAMES)
        else:
            mlp = feed_forward(number, part)
        return DecoderLayer(before, mixer, between, mlp)

    norm = make.norm("model.embedding_norm.weight", hidden, c.rms_norm_eps)
    return Decoder(config, make, [layer(*each) for each in enumerate(c.attends)], norm)

"""LFM2: gated short convolutions, and attention with q and k normed head by head on some layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import DenseConfig, listed_types, read_dense
from penstock.models.keys import Keys
from penstock.models.rope_keys import read_rope

if TYPE_CHECKING:
    from penstock.layers.block import Block
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder

ARCHITECTURE = "Lfm2ForCausalLM"
THETA = 1_000_000.0
MOST_TAPS = 16
KINDS = ("conv", "full_attention")
# How weights were drawn once, which nothing reads.
_DRAWN = ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(DenseConfig):
    """attends: whether each layer does.   taps: tokens that a convolution sees.   conv_bias: of its three products."""

    attends: tuple[bool, ...]
    taps: int
    conv_bias: bool


def read(keys: Keys, named: dict[str, Any]) -> Lfm2Config:
    """Reads config.json."""
    given = keys.rest
    for name, theirs in (("intermediate_size", "block_ff_dim"), ("tie_word_embeddings", "tie_embedding")):
        if given.get(theirs) is not None:
            given[name] = given.pop(theirs)
    eps = keys.positive("norm_eps", 1e-5)

    def rope_of(keys: Keys, positions: int, width: int) -> RopeConfig:
        return read_rope(keys, positions, width, theta=THETA)

    fields = read_dense(keys, named, eps=eps, tied=True, rope_of=rope_of)
    _same_sizes(keys, fields, eps)
    fields["intermediate_size"] = _middle(keys, fields["intermediate_size"])
    layers = fields["num_layers"]
    return Lfm2Config(
        **fields,
        windows=(None,) * layers,
        qk_norm=True,
        attends=_attends(keys, layers),
        taps=keys.count("conv_L_cache", 3, low=2, high=MOST_TAPS),
        conv_bias=keys.flag("conv_bias"),
    )


def _attends(keys: Keys, layers: int) -> tuple[bool, ...]:
    """Reads which layers attend: by `layer_types`, else by the numbers in `full_attn_idxs`, else all."""
    numbers, types = keys.take("full_attn_idxs", None), listed_types(keys, layers, KINDS)
    if types is None:
        if numbers is None:
            return (True,) * layers
        if not isinstance(numbers, list) or not all(isinstance(n, int) and 0 <= n < layers for n in numbers):
            raise keys.fail(f"full_attn_idxs must be numbers of the {layers} layers, not {numbers!r}")
        return tuple(layer in numbers for layer in range(layers))
    return tuple(kind == "full_attention" for kind in types)


def _middle(keys: Keys, size: int) -> int:
    """Returns the MLP's width: two thirds of what is told, times a factor, up to a multiple, where it is adjusted."""
    multiple = keys.count("block_multiple_of", 256)
    factor = keys.positive("block_ffn_dim_multiplier", 1.0)
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return size
    adjusted = int(factor * int(2 * size / 3))
    rounded: int = multiple * -(-adjusted // multiple)
    return rounded


def _same_sizes(keys: Keys, fields: dict[str, Any], eps: float) -> None:
    """Passes over keys that published configs have and nothing reads; those that say another size stay, refused."""
    hidden = fields["hidden_size"]
    keys.past(
        block_dim=hidden, conv_dim=hidden, conv_dim_out=hidden, block_norm_eps=eps, num_heads=fields["heads"],
        use_pos_enc=True, block_use_swiglu=True,
    )  # fmt: skip
    for name in _DRAWN:
        keys.rest.pop(name, None)


def build(config: Lfm2Config, make: Maker) -> Decoder:
    """Makes the model, its weights not filled."""
    from penstock.layers.decoder_layer import DecoderLayer
    from penstock.layers.maker import Heads
    from penstock.models.decoder import Decoder

    c, hidden = config, config.hidden_size
    shape = Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim)

    def layer(number: int, attends: bool) -> Block:
        at = f"model.layers.{number}"
        before, between = (
            make.norm(f"{at}.{name}_norm.weight", hidden, c.rms_norm_eps) for name in ("operator", "ffn")
        )
        if attends:
            names = [f"{at}.self_attn.{n}_layernorm.weight" for n in "qk"]
            norms = (make.norm(names[0], c.head_dim, c.rms_norm_eps), make.norm(names[1], c.head_dim, c.rms_norm_eps))
            mixer: Any = make.attention(f"{at}.self_attn", hidden, shape, c.rope, norms=norms, out="out_proj")
        else:
            mixer = make.short_conv(f"{at}.conv", hidden, c.taps, bias=c.conv_bias)
        mlp = make.mlp(f"{at}.feed_forward", hidden, c.intermediate_size, names=("w1", "w3", "w2"))
        return DecoderLayer(before, mixer, between, mlp)

    norm = make.norm("model.embedding_norm.weight", hidden, c.rms_norm_eps)
    return Decoder(config, make, [layer(*each) for each in enumerate(c.attends)], norm)

"""Falcon-H1: every layer has attention and Mamba2 in parallel. Constant multipliers scale the
inputs and outputs of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.models.dense import DenseConfig, read_dense
from penstock.models.mamba_keys import MambaShape, read_mamba

if TYPE_CHECKING:
    from penstock.layers.block import Block
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder

ARCHITECTURE = "FalconH1ForCausalLM"
RENAMES = (("model.final_layernorm", "model.norm"),)
INNER = 1024  # default inner size of a Mamba2 layer
COLUMNS = 5  # outputs of Mamba2's first product: z, x, B, C and dt
# Keys that don't change results: they are about initialisation, execution in transformers, or
# unused.
_UNREAD = (
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "num_logits_to_keep",
    "mlp_expansion_factor",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconConfig(DenseConfig):
    """Config of Falcon-H1. by: the values of the fields of `Multipliers`."""

    mamba: MambaShape
    by: tuple[tuple[str, float], ...]


def read(keys: Keys, named: dict[str, Any]) -> FalconConfig:
    """Returns the model's config, read from the keys of config.json."""
    for name in _UNREAD:
        keys.take(name, None)
    keys.past(mamba_use_mlp=True, mamba_step=1)
    normed, first = keys.flag("mamba_rms_norm"), keys.flag("mamba_norm_before_gate", True)
    if normed and first:
        raise keys.fail(
            "mamba_norm_before_gate is true beside mamba_rms_norm: supported is a norm behind the"
            " gate"
        )
    fields = read_dense(keys, named, eps=1e-5)
    bias, gate = keys.flag("attention_bias"), _numbers(keys, "mlp_multipliers", 2)
    mamba = read_mamba(
        keys,
        fields["hidden_size"],
        fields["rms_norm_eps"] if normed else None,
        inner=INNER,
        out_bias="projectors_bias",
        columns=_numbers(keys, "ssm_multipliers", COLUMNS),
    )
    by = {
        "mamba_in": keys.number("ssm_in_multiplier", 1.0),
        "mamba_out": keys.number("ssm_out_multiplier", 1.0),
        "attention_in": keys.number("attention_in_multiplier", 1.0),
        "attention_out": keys.number("attention_out_multiplier", 1.0),
        "gate": gate[0],
        "mlp_out": gate[1],
    }
    return FalconConfig(
        **fields,
        windows=(None,) * fields["num_layers"],
        renames=RENAMES,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logits_scale=keys.number("lm_head_multiplier", 1.0),
        score_scale=keys.number("key_multiplier", 1.0) * fields["head_dim"] ** -0.5,
        mamba=mamba,
        by=tuple(by.items()),
    )


def _numbers(keys: Keys, name: str, count: int) -> tuple[float, ...]:
    """Reads the list of `count` numbers under the key `name`; all are 1 if it is missing."""
    given = keys.listed(name, [1.0] * count, count, f"be a list of {count} numbers")
    inner = keys.part(name, {str(number): value for number, value in enumerate(given)})
    return tuple(inner.number(str(number)) for number in range(count))


def build(config: FalconConfig, make: Maker) -> Decoder:
    """Makes the model; its weights are not loaded yet."""
    from penstock.layers.maker import Heads
    from penstock.layers.norm import Norm
    from penstock.layers.two_mixers import Multipliers, TwoMixersLayer
    from penstock.models.decoder import Decoder

    c, hidden = config, config.hidden_size
    shape, by = (
        Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim),
        Multipliers(**dict(c.by)),
    )

    def norm(name: str) -> Norm:
        return make.norm(f"{name}.weight", hidden, c.rms_norm_eps)

    def layer(number: int) -> Block:
        at = f"model.layers.{number}"
        attention = make.attention(
            f"{at}.self_attn",
            hidden,
            shape,
            c.rope,
            scale=c.score_scale,
            qkv_bias=c.qkv_bias,
            out_bias=c.o_bias,
        )
        mlp = make.mlp(f"{at}.feed_forward", hidden, c.intermediate_size, bias=c.mlp_bias)
        mamba = c.mamba.make(make, f"{at}.mamba", hidden)
        between = norm(f"{at}.pre_ff_layernorm")
        return TwoMixersLayer(norm(f"{at}.input_layernorm"), mamba, attention, between, mlp, by)

    layers = [layer(number) for number in range(c.num_layers)]
    return Decoder(
        config,
        make,
        layers,
        norm("model.norm"),
        embedding_scale=c.embedding_scale,
        logits_scale=c.logits_scale,
    )

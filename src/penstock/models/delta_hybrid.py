"""Common code of Qwen3-Next and Qwen3.5. Some of their layers have a gated delta rule, the others
gated attention. Norms multiply by 1 + w for a stored weight w."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.delta_rule import DeltaHeads
from penstock.kernels.routing import Routing
from penstock.layers.gate_form import GateForm
from penstock.models.dense import DenseConfig, listed_types, read_dense
from penstock.models.experts import (
    DRAFTING,
    MOST_DRAFTING,
    ExpertFields,
    experts_or_mlp,
    read_experts,
)
from penstock.models.mamba_keys import MOST_HEADS, MOST_TAPS, MOST_WIDTH, read_state_dtype
from penstock.models.model_config import ConfigDtype, some_attend
from penstock.models.rope_keys import read_rope

if TYPE_CHECKING:
    from penstock.layers.block import Block
    from penstock.layers.delta_maker import Tensors
    from penstock.layers.maker import Maker
    from penstock.layers.mlp import FeedForward
    from penstock.models.decoder import Decoder

KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig(DenseConfig):
    """Config of a model that mixes layers of gated delta rule and of attention. attends: for each
    layer, True if it has attention. delta: heads of the gated delta rule layers. taps: tokens that
    the convolution sees. state_dtype: dtype of the recurrent matrices."""

    attends: tuple[bool, ...]
    delta: DeltaHeads
    taps: int
    state_dtype: ConfigDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaMoeConfig(ExpertFields, DeltaConfig):
    """Config of a Qwen3-Next or Qwen3.5 model with experts."""


def read_hybrid(keys: Keys, named: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of DeltaConfig, read from config.json."""
    rope_of = partial(read_rope, part=0.25)
    fields = read_dense(keys, named, head_dim=256, rope_of=rope_of)
    layers = fields["num_layers"]
    every, types = keys.count("full_attention_interval", 4), listed_types(keys, layers, KINDS)
    if types is None:
        types = [
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(layers)
        ]
    bias = keys.flag("attention_bias")
    keys.past(attn_output_gate=True)
    state = read_state_dtype(keys, "mamba_ssm_dtype")
    ahead = keys.count("mtp_num_hidden_layers", 1, low=0, high=MOST_DRAFTING)
    own_embeddings = keys.flag("mtp_use_dedicated_embeddings")
    return fields | {
        "windows": (None,) * layers,
        "left_out": (DRAFTING,),
        "mtp": ahead == 1 and not own_embeddings,
        "qk_norm": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "attends": some_attend(keys, (kind == "full_attention" for kind in types)),
        "delta": read_heads(keys, DeltaHeads(16, 32, 128, 128)),
        "state_dtype": state,
        "taps": keys.count("linear_conv_kernel_dim", 4, low=2, high=MOST_TAPS),
    }


def read_heads(keys: Keys, absent: DeltaHeads) -> DeltaHeads:
    """Reads the heads of a delta rule. absent: defaults for missing keys."""
    key_heads = keys.count("linear_num_key_heads", absent.key_heads, high=MOST_HEADS)
    value_heads = keys.count("linear_num_value_heads", absent.value_heads, high=MOST_HEADS)
    key_width = keys.count("linear_key_head_dim", absent.key_width, high=MOST_WIDTH)
    if value_heads % key_heads:
        raise keys.fail(
            f"linear_num_value_heads ({value_heads}) is no multiple of linear_num_key_heads"
            f" ({key_heads})"
        )
    return DeltaHeads(
        key_heads,
        value_heads,
        key_width,
        keys.count("linear_value_head_dim", absent.value_width, high=MOST_WIDTH),
    )


def read_hybrid_experts(
    keys: Keys, experts: int, each: int, *, renormalise: bool
) -> dict[str, Any]:
    """Reads the fields of ExpertFields except expert_layers. experts, each: defaults of the number
    of experts and of experts per token. renormalise: see Routing."""
    experts, each = read_experts(keys, experts, each)
    return {
        "experts": experts,
        "routing": Routing(top_k=each, renormalise=renormalise),
        "expert_size": keys.count("moe_intermediate_size", 512, high=MOST),
        "shared_size": keys.count("shared_expert_intermediate_size", 512, high=MOST),
    }


def build_with_experts(
    config: DeltaMoeConfig, make: Maker, *, tensors: Tensors = "split"
) -> Decoder:
    """Makes the model; its weights are not loaded yet. tensors: see `make_delta_net`."""
    sizes = (config.num_layers, config.hidden_size, config.intermediate_size)
    parts = experts_or_mlp(
        config, make, *sizes, shared="shared_expert", shared_gate="shared_expert_gate"
    )
    return build_hybrid(config, make, parts, tensors=tensors)


def build_hybrid(
    config: DeltaConfig,
    make: Maker,
    feed_forward: Callable[[int, str], FeedForward],
    *,
    tensors: Tensors = "split",
) -> Decoder:
    """Makes the decoder. feed_forward: function (layer, name of its feed-forward part) -> the part.
    tensors: see `make_delta_net`."""
    import torch

    from penstock.layers.decoder_layer import DecoderLayer
    from penstock.layers.delta_maker import make_delta_net
    from penstock.layers.maker import Heads
    from penstock.layers.mtp_layer import QWEN, make_mtp_layer
    from penstock.models.decoder import Decoder

    c, hidden = config, config.hidden_size
    shape = Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim)

    def norm(name: str, size: int = hidden) -> Any:
        return make.norm(f"{name}.weight", size, c.rms_norm_eps, one_plus=True)

    def layer(number: int, attends: bool, at: str) -> Block:
        if attends:
            norms = (
                norm(f"{at}.self_attn.q_norm", c.head_dim),
                norm(f"{at}.self_attn.k_norm", c.head_dim),
            )
            mixer: Any = make.attention(
                f"{at}.self_attn",
                hidden,
                shape,
                c.rope,
                norms=norms,
                gate=GateForm(),
                qkv_bias=c.qkv_bias,
                out_bias=c.o_bias,
            )
        else:
            state = getattr(torch, c.state_dtype)
            mixer = make_delta_net(
                make, f"{at}.linear_attn", hidden, c.delta, c.taps, c.rms_norm_eps, state, tensors
            )
        between = norm(f"{at}.post_attention_layernorm")
        return DecoderLayer(
            norm(f"{at}.input_layernorm"), mixer, between, feed_forward(number, f"{at}.mlp")
        )

    layers = [layer(n, attends, f"model.layers.{n}") for n, attends in enumerate(c.attends)]
    drafter = None
    if make.predicts:
        block = layer(len(layers), True, "mtp.layers.0")
        drafter = make_mtp_layer(make, "mtp", QWEN, hidden, norm, block)
    return Decoder(config, make, layers, norm("model.norm"), drafter=drafter)

"""Granite 4: some layers have Mamba2, the others attention. Each layer has an MLP; some models have
experts beside it. Granite 3's four multipliers are applied. Attention may have no rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.routing import Routing
from penstock.layers.rope_config import NO_ROPE, RopeConfig
from penstock.models.dense import DenseConfig, listed_types, read_dense
from penstock.models.experts import read_experts
from penstock.models.granite import read_scales
from penstock.models.mamba_keys import MambaShape, read_mamba
from penstock.models.model_config import some_attend
from penstock.models.rope_keys import read_rope

if TYPE_CHECKING:
    from penstock.layers.block import Block
    from penstock.layers.maker import Maker
    from penstock.layers.mlp import FeedForward
    from penstock.models.decoder import Decoder

ARCHITECTURE = "GraniteMoeHybridForCausalLM"
# the name in published configs, and that of transformers 5
ATTENDS = ("attention", "full_attention")
KINDS = ("mamba", "linear_attention", *ATTENDS)
RENAMES = (
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ("shared_mlp.input_linear", "shared_mlp.gate_up_proj"),
    ("shared_mlp.output_linear", "shared_mlp.down_proj"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(DenseConfig):
    """Config of Granite 4. attends: for each layer, True if it has attention. experts: number per
    layer; 0: only the MLP. shared_size: inner size of the MLP; intermediate_size is that of an
    expert."""

    attends: tuple[bool, ...]
    mamba: MambaShape
    experts: int
    routing: Routing
    shared_size: int


def read(keys: Keys, named: dict[str, Any]) -> GraniteHybridConfig:
    """Returns the model's config, read from the keys of config.json."""
    keys.past(normalization_function="rmsnorm")
    keys.take("init_method", None)  # used for initialisation only
    fields = read_dense(keys, named, kv_heads_default_to_heads=True, rope_of=_rope)
    layers, bias = fields["num_layers"], keys.flag("attention_bias")
    types = listed_types(keys, layers, KINDS) or ["mamba"] * layers
    experts, each = read_experts(keys, 8, 2, low=0, names=("num_local_experts",))
    return GraniteHybridConfig(
        **fields | read_scales(keys),
        windows=(None,) * layers,
        renames=RENAMES,
        qkv_bias=bias,
        o_bias=bias,
        attends=some_attend(keys, (kind in ATTENDS for kind in types)),
        mamba=read_mamba(keys, fields["hidden_size"], fields["rms_norm_eps"]),
        experts=experts,
        routing=Routing(top_k=each, renormalise=True),
        shared_size=keys.count("shared_intermediate_size", 1024, high=MOST),
    )


def _rope(keys: Keys, positions: int, width: int) -> RopeConfig:
    """Reads the rope; attention has none unless position_embedding_type is "rope"."""
    rope = read_rope(keys, positions, width)
    kind = keys.text("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise keys.fail(
            f"position_embedding_type {kind!r} is not supported: supported are rope and nope"
        )
    return rope if kind == "rope" else NO_ROPE


def build(config: GraniteHybridConfig, make: Maker) -> Decoder:
    """Makes the model; its weights are not loaded yet."""
    from penstock.layers.decoder_layer import DecoderLayer
    from penstock.layers.maker import Heads
    from penstock.layers.moe_maker import make_moe, make_shared_expert
    from penstock.layers.norm import Norm
    from penstock.models.decoder import Decoder

    c, hidden = config, config.hidden_size
    shape = Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim)

    def norm(name: str) -> Norm:
        return make.norm(f"{name}.weight", hidden, c.rms_norm_eps)

    def feed_forward(at: str) -> FeedForward:

        if not c.experts:
            return make.mlp(f"{at}.shared_mlp", hidden, c.shared_size, fused=True)
        shared = make_shared_expert(make, f"{at}.shared_mlp", hidden, c.shared_size, fused=True)
        experts = f"{at}.block_sparse_moe"
        return make_moe(
            make,
            experts,
            hidden,
            c.intermediate_size,
            c.experts,
            c.routing,
            router="router.layer",
            shared=shared,
        )

    def layer(number: int, attends: bool) -> Block:
        at = f"model.layers.{number}"
        mixer: Any = c.mamba.make(make, f"{at}.mamba", hidden)
        if attends:
            mixer = make.attention(
                f"{at}.self_attn",
                hidden,
                shape,
                c.rope,
                scale=c.score_scale,
                qkv_bias=c.qkv_bias,
                out_bias=c.o_bias,
            )
        between = norm(f"{at}.post_attention_layernorm")
        return DecoderLayer(
            norm(f"{at}.input_layernorm"), mixer, between, feed_forward(at), c.residual_scale
        )

    layers = [layer(*each) for each in enumerate(c.attends)]
    return Decoder(
        config,
        make,
        layers,
        norm("model.norm"),
        embedding_scale=c.embedding_scale,
        logits_scale=c.logits_scale,
    )

"""Nemotron-H and Nemotron 3: a layer is one of Mamba2, attention, an MLP or experts. MLPs and
experts have squared ReLU; attention has no rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.json_keys import MOST, Keys
from penstock.kernels.mamba2 import Mamba2Heads
from penstock.kernels.routing import Routing
from penstock.layers.rope_config import NO_ROPE, RopeConfig
from penstock.models.dense import DenseConfig, past_own_code, read_dense
from penstock.models.experts import read_experts, read_grouped
from penstock.models.mamba_keys import (
    MOST_HEADS,
    MOST_TAPS,
    MOST_WIDTH,
    MambaShape,
    check_groups,
    past_scan,
    read_state_dtype,
)
from penstock.models.model_config import MOST_OF, some_attend

if TYPE_CHECKING:
    from penstock.layers.block import Block
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder

ARCHITECTURE = "NemotronHForCausalLM"
# letter in hybrid_override_pattern -> kind of layer
LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
# transformers 5's names -> kind of layer
NOW = {"linear_attention": "mamba", "full_attention": "attention"}
RENAMES = (
    ("backbone", "model"),
    ("model.embeddings", "model.embed_tokens"),
    ("model.norm_f", "model.norm"),
)
DRAFTING = "mtp."
# Keys that don't change results: they are about initialisation, execution in transformers, and
# layers for drafting.
_UNREAD = (
    "rescale_prenorm_residual",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "hidden_dropout",
    "num_logits_to_keep",
    "use_mamba_kernels",
    "expand",
    "moe_shared_expert_overlap",
    "num_nextn_predict_layers",
    "mtp_layers_block_type",
    "mtp_hybrid_override_pattern",
    "rope_theta",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronConfig(DenseConfig):
    """Config of Nemotron-H. kinds: for each layer mamba, attention, moe or mlp. latent: width of
    the experts' input; None: the hidden size. experts, routing, expert_size, shared_size: of the
    moe layers, see ExpertFields."""

    kinds: tuple[str, ...]
    mamba: MambaShape
    experts: int
    routing: Routing
    expert_size: int
    shared_size: int
    latent: int | None


def read(keys: Keys, named: dict[str, Any]) -> NemotronConfig:
    """Returns the model's config, read from the keys of config.json."""
    past_own_code(keys, "modeling_nemotron_h.NemotronHForCausalLM")
    for name in _UNREAD:
        keys.take(name, None)
    keys.past(
        residual_in_fp32=False,
        mlp_hidden_act="relu2",
        mamba_hidden_act="silu",
        mamba_proj_bias=False,
    )
    keys.past(n_shared_experts=1)
    kinds = _kinds(keys)
    keys.rest["num_hidden_layers"] = len(kinds)
    eps = keys.same(
        **{n: keys.positive(n, None) for n in ("layer_norm_epsilon", "norm_eps", "rms_norm_eps")}
    )
    eps = 1e-5 if eps is None else eps
    fields = read_dense(
        keys, named, head_dim=128, kv_heads_default_to_heads=True, eps=eps, rope_of=_no_rope
    )
    experts, each = read_experts(keys, 8, 2, names=("n_routed_experts", "num_local_experts"))
    return NemotronConfig(
        **fields,
        windows=(None,) * len(kinds),
        left_out=(DRAFTING,),
        renames=RENAMES,
        kinds=kinds,
        mamba=_mamba(keys, eps),
        experts=experts,
        routing=read_grouped(keys, experts, each),
        expert_size=keys.count("moe_intermediate_size", 7688, high=MOST),
        shared_size=keys.count("moe_shared_expert_intermediate_size", 7688, high=MOST),
        latent=keys.count("moe_latent_size", None, high=MOST),
    )


def _kinds(keys: Keys) -> tuple[str, ...]:
    """Reads each layer's kind: from a list of words, or one letter per layer."""
    given = {name: keys.take(name, None) for name in ("layers_block_type", "layer_types")}
    pattern, layers = (
        keys.text("hybrid_override_pattern", ""),
        keys.count("num_hidden_layers", None),
    )
    kinds = keys.same(**given)
    kinds = [LETTERS.get(letter, letter) for letter in pattern] if kinds is None else kinds
    if not isinstance(kinds, list) or not 0 < len(kinds) <= MOST_OF["num_hidden_layers"]:
        raise keys.fail(
            "hybrid_override_pattern or layers_block_type must say what each layer is: a letter or"
            " a word"
        )
    for kind in kinds:
        if not isinstance(kind, str) or NOW.get(kind, kind) not in LETTERS.values():
            words = ", ".join((*LETTERS, *LETTERS.values(), *NOW))
            raise keys.fail(f"a layer is {kind!r}: supported are {words}")
    if layers not in (None, len(kinds)):
        raise keys.fail(
            f"num_hidden_layers is {layers}, and {len(kinds)} layers are said to be something"
        )
    some_attend(keys, (NOW.get(kind, kind) == "attention" for kind in kinds))
    return tuple(NOW.get(kind, kind) for kind in kinds)


def _no_rope(keys: Keys, positions: int, width: int) -> RopeConfig:
    return NO_ROPE


def _mamba(keys: Keys, eps: float) -> MambaShape:
    heads = Mamba2Heads(
        keys.count("mamba_num_heads", 128, high=MOST_HEADS),
        keys.count("mamba_head_dim", 64, high=MOST_WIDTH),
        keys.count("n_groups", 8),
        keys.count("ssm_state_size", 128, high=MOST_WIDTH),
    )
    check_groups(keys, heads)
    past_scan(keys, "chunk_size")
    bias = keys.flag("use_bias")
    return MambaShape(
        heads=heads,
        taps=keys.count("conv_kernel", 4, low=2, high=MOST_TAPS),
        taps_bias=keys.flag("use_conv_bias", True),
        bias=bias,
        out_bias=bias,
        eps=eps,
        state_dtype=read_state_dtype(keys, "mamba_ssm_cache_dtype"),
    )


def build(config: NemotronConfig, make: Maker) -> Decoder:
    """Makes the model; its weights are not loaded yet."""
    from penstock.layers.decoder_layer import FeedForwardLayer, MixerLayer
    from penstock.layers.maker import Heads
    from penstock.layers.moe_maker import make_moe, make_shared_expert
    from penstock.layers.norm import Norm
    from penstock.models.decoder import Decoder
    from penstock.parallel.sharded_weight import Part

    c, hidden = config, config.hidden_size
    shape = Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim)

    def norm(name: str) -> Norm:
        return make.norm(f"{name}.weight", hidden, c.rms_norm_eps, wide=True)

    def layer(number: int, kind: str) -> Block:

        at, before = f"model.layers.{number}.mixer", norm(f"model.layers.{number}.norm")
        match kind:
            case "mamba":
                return MixerLayer(before, c.mamba.make(make, at, hidden))
            case "attention":
                return MixerLayer(before, make.attention(at, hidden, shape, c.rope))
            case "mlp":
                return FeedForwardLayer(before, make.relu2_mlp(at, hidden, c.intermediate_size))
        experts = make_moe(
            make,
            at,
            hidden,
            c.expert_size,
            c.experts,
            c.routing,
            gate="none",
            correction=Part(f"{at}.gate.e_score_correction_bias", (c.experts,)),
            shared=make_shared_expert(
                make, f"{at}.shared_experts", hidden, c.shared_size, gated=False
            ),
            latent=None if c.latent is None else ("fc1_latent_proj", c.latent, "fc2_latent_proj"),
        )
        return FeedForwardLayer(before, experts)

    return Decoder(config, make, [layer(*each) for each in enumerate(c.kinds)], norm("model.norm"))

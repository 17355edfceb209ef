"""Common code of decoders with experts, such as qwen3_moe. Apart from the experts they are like
Llama."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.kernels.routing import Routing
from penstock.models.dense import AROUND, DenseConfig, build_dense

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.layers.block import Mixer
    from penstock.layers.maker import Maker
    from penstock.layers.mlp import FeedForward
    from penstock.models.decoder import Decoder

MOST_EXPERTS = 2**14
MOST_GROUPS = 64
MOST_DRAFTING = 64  # the largest accepted number of layers for drafting
DRAFTING = "mtp."  # prefix of the names of tensors for drafting, which are not loaded
# added to the sum by which a token's expert weights are divided, as transformers does
GROUPED_ADDED = 1e-20


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """Fields of a config with experts. experts: per layer. expert_size: inner size of an expert.
    expert_layers: numbers of the layers with experts. shared_size: inner size of the shared expert;
    0: none. shared_scale: factor of its output. score_cap: see Moe."""

    experts: int
    routing: Routing
    expert_size: int
    expert_layers: frozenset[int]
    shared_size: int = 0
    shared_scale: float = 1.0
    score_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(ExpertFields, DenseConfig):
    """Config of a decoder that is like Llama but for its experts."""


def read_experts(
    keys: Keys,
    count: Any,
    each: Any,
    *,
    low: int = 1,
    names: tuple[str, ...] = ("num_local_experts", "num_experts"),
    per_token: str = "num_experts_per_tok",
) -> tuple[int, int]:
    """Reads the number of experts of a layer, under any of `names`, and the number of experts per
    token, under `per_token`. count, each: their defaults. low: the least number of experts."""
    given = keys.same(
        **{name: keys.count(name, None, low=low, high=MOST_EXPERTS) for name in names}
    )
    experts = keys.take(names[-1], count) if given is None else given
    each = keys.count(per_token, each)
    if experts and each > experts:
        raise keys.fail(f"{per_token} ({each}) is above {names[-1]} ({experts})")
    return experts, each


def read_sparse(keys: Keys, layers: int, experts: int) -> frozenset[int]:
    """Reads which layers have experts, from Qwen's keys: the last of each `decoder_sparse_step`
    layers, except those in `mlp_only_layers`. Returns their numbers."""
    step, alone = keys.count("decoder_sparse_step", 1), keys.take("mlp_only_layers", [])
    if not isinstance(alone, list) or any(type(layer) is not int for layer in alone):
        raise keys.fail(f"mlp_only_layers must be a list of layers, not {alone!r}")
    return frozenset(n for n in range(layers) if experts and n not in alone and (n + 1) % step == 0)


def read_listed(keys: Keys, layers: int, first: int) -> frozenset[int]:
    """Reads which layers have experts from `mlp_layer_types`. If that is missing, all but the
    `first` layers have them. Returns their numbers."""
    rule = f"say of {layers} layers each whether it is dense or sparse"
    types = keys.listed(
        "mlp_layer_types", None, layers, rule, lambda kind: kind in ("dense", "sparse")
    )
    if types is None:
        return frozenset(range(first, layers))
    return frozenset(number for number, kind in enumerate(types) if kind == "sparse")


def drafting_layers(
    keys: Keys, layers: int, absent: int, names: tuple[str, ...] = ("num_nextn_predict_layers",)
) -> tuple[str, ...]:
    """Reads how many layers for drafting follow the model's own. Returns the prefixes of their
    tensors' names. names: keys of that number. absent: the number if all of these keys are missing.
    """
    count = keys.same(**{name: keys.count(name, None, low=0, high=MOST_DRAFTING) for name in names})
    return tuple(f"model.layers.{layers + n}." for n in range(absent if count is None else count))


def read_mtp(keys: Keys, layers: int) -> dict[str, Any]:
    """Reads the fields left_out and mtp of a model whose layers for drafting are in DeepSeek-V3's
    form. One such layer can be run."""
    ahead = drafting_layers(keys, layers, 1, ("num_nextn_predict_layers", "num_mtp_layers"))
    return {"left_out": ahead, "mtp": len(ahead) == 1}


def read_sigmoids(
    keys: Keys,
    top_k: int,
    *,
    added: float,
    renormalise: bool = True,
    scale: float = 1.0,
    scale_named: str = "routed_scaling_factor",
) -> Routing:
    """Reads a router that weights experts by the sigmoids of their scores. added, renormalise,
    scale: see Routing; the last two are defaults. scale_named: key of scale."""
    return Routing(
        top_k=top_k,
        renormalise=keys.flag("norm_topk_prob", renormalise),
        sigmoid=True,
        added=added,
        scale=keys.positive(scale_named, scale),
    )


def read_grouped(
    keys: Keys,
    experts: int,
    top_k: int,
    *,
    renormalise: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    kept: int = 1,
) -> Routing:
    """Reads DeepSeek-V3's router (arXiv:2412.19437): sigmoids of scores, over groups of experts.
    renormalise, scale: defaults; see Routing. groups, kept: defaults of the numbers of groups and
    of groups that a token uses."""
    routing = read_sigmoids(keys, top_k, added=GROUPED_ADDED, renormalise=renormalise, scale=scale)
    return in_groups(keys, experts, routing, groups, kept)


def in_groups(
    keys: Keys, experts: int, routing: Routing, groups: int = 1, kept: int = 1
) -> Routing:
    """Returns `routing` with the number of groups of experts, and of groups that a token uses, as
    the keys give them. groups, kept: their defaults."""
    groups, kept = keys.count("n_group", groups, high=MOST_GROUPS), keys.count("topk_group", kept)
    if experts % groups:
        raise keys.fail(f"n_group ({groups}) does not divide the number of experts ({experts})")
    if kept > groups:
        raise keys.fail(f"topk_group ({kept}) is above n_group ({groups})")
    size = experts // groups
    if groups > 1 and size < 2 and routing.paired:
        raise keys.fail(f"n_group ({groups}) leaves a group one expert: two of each are compared")
    if routing.top_k > kept * size:
        raise keys.fail(
            f"num_experts_per_tok ({routing.top_k}) is above what topk_group ({kept}) groups of"
            f" {size} hold"
        )
    return replace(routing, groups=groups, kept_groups=kept)


def build_moe(
    config: MoeConfig,
    make: Maker,
    *,
    qk: tuple[str, str] = ("q_norm", "k_norm"),
    around: tuple[str, str, str] = AROUND,
    mixer: Callable[[str], Mixer] | None = None,
    **tensors: Any,
) -> Decoder:
    """Makes the decoder. qk, around, mixer: see build_dense. tensors: see experts_or_mlp."""
    sizes = (config.num_layers, config.hidden_size, config.intermediate_size)
    parts = experts_or_mlp(config, make, *sizes, **tensors)
    return build_dense(config, make, parts, qk=qk, around=around, mixer=mixer)


def experts_or_mlp(
    config: ExpertFields,
    make: Maker,
    layers: int,
    hidden: int,
    middle: int,
    *,
    part: str = "mlp",
    names: tuple[str, str, str] | None = None,
    router: str = "gate",
    correction: str | None = None,
    alone: bool = False,
    shared: str = "shared_experts",
    shared_gate: str | None = None,
) -> Callable[[int, str], FeedForward]:
    """Returns a function (layer, name of its MLP) -> feed-forward part: experts if the layer has
    them, else an MLP with inner size `middle`. An mtp layer, after the last one, has experts.

    layers: number of the model's layers. part: name of the mixture of experts in a layer. names:
    names of an expert's gate, up and down; None: those of an MLP. router, shared, shared_gate:
    names after `part` of the router, the shared expert and its gate (None: no gate). correction:
    name of the bias that is added to choose experts (None: no bias). alone: True if that bias is
    stored as a row [1, experts]."""
    from penstock.layers.moe_maker import make_moe, make_shared_expert
    from penstock.parallel.sharded_weight import Part

    c, lone = config, (1, config.experts) if alone else (config.experts,)

    def feed_forward(layer: int, at: str) -> FeedForward:

        if layer not in c.expert_layers and layer < layers:
            return make.mlp(at, hidden, middle)
        at = f"{at.removesuffix('mlp')}{part}"
        return make_moe(
            make,
            at,
            hidden,
            c.expert_size,
            c.experts,
            c.routing,
            router=router,
            names=names,
            correction=None if correction is None else Part(f"{at}.{correction}", lone),
            shared=(
                make_shared_expert(
                    make,
                    f"{at}.{shared}",
                    hidden,
                    c.shared_size,
                    gate=None if shared_gate is None else f"{at}.{shared_gate}",
                    scale=c.shared_scale,
                )
                if c.shared_size
                else None
            ),
            score_cap=c.score_cap,
        )

    return feed_forward

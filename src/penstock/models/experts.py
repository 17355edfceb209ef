"""Mixtures of experts over Llama's form: what mixtral, olmoe, qwen3_moe and their kin have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.kernels.routing import Routing
from penstock.models.dense import DenseConfig, build_dense
from penstock.models.keys import Keys

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.layers.mlp import FeedForward
    from penstock.models.decoder import Decoder

MOST_EXPERTS = 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(DenseConfig):
    """expert_layers: those that have experts."""

    experts: int
    routing: Routing
    expert_size: int
    expert_layers: frozenset[int]


def read_experts(
    keys: Keys, count: int, each: int, *, low: int = 1,
    names: tuple[str, ...] = ("num_local_experts", "num_experts"), per_token: str = "num_experts_per_tok",
) -> tuple[int, int]:  # fmt: skip
    """Reads how many experts a layer has, under any of `names`, and a token. count, each: where nothing says."""
    given = keys.same(**{name: keys.count(name, None, low=low, high=MOST_EXPERTS) for name in names})
    experts = count if given is None else given
    each = keys.count(per_token, each)
    if experts and each > experts:
        raise keys.fail(f"{per_token} ({each}) is above {names[-1]} ({experts})")
    return experts, each


def read_sigmoids(keys: Keys, top_k: int, *, added: float) -> Routing:
    """Reads how experts are weighed by the sigmoids of their scores. added: to what weights are divided by."""
    return Routing(
        top_k=top_k,
        renormalise=keys.flag("norm_topk_prob", True),
        sigmoid=True,
        added=added,
        scale=keys.positive("routed_scaling_factor", 1.0),
    )


def build_moe(config: MoeConfig, make: Maker, part: str = "mlp", names: tuple[str, str, str] | None = None) -> Decoder:
    """Makes the decoder. part: what the checkpoint calls experts in a layer.   names: of an expert's gate, up, down."""
    c = config

    def feed_forward(layer: int, at: str) -> FeedForward:
        if layer not in c.expert_layers:
            return make.mlp(at, c.hidden_size, c.intermediate_size)
        at = f"{at.removesuffix('mlp')}{part}"
        return make.moe(at, c.hidden_size, c.expert_size, c.experts, c.routing, names=names)

    return build_dense(c, make, feed_forward)

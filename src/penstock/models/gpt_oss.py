"""gpt-oss (arXiv:2508.10925): experts with biases and clamped gates. Every second layer has a
window, and each head has a sink in the softmax. The experts are published in four bits (MXFP4);
checkpoints in a float dtype with the same tensor names are read too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.json_keys import Keys
from penstock.kernels.routing import Routing
from penstock.models.dense import DenseConfig, build_dense, given_window, read_dense, read_windows
from penstock.models.experts import read_experts
from penstock.models.rope_keys import need_rope, read_rope

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.layers.mlp import FeedForward
    from penstock.models.decoder import Decoder

ARCHITECTURE = "GptOssForCausalLM"
THETA, GROUP = 150_000.0, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(DenseConfig):
    """Config of gpt-oss. clamp: bounds of the experts' activation
    (kernels.expert_matrix.Experts)."""

    experts: int
    routing: Routing
    clamp: tuple[float, float]


def read(keys: Keys, named: dict[str, Any]) -> GptOssConfig:
    """Returns the model's config, read from the keys of config.json."""
    keys.take("initial_context_length", None)  # the same number as yarn's original context
    each = keys.same(
        **{name: keys.count(name, None) for name in ("num_experts_per_tok", "experts_per_token")}
    )
    need_rope(keys)
    fields = read_dense(keys, named, head_dim=64, eps=1e-5, rope_of=partial(read_rope, theta=THETA))
    experts, each = read_experts(keys, 128, each or 4)
    window = given_window(keys, 128)
    windows = read_windows(keys, fields["num_layers"], window, lambda layer: layer % 2 == 0)
    bias = keys.flag("attention_bias", True)
    clamp = keys.positive("swiglu_alpha", 1.702), keys.positive("swiglu_limit", 7.0)
    if fields["hidden_size"] % GROUP or fields["intermediate_size"] % GROUP:
        raise keys.fail(f"hidden_size and intermediate_size must be multiples of {GROUP}")
    return GptOssConfig(
        **fields,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        wide_norms=True,
        sinks=True,
        experts=experts,
        routing=Routing(top_k=each, renormalise=True),
        clamp=clamp,
    )


def build(config: GptOssConfig, make: Maker) -> Decoder:
    """Makes the model from its config."""
    from penstock.layers.moe_maker import make_whole_moe

    c, stored = config, config.quantization
    four = stored is not None and stored.method == "mxfp4"

    def feed_forward(layer: int, at: str) -> FeedForward:

        return make_whole_moe(
            make,
            at,
            c.hidden_size,
            c.intermediate_size,
            c.experts,
            c.routing,
            clamp=c.clamp,
            four=four,
        )

    return build_dense(c, make, feed_forward)

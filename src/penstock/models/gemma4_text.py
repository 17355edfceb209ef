"""Gemma 4's text model: per-layer inputs, and layers that share KV. Layers without a sliding window
have wider heads. The last layers read an earlier layer's keys and values. Some models have experts
beside the MLP. Source: transformers' published code; there is no report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.json_keys import REQUIRED, Keys
from penstock.kernels.routing import Routing
from penstock.layers.rope_config import RopeConfig
from penstock.models.dense import listed_types
from penstock.models.experts import read_experts
from penstock.models.gemma3_text import GELU
from penstock.models.model_config import MOST_OF, ModelConfig, check_heads, read_common, size
from penstock.models.rope_keys import read_rope

if TYPE_CHECKING:
    from penstock.layers.maker import Maker
    from penstock.models.decoder import Decoder

ARCHITECTURE = "Gemma4ForCausalLM"
GLOBAL_THETA, LOCAL_THETA, PATTERN, CONTEXT, WINDOW, GLOBAL_WIDTH = (
    1_000_000.0,
    10_000.0,
    6,
    131_072,
    512,
    512,
)
KINDS = ("sliding_attention", "full_attention")
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_THETA},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": GLOBAL_THETA,
        "partial_rotary_factor": 0.25,
    },
}
MOST_INPUTS = 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Sizes of attention in the layers with a window, or in those without. keys_as_values: see
    AttentionKind."""

    kv_heads: int
    width: int
    rope: RopeConfig
    keys_as_values: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(ModelConfig):
    """Shapes and switches of Gemma 4.

    local, whole: attention of layers with and without a window. readers: number of last layers that
    store no keys and values, but read those of the last earlier layer of the same kind.
    wide_readers: True if the MLPs of these layers are twice as wide. own_inputs: width of each
    layer's per-layer input; 0: none. experts: per layer; 0: none."""

    intermediate_size: int
    heads: int
    local: Span
    whole: Span
    rms_norm_eps: float
    bias: bool
    logits_cap: float | None
    readers: int
    wide_readers: bool
    own_inputs: int
    experts: int
    expert_size: int
    routing: Routing

    def span(self, layer: int) -> Span:
        return self.whole if self.windows[layer] is None else self.local

    def source(self, layer: int) -> int | None:
        """Returns the number of the earlier layer whose keys and values a layer reads; None: it has
        its own."""
        first = self.num_layers - self.readers
        if layer < first:
            return None
        alike = [
            n for n in range(first) if (self.windows[n] is None) is (self.windows[layer] is None)
        ]
        return alike[-1]


def read(keys: Keys, named: dict[str, Any]) -> Gemma4Config:
    """Returns the model's config, read from the keys of config.json."""
    common = read_common(keys, tied=True)
    layers, hidden = common["num_layers"], common["hidden_size"]
    types = listed_types(keys, layers, KINDS) or [
        KINDS[(n + 1) % PATTERN == 0] for n in range(layers)
    ]
    types[-1] = "full_attention"  # transformers does the same, whatever layer_types says
    positions, heads = (
        size(keys, "max_position_embeddings", CONTEXT),
        size(keys, "num_attention_heads", 8),
    )
    act = keys.text("hidden_activation", "gelu_pytorch_tanh")
    if act not in GELU:
        raise keys.fail(
            f"hidden_activation {act!r} is not supported: only {' and '.join(map(repr, GELU))} are"
        )
    if keys.text("use_bidirectional_attention", None) == "all":
        raise keys.fail(
            "use_bidirectional_attention 'all' is not supported: text is made from left to right"
        )
    local, whole = _spans(keys, types, hidden, heads, positions)
    window, readers = (
        keys.count("sliding_window", WINDOW),
        keys.count("num_kv_shared_layers", 0, low=0),
    )
    if readers and not {*types} <= {*types[: max(0, layers - readers)]}:
        raise keys.fail(
            f"num_kv_shared_layers ({readers}) of {layers} layers leaves a kind of layer_types no"
            " layer before them whose keys and values they could read: lower it"
        )
    vocabulary = keys.count(
        "vocab_size_per_layer_input", common["vocab_size"], high=MOST_OF["vocab_size"]
    )
    own = keys.count("hidden_size_per_layer_input", 256, low=0, high=MOST_INPUTS)
    if own and vocabulary != common["vocab_size"]:
        raise keys.fail(
            f"vocab_size_per_layer_input ({vocabulary}) is not vocab_size ({common['vocab_size']}):"
            " every token has inputs of the layers' own"
        )
    mixed = keys.flag("enable_moe_block")
    if not mixed:
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            keys.take(name, None)
    experts, each = 0, 1
    if mixed:
        experts, each = read_experts(
            keys, REQUIRED, REQUIRED, names=("num_experts",), per_token="top_k_experts"
        )
    return Gemma4Config(
        **named,
        **common,
        context=positions,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        intermediate_size=size(keys, "intermediate_size"),
        heads=heads,
        local=local,
        whole=whole,
        rms_norm_eps=keys.positive("rms_norm_eps", 1e-6),
        bias=keys.flag("attention_bias"),
        logits_cap=keys.positive("final_logit_softcapping", None),
        readers=readers,
        wide_readers=keys.flag("use_double_wide_mlp"),
        own_inputs=own,
        experts=experts,
        expert_size=(
            keys.count("moe_intermediate_size", high=MOST_OF["intermediate_size"]) if mixed else 0
        ),
        routing=Routing(top_k=each, renormalise=True),
    )


def _spans(
    keys: Keys, types: list[str], hidden: int, heads: int, positions: int
) -> tuple[Span, Span]:
    """Reads the attention of layers with and without a window."""
    width, kv_heads = size(keys, "head_dim", 256), size(keys, "num_key_value_heads", 4)
    shared = keys.flag("attention_k_eq_v")
    whole_width = keys.count("global_head_dim", GLOBAL_WIDTH, high=MOST_OF["head_dim"])
    fewer = keys.count("num_global_key_value_heads", None, high=MOST_OF["num_key_value_heads"])
    whole_heads = fewer if shared and fewer is not None else kv_heads
    # transformers 5 writes this key instead of the keys for layers without a window
    each = keys.take("per_layer_config", None)
    if each is not None:
        whole_width, whole_heads = _of_layers(keys, each, types, width, kv_heads)
    given = keys.take("rope_parameters", ROPES)
    if not isinstance(given, dict) or given.keys() != {*KINDS}:
        raise keys.fail(
            "rope_parameters must have sliding_attention and full_attention, an object each"
        )
    spans = []
    sizes = ((width, kv_heads, LOCAL_THETA), (whole_width, whole_heads, GLOBAL_THETA))
    for kind, (own, of_kind, theta) in zip(KINDS, sizes, strict=True):
        check_heads(keys, hidden, heads, of_kind, own)
        inner = keys.part(kind, {"rope_parameters": given[kind]})
        rope = read_rope(inner, positions, own, theta=theta, part=1.0, proportional=True)
        keyed = shared and kind == "full_attention"
        spans.append(Span(kv_heads=of_kind, width=own, rope=rope, keys_as_values=keyed))
    return spans[0], spans[1]


def _of_layers(
    keys: Keys, each: Any, types: list[str], width: int, kv_heads: int
) -> tuple[int, int]:
    """Reads from `per_layer_config` the head width and number of KV heads of layers without a
    window, which must be equal in all of them. each: the key's value. width, kv_heads: defaults."""
    whole = {str(n) for n, kind in enumerate(types) if kind == "full_attention"}
    told = list(each.values()) if isinstance(each, Mapping) and {*each} == whole else [None]
    one = told[0]
    if (
        not isinstance(one, Mapping)
        or one.keys() - {"head_dim", "num_key_value_heads"}
        or any(n != one for n in told)
    ):
        raise keys.fail(
            "per_layer_config must give head_dim and num_key_value_heads of the layers without a"
            " window, all alike: other layers of their own are not supported"
        )
    inner = keys.part("per_layer_config", one)
    return size(inner, "head_dim", width), size(inner, "num_key_value_heads", kv_heads)


def build(config: Gemma4Config, make: Maker) -> Decoder:
    """Makes the model from its config."""
    import torch

    from penstock.layers.attention import Attention
    from penstock.layers.gemma4_layer import Gemma4Layer, OwnInput, RoutedBeside
    from penstock.layers.layer_inputs import LayerInputs
    from penstock.layers.maker import Heads
    from penstock.layers.moe_maker import make_moe
    from penstock.layers.norm import Norm
    from penstock.layers.reading_attention import ReadingAttention
    from penstock.models.decoder import Decoder
    from penstock.parallel.sharded_weight import Part, Weight

    c, hidden = config, config.hidden_size
    owners: dict[int, Attention] = {}

    def norm(name: str, length: int = hidden, first: Norm | None = None) -> Norm:
        return make.norm(f"{name}.weight", length, c.rms_norm_eps, wide=True, first=first)

    def attention(number: int, at: str) -> Attention | ReadingAttention:
        span, source = c.span(number), c.source(number)
        q_norm, queries = norm(f"{at}.q_norm", span.width), c.heads * span.width
        if source is not None:
            query = make.column_linear([(f"{at}.q_proj", queries, c.heads)], hidden, bias=c.bias)
            out = make.row_linear(f"{at}.o_proj", hidden, queries, c.heads, bias=c.bias)
            return ReadingAttention(at, owners[source], query, out, q_norm)
        shape = Heads(heads=c.heads, kv_heads=span.kv_heads, width=span.width)
        owners[number] = make.attention(
            at,
            hidden,
            shape,
            span.rope,
            window=c.windows[number],
            scale=1.0,
            qkv_bias=c.bias,
            out_bias=c.bias,
            norms=(q_norm, norm(f"{at}.k_norm", span.width)),
            keys_as_values=span.keys_as_values,
            normed_values=True,
        )
        return owners[number]

    def routed(at: str) -> RoutedBeside:

        scale = Part(f"{at}.router.scale", (hidden,))
        before_router = Weight(
            [scale], torch.float32, make.device, transform=lambda read: read * hidden**-0.5
        )
        moe = make_moe(
            make,
            at,
            hidden,
            c.expert_size,
            c.experts,
            c.routing,
            router="router.proj",
            gate="gelu_tanh",
            answer_scale=f"{at}.router.per_expert_scale",
        )
        return RoutedBeside(
            norm(f"{at}.post_feedforward_layernorm_1"),
            Norm(before_router, c.rms_norm_eps),
            norm(f"{at}.pre_feedforward_layernorm_2"),
            moe,
            norm(f"{at}.post_feedforward_layernorm_2"),
        )

    def own_input(at: str) -> OwnInput:
        return OwnInput(
            make.linear(f"{at}.per_layer_input_gate", c.own_inputs, hidden),
            make.linear(f"{at}.per_layer_projection", hidden, c.own_inputs),
            norm(f"{at}.post_per_layer_input_norm"),
        )

    def layer(number: int) -> Gemma4Layer:
        at, reads = f"model.layers.{number}", c.source(number) is not None
        middle = c.intermediate_size * (2 if c.wide_readers and reads else 1)
        return Gemma4Layer(
            number,
            norm(f"{at}.input_layernorm"),
            attention(number, f"{at}.self_attn"),
            norm(f"{at}.pre_feedforward_layernorm", first=norm(f"{at}.post_attention_layernorm")),
            make.mlp(f"{at}.mlp", hidden, middle, activation="gelu_tanh"),
            norm(f"{at}.post_feedforward_layernorm"),
            Weight([Part(f"{at}.layer_scalar", (1,))], make.dtype, make.device),
            routed(at) if c.experts else None,
            own_input(at) if c.own_inputs else None,
        )

    def inputs() -> LayerInputs:
        width = c.num_layers * c.own_inputs
        table = "model.embed_tokens_per_layer.weight"
        return LayerInputs(
            make.own_table(table, c.vocab_size, width, scale=c.own_inputs**0.5),
            make.linear("model.per_layer_model_projection", width, hidden),
            hidden**-0.5,
            norm("model.per_layer_projection_norm", c.own_inputs),
        )

    return Decoder(
        config,
        make,
        [layer(number) for number in range(c.num_layers)],
        norm("model.norm"),
        embedding_scale=float(hidden) ** 0.5,
        logits_cap=c.logits_cap,
        layer_inputs=inputs() if c.own_inputs else None,
    )

"""EAGLE-3 drafters as the `speculators` package stores them: their config.json and their layer
(layers/eagle_layer.py). A drafter belongs to one model, whose sizes it must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import CheckpointError
from penstock.json_keys import Keys, read_json
from penstock.models.dense import DenseConfig
from penstock.models.model_config import ModelConfig
from penstock.models.read_config import model_config_of

if TYPE_CHECKING:
    from penstock.layers.eagle_layer import EagleLayer
    from penstock.layers.maker import Maker

# Sizes of transformers' configs, of which `speculators` leaves out those that are defaults.
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
}
# prefixes of tensors that training needs alone, and of the map of tokens, which is read by itself
_BESIDE = ("t2d", "d2t", "verifier_")
KINDS = ("eagle3",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """layer: config of the drafter's layer. tokens: number of tokens that it can draft. reads:
    layers of the model whose outputs it reads. joined_norm, normed_residual, on_normed: see
    EagleLayer. vocabulary: the model's number of tokens. folder: where its weights are. own_table:
    True if it has an embedding of its own."""

    layer: DenseConfig
    tokens: int
    reads: tuple[int, ...]
    joined_norm: bool
    normed_residual: bool
    on_normed: bool
    vocabulary: int
    folder: Path
    own_table: bool = False


def read_eagle3(folder: Path, model: ModelConfig) -> EagleConfig:
    """Reads `folder`/config.json. model: config of the model that it drafts for. Raises
    CheckpointError, whose message is one line, for what isn't a drafter of this model."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no config.json: give a drafter's folder as speculators saves it"
        )
    keys = Keys(read_json(path), str(path))
    kind = keys.take("speculators_model_type", None)
    if kind not in KINDS:
        raise keys.fail(
            f"speculators_model_type {kind!r} is not served: convert the drafter to speculators'"
            f" format, of type {' or '.join(KINDS)}"
        )
    layer = _layer(keys)
    # a key that isn't known changes how good drafts are, never an answer: it isn't refused
    if keys.flag("fc_norm"):
        raise keys.fail("fc_norm is not supported: take a drafter with norm_before_fc or neither")
    for name, own, theirs in (
        ("vocab_size", layer.vocab_size, model.vocab_size),
        ("hidden_size", layer.hidden_size, model.hidden_size),
        ("target_hidden_size", keys.count("target_hidden_size", None), model.hidden_size),
    ):
        if own not in (None, theirs):
            raise keys.fail(f"{name} is {own}, and the model's {theirs}: it drafts for another one")
    tokens = keys.count("draft_vocab_size", 32000, high=layer.vocab_size)
    return EagleConfig(
        layer=layer,
        tokens=tokens,
        reads=_reads(keys, model.num_layers),
        joined_norm=keys.flag("norm_before_fc"),
        normed_residual=keys.flag("norm_before_residual"),
        on_normed=keys.flag("norm_output"),
        vocabulary=model.vocab_size,
        folder=folder,
    )


def _layer(keys: Keys) -> DenseConfig:
    raw: Mapping[str, Any] = keys.object("transformer_layer_config")
    kind = raw.get("model_type")
    if kind not in _ABSENT:
        raise keys.fail(
            f"transformer_layer_config is of model_type {kind!r}: only {' and '.join(_ABSENT)} are"
            " supported"
        )
    given = {name: value for name, value in raw.items() if name != "architectures"}
    where = f"{keys.where}, transformer_layer_config"
    layer = cast(DenseConfig, model_config_of(_ABSENT[kind] | given, where))
    if layer.num_layers != 1 or layer.windows != (None,):
        raise keys.fail("transformer_layer_config must have one layer, without a sliding window")
    return replace(layer, architecture="drafter (EAGLE-3)", left_out=_BESIDE, quantization=None)


def _reads(keys: Keys, layers: int) -> tuple[int, ...]:
    """Returns the layers whose outputs are read. The file counts what enters a layer."""
    rule = f"list distinct layers between 1 and {layers}, the number of the model's"
    ids = keys.take("eagle_aux_hidden_state_layer_ids", None)
    ids = [2, layers // 2, layers - 3] if ids is None else ids
    right = isinstance(ids, list) and all(type(each) is int and 1 <= each <= layers for each in ids)
    if not right or not ids or len(set(ids)) < len(ids):
        raise keys.fail(f"eagle_aux_hidden_state_layer_ids must {rule}, not {ids!r}")
    return tuple(each - 1 for each in ids)


def make_eagle3(config: EagleConfig, make: Maker) -> EagleLayer:
    """Makes the layer; its weights are not loaded yet."""
    from penstock.layers.eagle_layer import EagleLayer
    from penstock.layers.maker import Heads
    from penstock.layers.norm import Norm
    from penstock.quant.choose import all_plain

    c, own = config.layer, replace(make, scheme_of=all_plain)
    hidden, at, count = c.hidden_size, "layers.0", len(config.reads)

    def norm(name: str, size: int = hidden) -> Norm:
        return own.norm(f"{name}.weight", size, c.rms_norm_eps)

    def of_head(name: str) -> Norm:
        return norm(f"{at}.self_attn.{name}", c.head_dim)

    return EagleLayer(
        reads=config.reads,
        joined_norm=norm("input_norm", count * hidden) if config.joined_norm else None,
        join=own.linear("fc", hidden, count * hidden),
        embedding_norm=norm(f"{at}.input_layernorm"),
        hidden_norm=norm(f"{at}.hidden_norm"),
        attention=own.attention(
            f"{at}.self_attn",
            hidden,
            Heads(heads=c.heads, kv_heads=c.kv_heads, width=c.head_dim),
            c.rope,
            into=2 * hidden,
            qkv_bias=c.qkv_bias,
            out_bias=c.o_bias,
            norms=(of_head("q_norm"), of_head("k_norm")) if c.qk_norm else None,
        ),
        mlp_norm=norm(f"{at}.post_attention_layernorm"),
        mlp=own.mlp(f"{at}.mlp", hidden, c.intermediate_size, bias=c.mlp_bias),
        norm=norm("norm"),
        head=own.linear("lm_head", config.tokens, hidden),
        embedding=(
            own.embedding("embed_tokens.weight", config.vocabulary, hidden)
            if config.own_table
            else None
        ),
        normed_residual=config.normed_residual,
        on_normed=config.on_normed,
        vocabulary=config.vocabulary,
        columns=own.vocabulary_range(config.vocabulary),
    )

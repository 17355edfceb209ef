"""Config.json of drafters, as the `speculators` package saves it. A drafter belongs to one model,
whose sizes it must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from penstock.errors import CheckpointError
from penstock.json_keys import REQUIRED, Keys, read_json
from penstock.models.dense import DenseConfig
from penstock.models.model_config import ModelConfig
from penstock.models.read_config import model_config_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorConfig:
    """layer: config of the drafter's layers. tokens: number of tokens that it can draft. reads:
    layers of the model whose outputs it reads. vocabulary: the model's number of tokens. folder:
    where its weights are."""

    layer: DenseConfig
    tokens: int
    reads: tuple[int, ...]
    vocabulary: int
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(SpeculatorConfig):
    """joined_norm, normed_residual, on_normed: see EagleLayer. own_table: True if it has an
    embedding of its own."""

    joined_norm: bool
    normed_residual: bool
    on_normed: bool
    own_table: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(SpeculatorConfig):
    """block: most tokens of a draft, the newest token included. mask: id of the token that stands
    for one to be predicted."""

    block: int
    mask: int


def read_speculator(folder: Path, method: str, model: ModelConfig) -> SpeculatorConfig:
    """Reads `folder`/config.json. method: type of the drafter, "eagle3" or "dflash". model: config
    of the model that it drafts for. Raises CheckpointError, whose message is one line, for what
    isn't a drafter of this type and model."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no config.json: give a drafter's folder as speculators saves it"
        )
    keys = Keys(read_json(path), str(path))
    kind = keys.take("speculators_model_type", None)
    if kind != method:
        if kind in [*_READ]:
            raise keys.fail(f"speculators_model_type is {kind!r}: take method {kind!r}")
        raise keys.fail(
            f"speculators_model_type {kind!r} is not served: convert the drafter to speculators'"
            f" format, of type {' or '.join(_READ)}"
        )
    layer = _layer(keys)
    for name, own, theirs in (
        ("vocab_size", layer.vocab_size, model.vocab_size),
        ("hidden_size", layer.hidden_size, model.hidden_size),
        ("target_hidden_size", keys.count("target_hidden_size", None), model.hidden_size),
    ):
        if own not in (None, theirs):
            raise keys.fail(f"{name} is {own}, and the model's {theirs}: it drafts for another one")
    named = {
        "layer": layer,
        "tokens": keys.count("draft_vocab_size", 32000, high=layer.vocab_size),
        "vocabulary": model.vocab_size,
        "folder": folder,
    }
    # a key that isn't known changes how good drafts are, never an answer: it isn't refused
    return _READ[method](keys, named, model.num_layers)


def _read_eagle3(keys: Keys, named: dict[str, Any], layers: int) -> EagleConfig:
    if keys.flag("fc_norm"):
        raise keys.fail("fc_norm is not supported: take a drafter with norm_before_fc or neither")
    if named["layer"].num_layers != 1:
        raise keys.fail("transformer_layer_config must have one layer")
    between = [2, layers // 2, layers - 3]
    return EagleConfig(
        **named,
        reads=_reads(keys, "eagle_aux_hidden_state_layer_ids", between, layers),
        joined_norm=keys.flag("norm_before_fc"),
        normed_residual=keys.flag("norm_before_residual"),
        on_normed=keys.flag("norm_output"),
    )


def _read_dflash(keys: Keys, named: dict[str, Any], layers: int) -> DFlashConfig:
    if keys.flag("sample_from_anchor"):
        raise keys.fail("sample_from_anchor is not supported: take a drafter without it")
    layer: DenseConfig = named["layer"]
    # the model's own embedding is read, and its head unless fewer tokens are drafted
    beside = ("embed_tokens.", *(("lm_head.",) if named["tokens"] == layer.vocab_size else ()))
    # its layers are Qwen3's, whatever model_type they have
    layer = replace(layer, left_out=_BESIDE + beside, qk_norm=True, mlp_bias=False)
    return DFlashConfig(
        **named | {"layer": layer},
        reads=_reads(keys, "aux_hidden_state_layer_ids", None, layers),
        block=keys.count("block_size", 8, low=2),
        mask=keys.count("mask_token_id", low=0, high=layer.vocab_size - 1),
    )


_READ: dict[str, Callable[[Keys, dict[str, Any], int], SpeculatorConfig]] = {
    "eagle3": _read_eagle3,
    "dflash": _read_dflash,
}


def _layer(keys: Keys) -> DenseConfig:
    raw: Mapping[str, Any] = keys.object("transformer_layer_config")
    kind = raw.get("model_type")
    if kind not in [*_ABSENT]:
        raise keys.fail(
            f"transformer_layer_config is of model_type {kind!r}: only {' and '.join(_ABSENT)} are"
            " supported"
        )
    given = {name: value for name, value in raw.items() if name != "architectures"}
    where = f"{keys.where}, transformer_layer_config"
    layer = cast(DenseConfig, model_config_of(_ABSENT[kind] | given, where))
    if any(window is not None for window in layer.windows):
        raise keys.fail("transformer_layer_config has layers of sliding_attention: take another")
    return replace(layer, architecture="drafter", left_out=_BESIDE, quantization=None)


def _reads(keys: Keys, name: str, absent: list[int] | None, layers: int) -> tuple[int, ...]:
    """Returns the layers whose outputs are read. The file counts what enters a layer. name: of the
    key. absent: its value if the file lacks it; None: the file must have it."""
    rule = f"list distinct layers between 1 and {layers}, the number of the model's"
    ids = keys.take(name, REQUIRED if absent is None else absent)
    right = isinstance(ids, list) and all(type(each) is int and 1 <= each <= layers for each in ids)
    if not right or not ids or len(set(ids)) < len(ids):
        raise keys.fail(f"{name} must {rule}, not {ids!r}")
    return tuple(each - 1 for each in ids)

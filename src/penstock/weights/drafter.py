"""Drafters with a checkpoint of their own: found, read and loaded beside the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from penstock.config import Config, LoadFormat
from penstock.errors import CheckpointError, UsageError
from penstock.layers.eagle_layer import EagleLayer
from penstock.models.build_model import DrafterConfig
from penstock.models.decoder import Decoder
from penstock.models.eagle3 import EagleConfig, read_eagle3
from penstock.models.model_config import ModelConfig
from penstock.weights.checkpoint import Entry, read_entries, read_tensors
from penstock.weights.find import adapter_folder
from penstock.weights.place import dummy_weights, find_weights, load_weights

TABLE, MAP = "embed_tokens.weight", "d2t"  # names of its embedding and of its map of tokens


def drafter_of(config: Config, model: ModelConfig) -> DrafterConfig | None:
    """Returns the layer that drafts for a model, as `speculative_config` asks; None: no layer does.
    Raises UsageError if no such layer of this model is served, CheckpointError for a drafter of
    another model."""
    asked = config.speculative
    if asked is None or asked.method == "ngram":
        return None
    if asked.model is None:
        if not model.mtp:
            raise UsageError(
                "speculative_config: method 'mtp' needs a layer that predicts tokens ahead, and none"
                f" is served of a {model.architecture} with this config.json: take method 'ngram'",
                param="speculative_config",
            )
        return "mtp"
    try:
        eagle = read_eagle3(adapter_folder(asked.model, "a drafter's"), model)
        # dummy weights may be replaced by the folder's later, which then must fit
        if config.model.load_format == "dummy" and not any(eagle.folder.glob("*.safetensors")):
            return eagle
        return replace(eagle, own_table=TABLE in read_entries(eagle.folder))
    except CheckpointError as error:
        raise CheckpointError(f"speculative_config: {error}") from error


@dataclass(slots=True)
class _Loadable:
    """A drafter in the form that `place` fills."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    layer: EagleLayer
    drafter: None = None

    def weights(self) -> Any:
        return self.layer.weights()


def find_drafter(model: Decoder, config: EagleConfig) -> dict[str, Entry]:
    """Returns the entries of the tensors of a model's drafter, by name. The model may be on torch's
    meta device. Raises CheckpointError if names, shapes or dtypes aren't those of the drafter, or
    if its map of tokens is none."""
    try:
        entries = find_weights(_loadable(model, config), config.folder)
        if config.tokens < config.vocabulary:
            _tokens(config)
    except CheckpointError as error:
        raise CheckpointError(f"speculative_config: {error}") from error
    return entries


def load_drafter(
    model: Decoder,
    config: EagleConfig,
    entries: dict[str, Entry],
    load_format: LoadFormat,
    seed: int,
    *,
    finite: bool,
) -> None:
    """Fills the weights of a model's drafter from its folder, or with random numbers. Raises
    CheckpointError for numbers that aren't finite. entries: from `find_drafter`. load_format, seed,
    finite: as in `load_model`."""
    own, layer = _loadable(model, config), cast(EagleLayer, model.drafter)
    few = config.tokens < config.vocabulary
    if load_format == "dummy":
        dummy_weights(own, seed)
        if few:
            layer.tokens = torch.arange(config.tokens, device=model.device)
        return
    load_weights(own, entries, finite=finite)
    if few:
        layer.tokens = _tokens(config).to(model.device)


def _loadable(model: Decoder, config: EagleConfig) -> Any:
    layer = cast(EagleLayer, model.drafter)
    return _Loadable(config.layer, model.device, model.dtype, layer)


def _tokens(config: EagleConfig) -> torch.Tensor:
    """Returns the model's token of each token that the drafter can draft, [tokens] int64."""
    entry, where = read_entries(config.folder).get(MAP), config.folder
    if entry is None or entry.shape != (config.tokens,):
        raise CheckpointError(
            f"the safetensors of {where} lack {MAP!r} [{config.tokens}], the tokens that the"
            " drafter drafts: take its whole checkpoint"
        )
    ((_, offset),) = read_tensors([entry])
    tokens = offset.to(torch.int64) + torch.arange(config.tokens)
    known = set(tokens.tolist())
    if len(known) < config.tokens or not known <= set(range(config.vocabulary)):
        raise CheckpointError(
            f"{entry.shard}: tensor {MAP!r} is no map to {config.vocabulary} tokens: take another"
            " checkpoint"
        )
    return tokens

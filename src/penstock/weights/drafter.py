"""Drafters with a checkpoint of their own: found, read and loaded beside the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.config import Config, LoadFormat
from penstock.errors import CheckpointError, UsageError
from penstock.layers.eagle_layer import EagleLayer
from penstock.models.build_model import DrafterConfig
from penstock.models.decoder import Decoder
from penstock.models.eagle3 import EagleConfig, read_eagle3
from penstock.models.model_config import ModelConfig
from penstock.weights.checkpoint import read_entries, read_tensors
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
    eagle = read_eagle3(adapter_folder(asked.model), model)
    if config.model.load_format == "dummy":
        return eagle
    return replace(eagle, own_table=TABLE in read_entries(eagle.folder))


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


def load_drafter(
    model: Decoder, config: EagleConfig, load_format: LoadFormat, seed: int, *, finite: bool
) -> None:
    """Fills the weights of a model's drafter from its folder, or with random numbers. Raises
    CheckpointError for a faulty checkpoint. load_format, seed, finite: as in `load_model`."""
    layer: Any = model.drafter
    own: Any = _Loadable(config.layer, model.device, model.dtype, layer)
    few = config.tokens < config.vocabulary
    if load_format == "dummy":
        dummy_weights(own, seed)
        if few:
            layer.tokens = torch.arange(config.tokens, device=model.device)
        return
    load_weights(own, find_weights(own, config.folder), finite=finite)
    if few:
        layer.tokens = _tokens(config).to(model.device)


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

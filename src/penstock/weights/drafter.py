"""Drafters with a checkpoint of their own: found, read and loaded beside the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from penstock.config import Config
from penstock.demo import drafter_folder
from penstock.errors import CheckpointError, UsageError
from penstock.layers.dflash_layer import DFlashLayer
from penstock.layers.eagle_layer import EagleLayer
from penstock.models.build_model import DrafterConfig
from penstock.models.decoder import Decoder
from penstock.models.model_config import ModelConfig
from penstock.models.speculators_format import (
    DFlashConfig,
    EagleConfig,
    SpeculatorConfig,
    read_speculator,
)
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
        own = asked.model == "demo"
        folder = drafter_folder() if own else adapter_folder(asked.model, "a drafter's")
        found = read_speculator(folder, asked.method, model)
        # dummy weights may be replaced by the folder's later, which then must fit
        there = config.model.load_format != "dummy" or any(found.folder.glob("*.safetensors"))
        if isinstance(found, EagleConfig) and there:
            found = replace(found, own_table=TABLE in read_entries(found.folder))
    except CheckpointError as error:
        raise CheckpointError(f"speculative_config: {error}") from error
    if isinstance(found, DFlashConfig) and found.block <= (most := asked.num_speculative_tokens):
        raise UsageError(
            f"speculative_config: num_speculative_tokens is {most}, and {found.folder} has a"
            f" block_size of {found.block}: take at most {found.block - 1}",
            param="speculative_config",
        )
    return found


@dataclass(slots=True)
class _Loadable:
    """A drafter in the form that `place` fills."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    layer: EagleLayer | DFlashLayer
    drafter: None = None

    def weights(self) -> Any:
        return self.layer.weights()


@dataclass(slots=True)
class FoundDrafter:
    """A drafter's checkpoint. entries: its tensors by name. tokens: the model's token of each that
    it can draft, [tokens] int64; None: the same."""

    entries: dict[str, Entry]
    tokens: torch.Tensor | None


def find_drafter(model: Decoder, config: SpeculatorConfig) -> FoundDrafter:
    """Returns the checkpoint of a model's drafter. The model may be on torch's meta device. Raises
    CheckpointError if names, shapes or dtypes aren't those of the drafter, or if its map of tokens
    is none."""
    try:
        entries = find_weights(_loadable(model, config), config.folder)
        few = config.tokens < config.vocabulary
        return FoundDrafter(entries, _tokens(config) if few else None)
    except CheckpointError as error:
        raise CheckpointError(f"speculative_config: {error}") from error


def load_drafter(
    model: Decoder, config: SpeculatorConfig, found: FoundDrafter | None, seed: int, *, finite: bool
) -> None:
    """Fills the weights of a model's drafter. Raises CheckpointError for numbers that aren't
    finite. found: from `find_drafter`; None: random numbers are drawn from `seed`. finite: as in
    `load_model`."""
    own = _loadable(model, config)
    if found is None:
        dummy_weights(own, seed)
        tokens = torch.arange(config.tokens) if config.tokens < config.vocabulary else None
    else:
        load_weights(own, found.entries, finite=finite)
        tokens = found.tokens
    if own.layer.head is not None:
        own.layer.head.tokens = None if tokens is None else tokens.to(model.device)


def _loadable(model: Decoder, config: SpeculatorConfig) -> Any:
    return _Loadable(
        config.layer, model.device, model.dtype, cast(EagleLayer | DFlashLayer, model.drafter)
    )


def _tokens(config: SpeculatorConfig) -> torch.Tensor:
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

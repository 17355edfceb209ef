"""build_model: makes a model (Decoder) from its config."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from penstock.errors import UsageError
from penstock.layers.maker import Maker
from penstock.models.build_drafter import make_drafter
from penstock.models.decoder import Decoder
from penstock.models.families import find_family
from penstock.models.model_config import ModelConfig
from penstock.models.speculators_format import SpeculatorConfig
from penstock.parallel.layout import ALONE, Layout
from penstock.quant.choose import SchemeOf, all_plain

DrafterConfig = Literal["mtp"] | SpeculatorConfig


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    positions: int | None = None,
    layout: Layout = ALONE,
    scheme_of: SchemeOf = all_plain,
    *,
    table_in_host: bool = False,
    drafter: DrafterConfig | None = None,
) -> Decoder:
    """Makes the model of a config; its weights are not loaded yet. positions: length of the rotary
    tables; None: the config's context. scheme_of: function from a matrix's name to its quantization
    scheme. table_in_host: True puts per-layer embeddings in host memory if the model is on a GPU.
    drafter: layer that drafts tokens, the model's own ("mtp") or another; None: no layer. On
    torch's meta device no memory is allocated. Raises UsageError for a drafter that this model
    can't have."""
    family = find_family(config.model_type)
    assert family is not None, "a config is of a family"
    make = Maker(
        dtype,
        device,
        positions or config.context,
        layout,
        scheme_of,
        table_in_host=table_in_host,
        predicts=drafter == "mtp",
    )
    model = family.build(config, make)
    if isinstance(drafter, SpeculatorConfig):
        if model.norm.first is not None:
            raise UsageError(
                "speculative_config: a drafter's folder is for models that add what their layers"
                f" give as it is, and a {config.architecture} norms it first: take method 'ngram'",
                param="speculative_config",
            )
        model.take_drafter(make_drafter(drafter, replace(make, scheme_of=all_plain)))
        model.rope_bytes = sum(table.nbytes for table in make.rope_tables.values())
    return model

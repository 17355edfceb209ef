"""build_model: a config -> its Decoder, by its model type's file."""

from __future__ import annotations

import torch

from penstock.layers.maker import Maker
from penstock.models.decoder import Decoder
from penstock.models.families import find_family
from penstock.models.model_config import ModelConfig
from penstock.parallel.layout import ALONE, Layout
from penstock.quant.choose import SchemeOf, all_plain


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    positions: int | None = None,
    layout: Layout = ALONE,
    scheme_of: SchemeOf = all_plain,
    *,
    table_in_host: bool = False,
) -> Decoder:
    """Makes the model of a config, weights not loaded. positions: length of the rotary tables;
    None: the config's context. table_in_host: put per-layer embeddings in host memory, beside a
    GPU. On torch's meta device it takes no memory."""
    family = find_family(config.model_type)
    assert family is not None, "a config is of a family"
    return family.build(
        config, Maker(dtype, device, positions or config.context, layout, scheme_of, table_in_host)
    )

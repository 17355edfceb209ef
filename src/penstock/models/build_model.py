"""build_model: makes a model (Decoder) from its config."""

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
    """Makes the model of a config; its weights are not loaded yet. positions: length of the rotary
    tables; None: the config's context. scheme_of: function from a matrix's name to its quantization
    scheme. table_in_host: True puts per-layer embeddings in host memory if the model is on a GPU.
    On torch's meta device no memory is allocated."""
    family = find_family(config.model_type)
    assert family is not None, "a config is of a family"
    return family.build(
        config, Maker(dtype, device, positions or config.context, layout, scheme_of, table_in_host)
    )

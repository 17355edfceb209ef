"""load_model: a folder -> a Decoder that is filled and arranged for its kernels, or an error and nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.config import LoadFormat
from penstock.errors import CapacityError
from penstock.kernels.ops import Ops
from penstock.models.decoder import Decoder
from penstock.models.model_config import ModelConfig, read_model_config
from penstock.weights.place import dummy_weights, load_weights


def load_model(
    folder: Path,
    *,
    load_format: LoadFormat,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    seed: int,
    positions: int | None = None,
    config: ModelConfig | None = None,
) -> Decoder:
    """Reads config.json (unless `config` is given) and the weights; `dummy` draws them from `seed` and reads none.

    positions: length of the rotary table, None: the config's context. CheckpointError for a folder that is not sound,
    CapacityError where the weights don't fit the device.
    """
    config = config or read_model_config(folder)
    try:
        model = Decoder(config, ops, dtype, device, positions)
        if load_format == "dummy":
            dummy_weights(model, seed)
        else:
            load_weights(model, folder)
        model.prepare()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise CapacityError(
                f"the weights of {folder} in {str(dtype).removeprefix('torch.')} don't fit the memory of {device}: "
                "take a smaller model or dtype" + (", or --device cpu" if device.type == "cuda" else "")
            ) from error
        raise
    return model

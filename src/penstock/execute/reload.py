"""reload: replaces the weights of a running model. New weights are loaded beside the old ones,
checked, and swapped in between two steps.

On CUDA, graphs hold the arrays' addresses, so values are copied into the existing arrays; on the
CPU, and while an engine sleeps, the layers are replaced. The old weights are untouched until all
new ones are loaded and found finite. Knows a model and a folder; no rows, no requests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config import Quantization
from penstock.errors import CheckpointError, UsageError
from penstock.models.build_model import DrafterConfig
from penstock.models.decoder import Decoder
from penstock.models.read_config import read_model_config
from penstock.parallel.layout import Layout
from penstock.shared_weights import WeightsSource
from penstock.weights.load import load_model

PLACED = "the weights of {} lie otherwise than those of the engine: give them as those were ({})"


def load_beside(
    model: Decoder,
    source: WeightsSource,
    layout: Layout,
    quantization: Quantization,
    seed: int,
    drafter: DrafterConfig | None = None,
) -> Decoder:
    """Returns a model with the weights of a folder or of another process, prepared like `model`
    (fused, quantized), which is not changed. drafter: the model's; one with a checkpoint of its own
    is loaded from there again. Raises CheckpointError if the weights are of another model,
    incomplete or not finite, UsageError if their arrays have other shapes or dtypes, and
    CapacityError if both don't fit the device."""
    shared, folder = (
        (None, source) if isinstance(source, Path) else (source, Path("another process"))
    )
    if shared is None and not os.path.isdir(
        folder
    ):  # os.path.isdir, unlike Path.is_dir, never raises for impossible names
        raise CheckpointError(
            f"no folder {folder}: name one as transformers saves it, on the engine's machine"
        )
    config = read_model_config(folder) if shared is None else model.config
    named = (each.name for each in fields(config))
    other = [name for name in named if getattr(config, name) != getattr(model.config, name, None)]
    if other or type(config) is not type(model.config):
        raise CheckpointError(
            f"{folder} is of another model: its {', '.join(other) or 'model_type'} differ"
        )
    new = load_model(
        folder,
        load_format="auto",
        dtype=model.dtype,
        device=model.device,
        ops=model.ops,
        seed=seed,
        positions=model.positions,
        config=config,
        layout=layout,
        quantization=quantization,
        finite=True,
        shared=shared,
        in_host=lambda shape: model.table_in_host,
        drafter=drafter,
    )
    for keeper, own in zip(new.owners, model.owners, strict=True):
        keeper.form = own.form  # the KV cache keeps its dtype and scales
    old, fresh = (dict(arrays_of(parts)) for parts in (model.parts, new.parts))
    forms = [{name: (a.shape, a.dtype) for name, a in arrays.items()} for arrays in (old, fresh)]
    if forms[0] != forms[1]:
        name = next(name for name in {**old, **fresh} if forms[0].get(name) != forms[1].get(name))
        raise UsageError(PLACED.format(folder, name), param="model_path")
    return new


def take_weights(model: Decoder, new: Decoder, *, captured: bool) -> None:
    """Replaces a model's weights by loaded ones. captured: True if CUDA graphs hold the arrays'
    addresses."""
    if captured:
        fresh = dict(arrays_of(new.parts))
        for name, array in arrays_of(model.parts):
            if (
                array.device != model.device
            ):  # wait: kernels of the last step may still read this host memory
                torch.cuda.synchronize(model.device)
            array.copy_(fresh[name])
    else:
        model.take_parts_of(new)


def arrays_of(
    part: Any, at: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields every array in a part of a model once, with the attribute path to it."""
    seen = set() if seen is None else seen
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        yield at, part
    for name, each in parts_within(part):
        yield from arrays_of(each, f"{at}.{name}", seen)


def parts_within(part: Any) -> list[tuple[Any, Any]]:
    """Returns the (number or name, member) pairs of a list, a tuple, a dict, or a
    penstock object."""
    if isinstance(part, (list, tuple)):
        return list(enumerate(part))
    if isinstance(part, dict):
        return list(part.items())
    if type(part).__module__.startswith("penstock.") and not isinstance(part, (type, Layout)):
        slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
        names = sorted({*slots, *getattr(part, "__dict__", ())})
        return [(name, getattr(part, name, None)) for name in names]
    return []

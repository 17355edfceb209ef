"""load_model: makes a Decoder from a model folder. Its weights are loaded and prepared for their
kernels."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from penstock.config import LoadFormat, Quantization
from penstock.errors import CapacityError, CheckpointError, UsageError
from penstock.kernels.ops import Ops
from penstock.models.build_model import DrafterConfig, build_model
from penstock.models.decoder import Decoder
from penstock.models.model_config import ModelConfig
from penstock.models.read_config import read_model_config
from penstock.models.speculators_format import SpeculatorConfig
from penstock.models.text_part import TextOfWhole
from penstock.parallel.layout import ALONE, Layout
from penstock.quant.choose import choose_schemes
from penstock.shared_weights import SharedWeights
from penstock.weights.adapter import Adapter
from penstock.weights.checkpoint import Entry
from penstock.weights.drafter import find_drafter, load_drafter
from penstock.weights.find import adapter_folder
from penstock.weights.place import dummy_weights, find_weights, load_weights
from penstock.weights.shared import OpenedWeights

log = logging.getLogger(__name__)


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
    layout: Layout = ALONE,
    room: int | None = None,
    quantization: Quantization = "auto",
    finite: bool = False,
    shared: SharedWeights | None = None,
    lora: str | None = None,
    in_host: Callable[[Decoder], bool] = lambda shape: False,
    drafter: DrafterConfig | None = None,
) -> Decoder:
    """Returns the model of a folder. Reads config.json, unless `config` is given, and the weights.
    With load_format `dummy` it draws random weights from `seed` instead.

    positions: length of the rotary table; None: the config's context. room: bytes that the model
    may take on the device; None: unlimited. finite: True refuses weights that are not finite.
    shared: weights in another process's memory, used in place of the folder's. lora: folder or hub
    id of an adapter to merge into the weights. in_host: function of the model on torch's meta
    device that returns True if the per-layer embeddings go to host memory. drafter: see
    `build_model`; it is loaded too. Raises CheckpointError for a faulty checkpoint and
    CapacityError if the model doesn't fit the device. Both are raised before memory is allocated,
    if the headers suffice to find the fault."""
    config = config or read_model_config(folder)
    schemes = choose_schemes(quantization, config.quantization)
    meta = torch.device("meta")
    shape = build_model(config, dtype, meta, positions, layout, schemes, drafter=drafter)
    with nullcontext() if shared is None else OpenedWeights(shared, device) as opened:
        told = layout.rank == 0 and opened is None
        entries = {} if load_format == "dummy" else find_weights(shape, folder, opened, told=told)
        of_drafter = None
        if isinstance(drafter, SpeculatorConfig) and load_format != "dummy":
            of_drafter = find_drafter(shape, drafter)
        adapter = (
            None
            if lora is None
            else find_adapter(lora, shape, entries, load_format, told=layout.rank == 0)
        )
        if config.text_part is not None and told:
            print(f"penstock: {folder}: {left_out(config.text_part)}", file=sys.stderr, flush=True)
        if config.quantization is not None and config.quantization.narrow_rows and told:
            print(f"penstock: {folder}: {wide_rows(dtype)}", file=sys.stderr, flush=True)
        if room is not None:
            check_room(shape, folder, device, room)
        beside = in_host(shape)
        if layout.rank == 0 and opened is None:
            log.info("loads %s in %s on %s", folder, str(dtype).removeprefix("torch."), device)
        try:
            model = build_model(
                config,
                dtype,
                device,
                positions,
                layout,
                schemes,
                table_in_host=beside,
                drafter=drafter,
            )
            if load_format == "dummy":
                dummy_weights(model, seed)
            else:
                told = layout.rank == 0 and opened is None
                load_weights(
                    model, entries, finite=finite, opened=opened, adapter=adapter, told=told
                )
            if isinstance(drafter, SpeculatorConfig):
                load_drafter(model, drafter, of_drafter, seed, finite=finite)
            model.prepare(ops)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise CapacityError(
                    f"the weights of {folder} in {str(dtype).removeprefix('torch.')} don't fit the"
                    f" memory of {device}: take a smaller model or dtype"
                    + (", or --device cpu" if device.type == "cuda" else "")
                ) from error
            raise
    return model


def find_adapter(
    lora: str, shape: Decoder, entries: dict[str, Entry], load_format: LoadFormat, *, told: bool
) -> Adapter:
    """Reads an adapter and checks that it fits a model (which may be on torch's meta device) and
    its checkpoint. shape: that model. told: True prints notices to stderr. Raises CheckpointError
    or UsageError."""
    if load_format == "dummy":
        raise UsageError(
            "an adapter is merged into a checkpoint's weights, not into dummy ones", param="lora"
        )
    if shape.config.text_part is not None:
        raise CheckpointError(
            f"an adapter is not merged into a {shape.config.text_part.architecture}: by peft it is"
        )
    adapter, stored = Adapter.read(adapter_folder(lora)), shape.config.quantization
    matrices = {part.name for weight in shape.weights() for part in weight.parts}
    adapter.check(entries, matrices, None if stored is None else stored.method)
    if told:
        line = f"the adapter {lora} is merged into {len(adapter.pairs)} matrices of the model"
        print(f"penstock: {line}", file=sys.stderr, flush=True)
    return adapter


def left_out(part: TextOfWhole) -> str:
    """Returns the notice for a multimodal checkpoint of which only the text is served."""
    return (
        f"of this {part.architecture} the text is served; its vision part is left out, and images"
        " are refused"
    )


def wide_rows(dtype: torch.dtype) -> str:
    """Returns the notice for a checkpoint whose config asks for four-bit activations; they stay in
    `dtype`."""
    return (
        "its weights are served in four bits, its activations stay in"
        f" {str(dtype).removeprefix('torch.')}: their scales (input_global_scale, input_scale),"
        " where it has them, are not used"
    )


def check_room(model: Decoder, folder: Path, device: torch.device, room: int) -> None:
    """Raises CapacityError if a model, which may be on torch's meta device, takes more than `room`
    bytes."""
    sizes = (model.weights_bytes, model.rope_bytes, room)
    if sizes[0] + sizes[1] > room:
        weights, table, free = (f"{size / 2**30:.2f} GiB" for size in sizes)
        raise CapacityError(
            f"the weights of {folder} take {weights}, {model.positions} positions {table}, and"
            f" {free} is free on {device}: take a smaller model or dtype, or set max_model_len"
            " lower"
        )

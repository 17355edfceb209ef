"""Place: copies checkpoint tensors into a model's weights.

Names, shapes and dtypes are checked before memory is taken for the first weight. Loading needs
little memory beyond the model: for a CPU, shards are mapped and each tensor is converted into its
place; for a GPU, tensors are streamed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import CheckpointError, UsageError
from penstock.json_keys import shown
from penstock.models.decoder import Decoder
from penstock.parallel.sharded_weight import FLOATS, Expected, Part, Weight
from penstock.weights.adapter import Adapter
from penstock.weights.checkpoint import (
    AGAIN,
    Entry,
    of_text,
    read_entries,
    read_tensors,
    renamed,
    unstacked,
)
from penstock.weights.kv_scales import OF_PRODUCTS, SUFFIXES
from penstock.weights.loaded_count import LoadedCount
from penstock.weights.shared import OpenedWeights
from penstock.weights.stream import stream_tensors

# Parts of the names of an mtp layer's tensors that are taken as copies of the model's embedding and
# head.
COPIED = (".shared_head.head.", ".embed_tokens.")
Read = Callable[[list[Entry]], Iterator[tuple[Entry, Tensor]]]
# Endings of tensor names that are skipped: rope frequencies of early Llama checkpoints, which the
# config gives, and scales for an eight-bit KV cache.
UNREAD = (".rotary_emb.inv_freq", *(f".self_attn{each}" for each in SUFFIXES), *OF_PRODUCTS)


def find_weights(
    model: Decoder, folder: Path, opened: OpenedWeights | None = None, *, told: bool = False
) -> dict[str, Entry]:
    """Returns the entries of the tensors that `model` needs, by name: from the headers of
    `folder`'s safetensors, or from another process's weights (`opened`).

    Raises CheckpointError if names, shapes or dtypes aren't those of `model`, which may be on
    torch's meta device: so a wrong checkpoint is found before memory is allocated. Raises
    UsageError if the model has an mtp layer and the checkpoint has none. told: True prints to
    stderr that such layers are left out."""
    found = of_text(
        read_entries(folder) if opened is None else opened.entries, model.config.text_part
    )
    ahead = {name for name in found if name.startswith(model.config.left_out)}
    predicts = model.drafter is not None and model.drafter.of_model
    if predicts:
        if not ahead:
            raise UsageError(
                f"speculative_config: method 'mtp' needs a layer that predicts tokens ahead, and the"
                f" safetensors of {folder} have none: take weights that have it, or start the engine"
                " with method 'ngram'",
                param="speculative_config",
            )
        ahead = {name for name in ahead if any(part in name for part in COPIED)}
    entries = {name: entry for name, entry in found.items() if name not in ahead}
    if told and ahead and not predicts:
        print(
            f"penstock: {folder}: its layers that predict more tokens (mtp) are left out",
            file=sys.stderr,
            flush=True,
        )
    entries = unstacked(
        renamed(entries, model.config.renames),
        {part.name: part.shape for weight in model.weights() for part in weight.parts},
    )
    _check(entries, model, folder)
    return entries


@torch.inference_mode()
def load_weights(
    model: Decoder,
    entries: dict[str, Entry],
    *,
    finite: bool = False,
    opened: OpenedWeights | None = None,
    adapter: Adapter | None = None,
    told: bool = False,
) -> None:
    """Fills every weight of `model`. entries, opened: result and argument of `find_weights`.
    adapter: merged into the weights; it was checked to fit the model.

    told: True shows progress. finite: True checks that all numbers are finite; scales, norms and
    biases are always checked. Raises CheckpointError for a number that is not finite or doesn't fit
    the dtype."""
    places: dict[str, tuple[Weight, Part, Tensor]] = {}
    for weight in model.weights():
        for part, place in weight.places():
            places[part.name] = weight, part, place
    wanted = [entry for name, entry in entries.items() if name in places]
    adapted = {} if adapter is None else adapter.pairs
    read: Read = read_tensors if opened is None else opened.read
    count, hosted = LoadedCount(len(wanted)) if told else None, list[Entry]()
    if opened is None and model.device.type == "cuda":
        # tensors that stay in host memory are not streamed to the GPU
        hosted = [entry for entry in wanted if places[entry.name][0].in_host]
        # each rank reads only its own share of the tensors
        wanted = [
            e if e.name in adapted else _share(e, *places[e.name][:2])
            for e in wanted
            if e not in hosted
        ]
        read = partial(stream_tensors, device=model.device)
    for entry, tensor in chain(read(wanted), read_tensors(hosted)):
        weight, part, place = places[entry.name]
        tensor = tensor if adapter is None else adapter.merged(entry.name, tensor)
        weight.fill(part, place, tensor)
        if finite and tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise _not_finite(entry)
        narrowed = entry.dtype != "F16" or entry.name in adapted
        if weight.dtype == torch.float16 and narrowed and not place.isfinite().all():
            raise CheckpointError(
                f"{entry.shard}: tensor {entry.name!r} doesn't fit float16: use bfloat16 or float32"
            )
        if count is not None:
            count.one_more()
    if count is not None:
        count.end()
    _check_small(model, entries)
    for weight in model.weights():
        for name in weight.again:
            if name in entries:
                _check_same(entries[name], weight, read_tensors if opened is None else opened.read)


def _share(entry: Entry, weight: Weight, part: Part) -> Entry:
    """Returns the entry of the part of a tensor that this rank reads."""
    if (
        part.cut is None
        or part.shares == 1
        or part.fused
        or entry.turned
        or not weight.fills_by_share
    ):
        return entry
    return entry.narrow(part.cut, *part.bounds)


@torch.inference_mode()
def dummy_weights(model: Decoder, seed: int) -> None:
    """Fills every weight with random numbers from -1e-3 to 1e-3, or from the range of its scheme.
    The numbers depend only on the seed, the config, the dtype and the kind of device."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for weight in model.weights():
        weight.draw(generator, model.dtype)


def _check(entries: dict[str, Entry], model: Decoder, folder: Path) -> None:
    config = model.config
    wanted = {part.name: (part, weight) for weight in model.weights() for part in weight.parts}
    again = {name: (weight.parts[0], weight) for weight in model.weights() for name in weight.again}
    for name, entry in entries.items():
        if name in wanted or name in again:
            _check_entry(entry, *(wanted.get(name) or again[name]))
        elif not name.endswith(UNREAD):
            raise CheckpointError(
                f"{entry.shard} holds tensor {shown(name)}, which a {config.architecture} with this"
                " config.json doesn't have: config.json and weights must be of one model"
            )
    missing = [
        name for name, (_, weight) in wanted.items() if name not in entries and not weight.optional
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"the safetensors of {folder} lack tensor {missing[0]!r}{more}, which a"
            f" {config.architecture} with this config.json has: {AGAIN}, or mend config.json"
        )


def _check_entry(entry: Entry, part: Part, weight: Weight) -> None:
    if isinstance(weight, Expected) and weight.unread:
        return
    if entry.dtype not in weight.stored:
        which = (
            "only unquantized weights are read"
            if weight.stored == FLOATS
            else "this checkpoint's scheme has"
        )
        raise CheckpointError(
            f"{entry.shard}: tensor {entry.name!r} is {entry.dtype}, and {which} "
            f"({', '.join(sorted(weight.stored))}): take the model's unquantized checkpoint"
        )
    if (entry.shape or (1,)) != part.shape:  # a single number may be stored with no dimension
        raise CheckpointError(
            f"{entry.shard}: tensor {entry.name!r} has shape {list(entry.shape)}, config.json asks"
            f" for {list(part.shape)}: config.json and weights must be of one model"
        )


def _check_small(model: Decoder, entries: dict[str, Entry]) -> None:
    """Raises CheckpointError if a scale, norm or bias is not finite, since one such number makes
    every output NaN. Waits for the GPU once."""
    small = [
        weight for weight in model.weights() if weight.is_small and not isinstance(weight, Expected)
    ]
    told = torch.stack([weight.are_finite(weight.value) for weight in small]).tolist()
    for weight, finite in zip(small, told, strict=True):
        if not finite:
            raise _not_finite(
                entries[
                    next(p.name for p, place in weight.places() if not weight.are_finite(place))
                ]
            )


def _not_finite(entry: Entry) -> CheckpointError:
    where = f"{entry.shard}: tensor {entry.name!r}"
    return CheckpointError(
        f"{where} holds what is no finite number: {AGAIN}, or take another checkpoint"
    )


def _check_same(entry: Entry, weight: Weight, read: Read) -> None:
    """Raises CheckpointError if a checkpoint with a tied head also stores the head and it differs
    from the embedding. entry: the stored head. weight: the loaded embedding."""
    for _, head in read([entry]):
        own = weight.parts[0].local(head)
        if not torch.equal(own.to(weight.value.device, weight.dtype), weight.value):
            raise CheckpointError(
                f"{entry.shard}: {entry.name} differs from {weight.parts[0].name}, but config.json"
                " says tie_word_embeddings: set it to false, or remove the tensor"
            )

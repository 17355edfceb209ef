"""write_quantized: writes a quantized copy of a model folder. Any engine that supports
compressed-tensors can read it.

Works shard by shard and holds little more than one shard in memory. A shard that exists already is
not written again. Knows folders and names; `quant/write_compressed.py` knows how a matrix is
stored."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.disk import sync_folder, why_not_written, write_whole
from penstock.errors import CheckpointError, UsageError
from penstock.json_keys import read_json
from penstock.models.build_model import build_model
from penstock.models.decoder import EMBEDDING, HEAD, Decoder
from penstock.models.model_config import ModelConfig
from penstock.models.read_config import read_model_config
from penstock.parallel.sharded_weight import MadeWeight, Part
from penstock.quant.choose import choose_schemes, made_kind
from penstock.quant.fp4 import MadeFp4
from penstock.quant.integers import made_group
from penstock.quant.write_compressed import MadeKind, store, told_in_config
from penstock.weights.adapter import Adapter
from penstock.weights.checkpoint import INDEX, Entry, read_entries, read_header, read_tensors
from penstock.weights.find import HUB_FILES

WRITTEN_HERE = ("*.safetensors", INDEX, "config.json")  # all other files are copied unchanged


def write_quantized(
    folder: Path,
    out: Path,
    kind: MadeKind,
    tell: Callable[[str], None] = lambda line: None,
    keep_wide: Sequence[str] = (),
    adapter: Adapter | None = None,
    fp8_head: bool = False,
    rounded: Path | None = None,
) -> None:
    """Writes the model of `folder`, quantized as `kind`, to the new model folder `out`. Shards that
    exist in `out` are kept; they must come from the same folder and kind.

    tell: is called with a line of text for each shard. keep_wide: name patterns (`*.down_proj`) of
    matrices that are not quantized; matrices that are multiplied together (q, k and v; gate and up)
    are then all left unquantized. adapter: LoRA adapter merged in before quantizing. fp8_head: with
    kind fp8, also quantize the head; a tied head is written as a tensor of its own, and the
    embedding is not quantized. rounded: folder with matrices that are already quantized, one file
    `NAME.safetensors` each, which are written as they are.

    Raises CheckpointError if weights are faulty or already quantized, UsageError for shapes that
    don't fit the kind and for a pattern without a match, CapacityError if the disk is full."""
    config = read_model_config(folder)
    kinds, group = kinds_written(folder, kind, keep_wide, fp8_head)
    untied = config.tie_word_embeddings and HEAD in kinds
    shards: dict[Path, list[Entry]] = {}
    every = read_entries(folder)
    for entry in every.values():
        shards.setdefault(entry.shard, []).append(entry)
    largest = (
        _largest_together(model_written(config, kind, fp8_head), every, adapter)
        if kind == "nvfp4"
        else {}
    )
    out.mkdir(parents=True, exist_ok=True)
    for number, (shard, entries) in enumerate(shards.items(), 1):
        if not (out / shard.name).exists():
            stored = dict(_stored(entries, kinds, group, adapter, untied, rounded, largest))
            save_whole(stored, out / shard.name)
        tell(f"shard {number} of {len(shards)}: {shard.name}")
    wide = [e.name for entries in shards.values() for e in entries if len(e.shape) == 2]
    ignored = [
        name.removesuffix(".weight") for name in wide if name.removesuffix(".weight") not in kinds
    ]
    raw = read_json(folder / "config.json") | ({"tie_word_embeddings": False} if untied else {})
    # vLLM's head is no `Linear`, so it needs its own config group
    others = {name: of for name, of in kinds.items() if of != kind or name == HEAD}
    if config.tie_word_embeddings and not untied:
        if head := made_kind(kind, HEAD):
            others[HEAD] = head  # quantized from the embedding at load
        else:
            ignored.append(HEAD)  # transformers' head is a `Linear`
    _write_json(
        out / "config.json",
        {**raw, "quantization_config": told_in_config(kind, group, ignored, others)},
    )
    if len(shards) > 1:
        held = {
            entry.name: shard.name for shard in shards for entry in read_header(out / shard.name)
        }
        size = sum((out / shard.name).stat().st_size for shard in shards)
        _write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": held})
    for path in folder.iterdir():
        kept = path.is_file() and any(fnmatch(path.name, each) for each in HUB_FILES)
        if kept and not any(fnmatch(path.name, each) for each in WRITTEN_HERE):
            shutil.copyfile(path, out / path.name)


def kinds_written(
    folder: Path, kind: MadeKind, keep_wide: Sequence[str] = (), fp8_head: bool = False
) -> tuple[dict[str, MadeKind], int]:
    """Returns the name and kind of each matrix that `write_quantized` quantizes, and the number of
    inputs that share an int4 scale (0: no int4). Raises the errors of `write_quantized`."""
    config = read_model_config(folder)
    if config.quantization is not None:
        raise CheckpointError(
            f"{folder} is quantized already ({config.quantization.method}): take the wide model"
        )
    model = model_written(config, kind, fp8_head)
    made = {part.name.removesuffix(".weight"): part for part in _made_parts(model, keep_wide)}
    kinds = {name: made_kind(kind, name) or kind for name in made}
    group = min((made_group(made[name]) for name, of in kinds.items() if of == "int4"), default=0)
    if config.text_part is not None:
        raise CheckpointError(
            f"{folder} is a {config.text_part.architecture}, and quantized checkpoints are made of"
            f" text alone: serve it with --quantization {kind}, which makes the numbers at load"
        )
    return kinds, group


def model_written(config: ModelConfig, kind: MadeKind, fp8_head: bool) -> Decoder:
    """Returns the model that `write_quantized` writes if keep_wide is empty, on torch's meta
    device."""
    tied = config.tie_word_embeddings and not fp8_head
    schemes = choose_schemes(kind, fp8_head=fp8_head)
    return build_model(
        replace(config, tie_word_embeddings=tied),
        torch.bfloat16,
        torch.device("meta"),
        scheme_of=schemes,
    )


def _made_parts(model: Decoder, keep_wide: Sequence[str]) -> Iterator[Part]:
    """Yields the Part of each checkpoint tensor that becomes a quantized matrix. keep_wide: see
    `write_quantized`."""
    unused = set(keep_wide)
    for weight in model.weights():
        if isinstance(weight, MadeWeight):
            names = [part.name.removesuffix(".weight") for part in weight.parts]
            kept = {each for each in keep_wide if any(fnmatch(name, each) for name in names)}
            unused -= kept
            if not kept:
                yield from weight.parts
    if unused:
        raise UsageError(
            f"keep_wide {min(unused)!r} fits no matrix that would be quantized: name them as the"
            " checkpoint does, as model.layers.0.mlp.down_proj, or by a pattern, as *.down_proj",
            param="keep_wide",
        )


def _largest_together(
    model: Decoder, entries: dict[str, Entry], adapter: Adapter | None
) -> dict[str, Tensor]:
    """Returns, for each nvfp4 matrix, the largest magnitude among the matrices multiplied together
    with it (q, k, v; gate, up of an MLP or expert). vLLM multiplies these by one global scale, and
    llm-compressor makes them share it."""
    largest: dict[str, Tensor] = {}
    for weight in model.weights():
        together: dict[str, list[Entry]] = {}
        for part in weight.parts if isinstance(weight, MadeFp4) else ():
            if part.name in entries:
                together.setdefault(part.name.rsplit(".", 2)[0], []).append(entries[part.name])
        for some in together.values():
            read = [
                tensor if adapter is None else adapter.merged(e.name, tensor)
                for e, tensor in read_tensors(some)
            ]
            most = torch.stack([matrix.abs().max().float() for matrix in read]).max()
            largest |= {entry.name.removesuffix(".weight"): most for entry in some}
    return largest


def write_merged(folder: Path, out: Path, adapter: Adapter, tell: Callable[[str], None]) -> None:
    """Writes the shards that an adapter changes to `out`, in their own dtypes. A shard already
    there is kept."""
    shards: dict[Path, list[Entry]] = {}
    for entry in read_entries(folder).values():
        shards.setdefault(entry.shard, []).append(entry)
    changed = [
        shard
        for shard, entries in shards.items()
        if any(each.name in adapter.pairs for each in entries)
    ]
    out.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(changed, 1):
        if not (out / shard.name).exists():
            save_whole(dict(_stored(shards[shard], {}, 0, adapter)), out / shard.name)
        tell(f"shard {number} of {len(changed)} that the adapter changes: {shard.name}")


def _stored(
    entries: list[Entry],
    kinds: dict[str, MadeKind],
    group: int,
    adapter: Adapter | None,
    untied: bool = False,
    rounded: Path | None = None,
    largest: Mapping[str, Tensor] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and tensor of each entry of a new shard. untied: True also writes the
    embedding's numbers, quantized, as the head. largest: name of a matrix -> largest magnitude of
    the matrices that share its nvfp4 global scale."""
    for entry, tensor in read_tensors(entries):
        name = entry.name.removesuffix(".weight")
        merged = tensor if adapter is None else adapter.merged(entry.name, tensor)
        if untied and entry.name == EMBEDDING:
            stored = store(merged, kinds[HEAD], group, tensor.dtype)
            yield from ((f"{HEAD}.{suffix}", new) for suffix, new in stored.items())
        elif untied and name == HEAD:
            continue  # the stored copy of a tied head is skipped
        if name in kinds:
            made = None if rounded is None else rounded / f"{name}.safetensors"
            if made and made.exists():
                stored = load_file(made)
            else:
                stored = store(merged, kinds[name], group, tensor.dtype, most=largest.get(name))
            yield from ((f"{name}.{suffix}", new) for suffix, new in stored.items())
        else:
            yield entry.name, merged.to(tensor.dtype, copy=True)


def save_whole(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a file of tensors atomically. Raises CapacityError if the disk is full."""
    draft = path.with_name(path.name + ".part")
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            draft,
            metadata={"format": "pt"},
        )
        # save_file makes it private; other users must be able to read the folder
        draft.chmod(0o644)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise why_not_written(error, path) from error


def _write_json(path: Path, told: dict[str, object]) -> None:
    write_whole(path, (json.dumps(told, indent=2) + "\n").encode())

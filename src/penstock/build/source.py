"""The source model of a build. It is found on the disk or fetched at one revision. Also makes its
files' checksums, and checks that disk and memory have room.

Knows folders and sizes; no engine.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from hashlib import file_digest
from pathlib import Path
from typing import cast

import msgspec
import torch

from penstock.artifact.manifest import MANIFEST
from penstock.build.build_state import check_disk
from penstock.build.options import BuildOptions
from penstock.engine.build_engine import model_folder
from penstock.errors import CapacityError, CheckpointError, UsageError
from penstock.execute.limits import free_memory
from penstock.execute.open_runner import find_device
from penstock.models.build_model import build_model
from penstock.models.read_config import read_model_config
from penstock.quant.choose import choose_schemes
from penstock.quant.write_compressed import MadeKind
from penstock.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, Adapter
from penstock.weights.checkpoint import read_entries
from penstock.weights.find import HUB_FILES, adapter_folder
from penstock.weights.write_quantized import model_written

# bytes of host memory needed beside the shards, for torch and a matrix being quantized
SPARE = 2 << 30


class SourceFile(msgspec.Struct):
    """A file's state when its checksum was made. Size and modification time show quickly whether it
    may have changed."""

    sha256: str
    bytes: int
    changed: int  # modification time, in ns since 1970


class SourceModel(msgspec.Struct):
    """A model's folder, its commit if it is from the hub, and its files."""

    folder: str
    revision: str | None
    files: dict[str, SourceFile]
    largest_shard: int  # bytes of the largest weight file
    quantized: str | None  # the checkpoint's quantization method; None: not quantized
    adapter: dict[str, SourceFile] = {}  # path -> file of the LoRA adapter

    @property
    def sums(self) -> dict[str, str]:
        """Returns path -> SHA-256 of all files; an adapter's files are under `lora/`."""
        adapter = {f"lora/{Path(path).name}": file.sha256 for path, file in self.adapter.items()}
        return {name: file.sha256 for name, file in self.files.items()} | adapter


def fetch(options: BuildOptions) -> SourceModel:
    """Finds the model, or downloads it, and reads all of it once. Raises CheckpointError,
    CapacityError, UsageError."""
    folder = model_folder(
        options.config(**({"revision": options.revision} if options.revision else {}))
    )
    if (folder / MANIFEST).exists():
        raise UsageError(
            f"{options.model} is an artifact: time its choices again by penstock build --retune"
            f" {options.model}, or build of the model that it was built of"
        )
    quantized = read_model_config(folder).quantization
    shards = {entry.shard for entry in read_entries(folder).values()}
    # the hub's client keeps a revision in a folder named after its commit
    hub = folder.parent.name == "snapshots"
    with ThreadPoolExecutor(thread_name_prefix="penstock-sums") as pool:
        sums = dict(
            zip(_names(folder), pool.map(lambda n: _sum(folder / n), _names(folder)), strict=True)
        )
    return SourceModel(
        folder=str(folder),
        revision=folder.name if hub else None,
        files=sums,
        largest_shard=max(shard.stat().st_size for shard in shards),
        quantized=None if quantized is None else quantized.method,
        adapter={} if options.lora is None else _adapter_files(options.lora),
    )


def _adapter_files(lora: str) -> dict[str, SourceFile]:
    """Returns an adapter's files. Raises CheckpointError for an invalid adapter."""
    folder = adapter_folder(lora)
    Adapter.read(folder)
    return {str(path): _sum(path) for path in (folder / ADAPTER_CONFIG, folder / ADAPTER_FILE)}


def check_unchanged(source: SourceModel) -> None:
    """Raises CheckpointError when a file has changed since the build began."""
    folder = Path(source.folder)
    changed = [
        name
        for name in {*_names(folder), *source.files}
        if not _is_as(folder / name, source.files.get(name))
    ]
    changed += [path for path, told in source.adapter.items() if not _is_as(Path(path), told)]
    if changed:
        raise CheckpointError(
            f"{folder / min(changed)} was changed since this build began: put it back, or begin"
            " anew in another --out"
        )


def check_room(options: BuildOptions, source: SourceModel) -> None:
    """Raises CapacityError, before long work, when disk or memory is too small."""
    wide, written = _sizes(options, source)
    check_disk(Path(options.out), written, f"an artifact of {options.model}")
    needed, free = int(1.3 * source.largest_shard) + SPARE, free_memory(torch.device("cpu"))
    if free < needed:
        raise CapacityError(
            f"building {options.model} takes {needed / 1e9:.1f} GB of memory (its largest file is"
            f" {source.largest_shard / 1e9:.1f} GB), and {free / 1e9:.1f} GB is free: end what else"
            " runs here"
        )
    device = find_device(options.config().model.device)
    room = free_memory(device)
    if wide > room:
        raise CapacityError(
            f"the unbuilt model, which the check compares with, takes {wide / 1e9:.1f} GB, and"
            f" {room / 1e9:.1f} GB is free on {device}: end what else runs there, or take a"
            " larger one"
        )


def _sizes(options: BuildOptions, source: SourceModel) -> tuple[int, int]:
    """Returns the bytes of the unbuilt model in memory,
    and an upper bound of the bytes to write."""
    config = read_model_config(Path(source.folder))
    stored = sum(file.bytes for name, file in source.files.items() if name.endswith(".safetensors"))
    meta, dtype = torch.device("meta"), torch.bfloat16
    wide = build_model(
        config, dtype, meta, scheme_of=choose_schemes("auto", config.quantization)
    ).weights_bytes
    if options.quantization in ("none", "auto") or source.quantized is not None:
        return wide, stored
    made = model_written(
        config, cast(MadeKind, options.quantization), options.quantize_lm_head
    ).weights_bytes
    return wide, int(stored * made / wide)


def _names(folder: Path) -> list[str]:
    """Returns the names of the files that belong to the model."""
    files = (path.name for path in folder.iterdir() if path.is_file())
    return sorted(name for name in files if any(fnmatch(name, each) for each in HUB_FILES))


def _sum(path: Path) -> SourceFile:
    stat = path.stat()
    with path.open("rb") as file:
        return SourceFile(file_digest(file, "sha256").hexdigest(), stat.st_size, stat.st_mtime_ns)


def _is_as(path: Path, told: SourceFile | None) -> bool:
    if told is None or not path.is_file():
        return False
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) == (told.bytes, told.changed) or _sum(
        path
    ).sha256 == told.sha256

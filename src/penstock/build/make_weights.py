"""Writes a built engine's weights. Weights are quantized shard by shard; the model's other files
are linked or copied.

Knows folders; `weights/write_quantized.py` quantizes the matrices.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from penstock.build.options import BuildOptions
from penstock.build.source import SourceModel
from penstock.disk import sync_folder, why_not_written
from penstock.models.build_model import build_model
from penstock.models.read_config import read_model_config
from penstock.quant.write_compressed import MadeKind
from penstock.weights.adapter import Adapter
from penstock.weights.checkpoint import read_entries
from penstock.weights.load import find_adapter
from penstock.weights.write_quantized import write_merged, write_quantized

# error codes of a hard link to another file system, or on one without hard links
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def make_weights(
    options: BuildOptions,
    source: SourceModel,
    kind: str,
    tell: Callable[[str], None],
    rounded: Path | None = None,
) -> None:
    """Writes the model folder. Complete shards are kept, so a killed build continues at its shard.
    rounded: folder of the matrices that round_weights.py has rounded; deleted once they are
    written."""
    folder, out = Path(source.folder), Path(options.out)
    adapter = find_merged(options, folder)
    if kind != "none":
        made, head = cast(MadeKind, kind), options.quantize_lm_head
        write_quantized(folder, out, made, tell, options.keep_wide, adapter, head, rounded)
        if rounded is not None:
            shutil.rmtree(rounded, ignore_errors=True)
        return
    if adapter is not None:
        write_merged(folder, out, adapter, tell)
    try:
        for name in source.files:
            if not (out / name).exists():
                _bring((folder / name).resolve(), out / name)
        sync_folder(out)
    except OSError as error:
        raise why_not_written(error, out) from error
    linked = sum((out / name).samefile(folder / name) for name in source.files)
    shared = (
        f", {linked} of them hard links: never write over {folder} in place, replace its files"
        if linked
        else ""
    )
    tell(f"{len(source.files)} files as they are{shared}")


def find_merged(options: BuildOptions, folder: Path) -> Adapter | None:
    """Returns the adapter to merge, if any. Raises CheckpointError or UsageError when it does not
    fit the model."""
    if options.lora is None:
        return None
    shape = build_model(read_model_config(folder), torch.bfloat16, torch.device("meta"))
    return find_adapter(options.lora, shape, read_entries(folder), "auto", told=True)


def _bring(file: Path, to: Path) -> None:
    """Hard-links a file if the file system can, else copies it, whole or not at all. Small files
    are always copied, because a user who edits one would change the linked source too."""
    draft = to.with_name(to.name + ".part")
    draft.unlink(missing_ok=True)
    if file.suffix == ".safetensors":
        try:
            os.link(file, draft)
            draft.replace(to)
            return
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
    shutil.copyfile(file, draft)
    draft.replace(to)

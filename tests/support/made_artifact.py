"""An artifact as `penstock build` would leave it: the demo model's folder, kernels of no kernel, a
manifest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock import __version__
from penstock.artifact.checksums import sum_files
from penstock.artifact.manifest import MANIFEST, Decision, Manifest, read_manifest, write_manifest
from penstock.demo import model_folder
from penstock.execute.built_on import built_on

BINARY = "kernels/KEY/_own.cubin"


def make_artifact(folder: Path, *, built: dict[str, Any] | None = None, **engine: Any) -> Path:
    """engine: knobs that it sets.   built: what its machine had other than this one."""
    shutil.copytree(model_folder(), folder, dirs_exist_ok=True)
    (folder / BINARY).parent.mkdir(parents=True)
    (folder / BINARY).write_bytes(b"no kernel")
    return seal_folder(folder, torch.device("cpu"), built, engine)


def seal_folder(
    folder: Path,
    device: torch.device,
    built: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
) -> Path:
    """Writes the manifest of what lies in a folder."""
    files = [
        path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()
    ]
    here = built_on(device)
    decided = Decision(
        name="max_num_seqs",
        chosen=64,
        default=1024,
        unit="tok/s",
        measured={"64": [9.0, 9.1], "1024": [8.0, 8.1]},
        won_percent=12.4,
        noise_percent=1.1,
    )
    manifest = Manifest(
        penstock=__version__,
        model="demo",
        source={},
        built_on=msgspec.structs.replace(here, **built or {}),
        built_for=[],
        engine=engine or {},
        decisions=[decided],
        files=sum_files(folder, files),
    )
    write_manifest(folder, manifest)
    return folder


def edit(folder: Path, **parts: Any) -> None:
    """Other parts of a manifest, as a person edits it."""
    write_manifest(folder, msgspec.structs.replace(read_manifest(folder), **parts))


def flip(path: Path, at: int = -1) -> None:
    """Turns one byte of a file over."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


__all__ = ["BINARY", "MANIFEST", "edit", "flip", "make_artifact", "seal_folder"]

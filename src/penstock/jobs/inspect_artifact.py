"""`penstock inspect`: prints a built engine's manifest. It first verifies the checksum of every
file that the manifest lists. Opens no engine and imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from penstock.artifact.checksums import verify_files
from penstock.artifact.describe import describe
from penstock.artifact.manifest import manifest_json, read_manifest


def print_artifact(folder: Path, *, as_json: bool) -> None:
    """Prints a manifest. Raises CheckpointError, and prints nothing, if the folder is no built
    engine, is unfinished, or has a file that has changed."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest.files)
    print(manifest_json(manifest) if as_json else f"{describe(folder, manifest)}\n", end="")

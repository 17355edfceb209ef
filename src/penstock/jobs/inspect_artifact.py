"""`penstock inspect`: an artifact's manifest, once every byte that it lists is seen to be as it was
built. It opens no engine and imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from penstock.artifact.checksums import verify_files
from penstock.artifact.describe import describe
from penstock.artifact.manifest import manifest_json, read_manifest


def print_artifact(folder: Path, *, as_json: bool) -> None:
    """Raises CheckpointError for what is no artifact, an unfinished one, or one with a file that
    isn't as it was built; nothing is printed then."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest.files)
    print(manifest_json(manifest) if as_json else f"{describe(folder, manifest)}\n", end="")

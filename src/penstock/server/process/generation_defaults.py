"""What the model's own generation_config.json asks for and no answer gets: one line, when the server starts.

Its sampling numbers are the API's defaults (translate.py). A key of it that would change samples, and that we have no
way to serve, must not be lost in silence: the same model answers otherwise elsewhere. LLM says nothing, since it takes
no number of that file. It knows the file by `models`; no requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from penstock.models.generation_config import read_generation_defaults


def tell_unserved(folder: Path, err: TextIO) -> None:
    """Writes the line, if there is something to say. The engine has read the same file by now, so it is sound."""
    names = read_generation_defaults(folder).unserved
    if names:
        told = ", ".join(name if name.isidentifier() else repr(name) for name in names)
        print(
            f"penstock: the model's generation_config.json asks for {told}: not served, samples are drawn without",
            file=err,
            flush=True,
        )

"""Binaries of kernels, as this process has them: where they are read from, where a build wants them
written, which had to be compiled. It knows folders and names; which compiler asks is a column's
affair (`triton/disk_cache.py`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.errors import EngineError


class BinaryCounts(NamedTuple):
    """How many kernels, and stubs that launch them, a process has compiled, and how many it has
    loaded from a disk."""

    compiled: int
    loaded: int


@dataclass(slots=True)
class Binaries:
    """One a process, as the compiler's memory of kernels is. Names are appended by any thread,
    which needs no lock."""

    # artifacts': looked into before the compiler's own cache
    folders: list[Path] = field(default_factory=list)
    into: Path | None = None  # a build's: what is compiled or found is written there, too
    # artifacts of the engines that refuse to compile
    sealed: list[Path] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def counts(self) -> BinaryCounts:
        return BinaryCounts(len(self.compiled), len(self.loaded))

    def open(self, folder: Path, *, sealed: bool) -> None:
        """Reads `folder` from now on. sealed: and lets nothing be compiled."""
        self.folders.append(folder)
        self.sealed += [folder] * sealed

    def close(self, folder: Path) -> None:
        """Undoes `open`. What was loaded stays loaded."""
        for held in (self.folders, self.sealed):
            with suppress(ValueError):  # it was not sealed
                held.remove(folder)

    def compiling(self, name: str) -> None:
        """Takes down that `name` is compiled. Raises EngineError where an engine of this process is
        sealed."""
        if self.sealed:
            raise EngineError(
                f"the kernel {name} is not among the binaries of {self.sealed[-1]} and would have"
                f" to be compiled: run penstock build --retune {self.sealed[-1].parent} on this"
                " machine, or leave --sealed out"
            )
        self.compiled.append(name)

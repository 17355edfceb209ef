"""Binaries of compiled kernels in this process: the folders that they are read from and written to,
and the number of compilations. `triton/disk_cache.py` connects this to the compiler."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.errors import EngineError


class BinaryCounts(NamedTuple):
    """Numbers of kernels that this process has compiled, and that it has loaded from disk. A
    kernel's launch stub counts as well."""

    compiled: int
    loaded: int


@dataclass(slots=True)
class Binaries:
    """Folders and counts of kernel binaries. There is one object per process, as there is one
    kernel cache. Any thread may append names, without a lock."""

    # folders of built engines (artifacts), searched before the compiler's own cache
    folders: list[Path] = field(default_factory=list)
    # folder of a running `penstock build`, into which every binary is copied; None: no build runs
    into: Path | None = None
    # folders of built engines that must not compile
    sealed: list[Path] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def counts(self) -> BinaryCounts:
        return BinaryCounts(len(self.compiled), len(self.loaded))

    def open(self, folder: Path, *, sealed: bool) -> None:
        """Adds a folder from which binaries are read from now on. sealed: True also forbids
        compiling."""
        self.folders.append(folder)
        self.sealed += [folder] * sealed

    def close(self, folder: Path) -> None:
        """Undoes `open`. Kernels that are loaded already stay loaded."""
        for held in (self.folders, self.sealed):
            with suppress(ValueError):  # raised if the folder was not sealed
                held.remove(folder)

    def compiling(self, name: str) -> None:
        """Records that the kernel `name` is compiled. Raises EngineError if compiling is forbidden
        by a sealed folder."""
        if self.sealed:
            raise EngineError(
                f"the kernel {name} is not among the binaries of {self.sealed[-1]} and would have"
                f" to be compiled: run penstock build --retune {self.sealed[-1].parent} on this"
                " machine, or leave --sealed out"
            )
        self.compiled.append(name)

"""Binaries of compiled kernels in this process: folders to read them from and write them to, and
counts of compiled ones. Knows folders and names; `triton/disk_cache.py` connects it to the
compiler."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from penstock.errors import EngineError


class BinaryCounts(NamedTuple):
    """Numbers of kernels, with their launch stubs, that a process has compiled and has loaded from
    disk."""

    compiled: int
    loaded: int


@dataclass(slots=True)
class Binaries:
    """The binaries of a process; one object, like the compiler's kernel cache. Any thread may
    append names, without a lock."""

    # folders of artifacts, searched before the compiler's own cache
    folders: list[Path] = field(default_factory=list)
    # folder of a running build, which gets a copy of every binary compiled or found
    into: Path | None = None
    # folders of artifacts whose engines refuse to compile
    sealed: list[Path] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def counts(self) -> BinaryCounts:
        return BinaryCounts(len(self.compiled), len(self.loaded))

    def open(self, folder: Path, *, sealed: bool) -> None:
        """Reads binaries from `folder` from now on. sealed: forbid compiling too."""
        self.folders.append(folder)
        self.sealed += [folder] * sealed

    def close(self, folder: Path) -> None:
        """Undoes `open`; loaded kernels stay loaded."""
        for held in (self.folders, self.sealed):
            with suppress(ValueError):  # raised if the folder was not sealed
                held.remove(folder)

    def compiling(self, name: str) -> None:
        """Records that `name` is being compiled. Raises EngineError if an engine of this process is
        sealed."""
        if self.sealed:
            raise EngineError(
                f"the kernel {name} is not among the binaries of {self.sealed[-1]} and would have"
                f" to be compiled: run penstock build --retune {self.sealed[-1].parent} on this"
                " machine, or leave --sealed out"
            )
        self.compiled.append(name)

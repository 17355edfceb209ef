"""Triton's binaries on the disk: an artifact's folder in front of Triton's own cache, and a key
that is not made anew.

    a kernel       get_group: KEY/NAME.json, NAME.cubin    of an artifact, else Triton's cache, else
    it is compiled
    a launcher     get_file: KEY/NAME.SUFFIX.so            the same; a stub in C that Triton
    compiles for a signature

KEY is Triton's: a hash of the kernel's source, its signature and options, Triton and ptxas; no
path, no driver, no name of a GPU. Triton's own cache keeps absolute paths beside it and finds
nothing in a folder that has moved; here what lies in a folder is what it holds. The part of KEY
that stands for Triton itself is a hash of 415 MB (0.3 to 1.1 s, in every start): it is recorded,
beside Triton's cache and in an artifact, and holds as long as Triton's files are the same by
version and size, and at home by the times of their last change.

An artifact's launchers are machine code of the host: who opens an artifact trusts it as a program
(a hub's snapshot brings none). It knows Triton's seams (`knobs.cache.manager_class`,
`runtime.cache.triton_key`, how a kernel's source is parsed, and hashed with the functions that it
calls), as of 3.6 to 3.9.
"""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import cache as once
from pathlib import Path
from threading import Lock
from typing import Any

import triton
from triton import knobs
from triton.runtime import cache, jit

from penstock.disk import write_whole
from penstock.errors import PenstockError
from penstock.kernels.binaries import Binaries

RECORD = "triton.json"  # an artifact's; beside Triton's cache it is HOME_RECORD
HOME_RECORD = "penstock-triton.json"
_BINARIES_END = (".cubin", ".hsaco")
# of what Triton writes for a kernel: the rest is for people to read
_KEPT = (
    ".json",
    *_BINARIES_END,
)
_BINARIES = Binaries()  # Triton's seam is a class that is told a key and nothing else
_USUAL = knobs.cache.manager_class or cache.FileCacheManager
_hash_triton = cache.triton_key
_hash_called = jit.DependenciesFinder._update_hash
_parse = jit.JITCallable.parse
_PARSING = Lock()


def install() -> Binaries:
    """Puts what is here in Triton's seams; returns what this process knows of its binaries."""
    knobs.cache.manager_class = _manager
    cache.triton_key = _recorded_key
    jit.DependenciesFinder._update_hash = _hash_called_first
    jit.JITCallable.parse = _parse_alone
    return _BINARIES


def _parse_alone(called: jit.JITCallable) -> ast.Module:
    """Python counts how deep a syntax tree is for all threads together, and raises SystemError
    where two parse at once (seen with 3.11.7, in one start of 85)."""
    with _PARSING:
        tree: ast.Module = _parse(called)
    return tree


def _hash_called_first(finder: jit.DependenciesFinder, called: jit.JITCallable) -> None:
    """Triton takes a called function's constants into a kernel's hash only if the function had been
    hashed before, by another kernel: the key would hang on which of them is launched first. Now it
    always has been."""
    called.cache_key  # noqa: B018
    _hash_called(finder, called)


def _manager(key: str, override: bool = False, dump: bool = False) -> cache.CacheManager:
    if override or dump:  # a developer's own folders
        return _USUAL(key, override=override, dump=dump)
    return _Shelf(key)


class _Shelf(cache.CacheManager):
    """What belongs to one key."""

    def __init__(self, key: str) -> None:
        self.key = key

    @property
    def usual(self) -> cache.CacheManager:
        return _USUAL(self.key)  # makes a folder: not before it is needed

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Asked for a kernel before it is compiled; None: compile it."""
        name = filename.removesuffix(".json")
        group = next(self._held(filename), None) or self.usual.get_group(filename) or {}
        if filename not in group or not any(each.endswith(_BINARIES_END) for each in group):
            _BINARIES.compiling(name)
            return None
        _BINARIES.loaded.append(name)
        self._keep_kernel(group)
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Told when a kernel has been compiled."""
        self._keep_kernel(group)
        return self.usual.put_group(filename, group)

    def get_file(self, filename: str) -> str | None:
        """Asked for a launcher before it is compiled,
        and for other files that we leave to Triton."""
        if not filename.endswith(".so"):
            return self.usual.get_file(filename)
        path = next(
            (group[filename] for group in self._held(filename)), None
        ) or self.usual.get_file(filename)
        if path is None:
            _BINARIES.compiling(filename.partition(".")[0])
        else:
            self._keep({filename: path})
        return path

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path = self.usual.put(data, filename, binary=binary)
        if filename.endswith(".so"):
            self._keep({filename: path})
        return path

    def _held(self, filename: str) -> Iterator[dict[str, str]]:
        """The artifacts' files of this key, where `filename` is among them."""
        for folder in _BINARIES.folders:
            if (folder / self.key / filename).is_file():
                yield {path.name: str(path) for path in (folder / self.key).iterdir()}

    def _keep_kernel(self, group: dict[str, str]) -> None:
        self._keep({name: path for name, path in group.items() if name.endswith(_KEPT)})

    def _keep(self, group: dict[str, str]) -> None:
        """Copies files into the artifact that is being built, and with them the key that they go
        by."""
        if _BINARIES.into is None:
            return
        folder = _BINARIES.into / self.key
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            (_BINARIES.into / RECORD).write_text(json.dumps(_record(_recorded_key(), times=False)))
        for name, path in group.items():
            if Path(path) != folder / name:
                shutil.copyfile(path, folder / name)


# --- the key --------------------------------------------------------------------------------------


@once
def _recorded_key() -> str:
    """In place of `triton_key`: an artifact's record where it is of this Triton, else this
    machine's, else made."""
    for folder in _BINARIES.folders:
        if key := _read(folder / RECORD, times=False):
            return key
    home = Path(knobs.cache.dir) / HOME_RECORD
    if key := _read(home, times=True):
        return key
    key = _hash_triton()
    with suppress(
        PenstockError, OSError
    ):  # a home that cannot be written costs the next start as much again
        home.parent.mkdir(parents=True, exist_ok=True)
        write_whole(home, json.dumps(_record(key, times=True)).encode())
    return key


def _read(path: Path, times: bool) -> str | None:
    """The key of a record, where it is of this Triton."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    key = told.get("key") if isinstance(told, dict) else None
    return key if isinstance(key, str) and told == _record(key, times=times) else None


def _record(key: str, *, times: bool) -> dict[str, Any]:
    """A key, and what it holds for."""
    home = Path(triton.__file__).parent
    hashed = [home / "runtime/cache.py", *(home / "_C").glob("libtriton.*")]
    hashed += [
        path
        for part in ("compiler", "backends", "language")
        for path in sorted((home / part).rglob("*.py"))
    ]
    files = {path.relative_to(home).as_posix(): path.stat() for path in hashed}
    sizes = {
        name: [stat.st_size, stat.st_mtime_ns] if times else stat.st_size
        for name, stat in files.items()
    }
    return {"triton": triton.__version__, "key": key, "files": sizes}

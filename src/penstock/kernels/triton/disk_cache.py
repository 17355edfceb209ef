"""Triton's binaries on disk: an artifact's folder is searched before Triton's own cache, and the
key of Triton itself is read from a record.

  a kernel       get_group: KEY/NAME.json, NAME.cubin: from an artifact, else Triton's cache, else
                 compiled
  a launcher     get_file: KEY/NAME.SUFFIX.so: the same; a C stub that Triton compiles for a
                 signature

KEY is Triton's: a hash of the kernel's source, its signature and options, Triton and ptxas; no
path, no driver, no name of a GPU. Triton's own cache stores absolute paths beside it and finds
nothing in a folder that has moved; here a folder's content is what lies in it. The part of KEY for
Triton itself hashes 415 MB (0.3 to 1.1 s at every start). It is recorded, beside Triton's cache and
in an artifact, and is valid while Triton's files have the same version and size, and beside
Triton's cache the same modification times.

An artifact's launchers are machine code of the host: opening an artifact means trusting it as a
program (a hub's snapshot brings none). Knows Triton's hooks (`knobs.cache.manager_class`,
`runtime.cache.triton_key`, the parsing of a kernel's source, and the hashing of called functions)
of versions 3.6 to 3.9."""

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

RECORD = "triton.json"  # name in an artifact; beside Triton's cache the name is HOME_RECORD
HOME_RECORD = "penstock-triton.json"
_BINARIES_END = (".cubin", ".hsaco")
# files of a kernel that are kept; the rest is for human readers
_KEPT = (
    ".json",
    *_BINARIES_END,
)
_BINARIES = Binaries()  # global, since Triton's hook is a class that receives only a key
_USUAL = knobs.cache.manager_class or cache.FileCacheManager
_hash_triton = cache.triton_key
_hash_called = jit.DependenciesFinder._update_hash
_parse = jit.JITCallable.parse
_PARSING = Lock()


def install() -> Binaries:
    """Installs the hooks of this module in Triton; returns the binaries of this process."""
    knobs.cache.manager_class = _manager
    cache.triton_key = _recorded_key
    jit.DependenciesFinder._update_hash = _hash_called_first
    jit.JITCallable.parse = _parse_alone
    return _BINARIES


def _parse_alone(called: jit.JITCallable) -> ast.Module:
    """Parses a kernel under a lock: Python counts the depth of syntax trees over all threads
    together, and raises SystemError if two parse at once (seen with 3.11.7, in one start of 85)."""
    with _PARSING:
        tree: ast.Module = _parse(called)
    return tree


def _hash_called_first(finder: jit.DependenciesFinder, called: jit.JITCallable) -> None:
    """Hashes a called function before its caller. Triton includes the function's constants in the
    kernel's hash only if the function was hashed before, by another kernel: keys would depend on
    the order of launches."""
    called.cache_key  # noqa: B018
    _hash_called(finder, called)


def _manager(key: str, override: bool = False, dump: bool = False) -> cache.CacheManager:
    if override or dump:  # folders of a developer's own
        return _USUAL(key, override=override, dump=dump)
    return _Shelf(key)


class _Shelf(cache.CacheManager):
    """The files of one key."""

    def __init__(self, key: str) -> None:
        self.key = key

    @property
    def usual(self) -> cache.CacheManager:
        return _USUAL(self.key)  # makes a folder, so only if needed

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Looks for a kernel before it is compiled; returns None if it must be compiled."""
        name = filename.removesuffix(".json")
        group = next(self._held(filename), None) or self.usual.get_group(filename) or {}
        if filename not in group or not any(each.endswith(_BINARIES_END) for each in group):
            _BINARIES.compiling(name)
            return None
        _BINARIES.loaded.append(name)
        self._keep_kernel(group)
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Stores a kernel after it was compiled."""
        self._keep_kernel(group)
        return self.usual.put_group(filename, group)

    def get_file(self, filename: str) -> str | None:
        """Looks for a launcher before it is compiled; other files are left to Triton."""
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
        """Yields the files of this key in each artifact that has `filename`."""
        for folder in _BINARIES.folders:
            if (folder / self.key / filename).is_file():
                yield {path.name: str(path) for path in (folder / self.key).iterdir()}

    def _keep_kernel(self, group: dict[str, str]) -> None:
        self._keep({name: path for name, path in group.items() if name.endswith(_KEPT)})

    def _keep(self, group: dict[str, str]) -> None:
        """Copies files into the artifact being built, with the record of Triton's key."""
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
    """Replaces `triton_key`: returns the key of an artifact's record if valid for this Triton, else
    of this machine's record, else computes it."""
    for folder in _BINARIES.folders:
        if key := _read(folder / RECORD, times=False):
            return key
    home = Path(knobs.cache.dir) / HOME_RECORD
    if key := _read(home, times=True):
        return key
    key = _hash_triton()
    with suppress(
        PenstockError, OSError
    ):  # if the home can't be written, the next start computes it again
        home.parent.mkdir(parents=True, exist_ok=True)
        write_whole(home, json.dumps(_record(key, times=True)).encode())
    return key


def _read(path: Path, times: bool) -> str | None:
    """Returns the key of a record if valid for this Triton; else None."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    key = told.get("key") if isinstance(told, dict) else None
    return key if isinstance(key, str) and told == _record(key, times=times) else None


def _record(key: str, *, times: bool) -> dict[str, Any]:
    """Returns a record: the key, and the files that it is valid for."""
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

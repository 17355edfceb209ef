"""Finds Triton's compiled binaries on disk. The folder of a built engine (an artifact) is searched
before Triton's own cache; what neither has is compiled.

Kernels are the files KEY/NAME.json and KEY/NAME.cubin, found by get_group. Launchers, which are C
stubs that Triton compiles for a signature, are KEY/NAME.SUFFIX.so, found by get_file. KEY is
Triton's: a hash of the kernel's source, its signature and options, Triton and ptxas; no path, no
driver, no name of a GPU. Triton's own cache also stores absolute paths, so it finds nothing in a
folder that was moved; here the files in the folder count.

For a part of KEY Triton hashes its own files, 415 MB, which takes 0.3 to 1.1 s at every start. Here
that hash is read from a record, in Triton's cache or in an artifact. A record is valid if Triton's
files have the recorded version and sizes, and for the one in Triton's cache also the recorded
modification times.

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

RECORD = "triton.json"  # the record's file name in an artifact; in Triton's cache it is HOME_RECORD
HOME_RECORD = "penstock-triton.json"
_BINARIES_END = (".cubin", ".hsaco")
# suffixes of a kernel's files that are copied; the other files are for human readers
_KEPT = (
    ".json",
    *_BINARIES_END,
)
_BINARIES = Binaries()  # global, since Triton makes objects of its hook class from a key alone
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
    together. So it may raise SystemError if two threads parse at once, which happened with 3.11.7
    in one start of 85."""
    with _PARSING:
        tree: ast.Module = _parse(called)
    return tree


def _hash_called_first(finder: jit.DependenciesFinder, called: jit.JITCallable) -> None:
    """Hashes a called function before the kernel that calls it. Otherwise Triton would include the
    function's constants in the kernel's hash only if another kernel had caused the function to be
    hashed before. Keys would then depend on the order of launches."""
    called.cache_key  # noqa: B018
    _hash_called(finder, called)


def _manager(key: str, override: bool = False, dump: bool = False) -> cache.CacheManager:
    if override or dump:  # a developer's own folders; they are left to Triton
        return _USUAL(key, override=override, dump=dump)
    return _Shelf(key)


class _Shelf(cache.CacheManager):
    """The files of one key, with the methods that Triton calls."""

    def __init__(self, key: str) -> None:
        self.key = key

    @property
    def usual(self) -> cache.CacheManager:
        return _USUAL(self.key)  # created only when needed, since it creates a folder

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
        """Yields this key's files (name -> path) in each artifact that has the file `filename`."""
        for folder in _BINARIES.folders:
            if (folder / self.key / filename).is_file():
                yield {path.name: str(path) for path in (folder / self.key).iterdir()}

    def _keep_kernel(self, group: dict[str, str]) -> None:
        self._keep({name: path for name, path in group.items() if name.endswith(_KEPT)})

    def _keep(self, group: dict[str, str]) -> None:
        """Copies files into the artifact that is being built, if any, and writes the record of
        Triton's key there. group: name -> path."""
        if _BINARIES.into is None:
            return
        folder = _BINARIES.into / self.key
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            (_BINARIES.into / RECORD).write_text(json.dumps(_record(_recorded_key(), times=False)))
        for name, path in group.items():
            if Path(path) != folder / name:
                shutil.copyfile(path, folder / name)


# --- the key of Triton itself
# ----------------------------------------------------------------------


@once
def _recorded_key() -> str:
    """Replaces Triton's `triton_key`. Returns the key in an artifact's record, or in this machine's
    record, if one is valid for the installed Triton; else computes the key and records it."""
    for folder in _BINARIES.folders:
        if key := _read(folder / RECORD, times=False):
            return key
    home = Path(knobs.cache.dir) / HOME_RECORD
    if key := _read(home, times=True):
        return key
    key = _hash_triton()
    with suppress(
        PenstockError, OSError
    ):  # if the record can't be written, the next start computes the key again
        home.parent.mkdir(parents=True, exist_ok=True)
        write_whole(home, json.dumps(_record(key, times=True)).encode())
    return key


def _read(path: Path, times: bool) -> str | None:
    """Returns the key in a record if it is valid for the installed Triton; else None. times: True
    also compares modification times."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    key = told.get("key") if isinstance(told, dict) else None
    return key if isinstance(key, str) and told == _record(key, times=times) else None


def _record(key: str, *, times: bool) -> dict[str, Any]:
    """Returns the content of a record: the key, and versions and sizes of Triton's files. times:
    True adds modification times."""
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

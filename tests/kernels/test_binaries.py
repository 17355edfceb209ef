"""Binaries of kernels in a folder that moves, compiled for a GPU that isn't here: `triton.compile`
needs none.

Each start of a process has an empty cache of its own; what it compiled and what it loaded is asked
of the counters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.errors import EngineError
from penstock.kernels.binaries import Binaries

if find_spec("triton") is None:  # not loaded here, where the interpreter's tests come after
    pytest.skip("Triton comes with CUDA builds of PyTorch", allow_module_level=True)

# A process that compiles one kernel, or reads it from the folder that it is given.
START = """
import json, sys
from pathlib import Path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import build
from penstock.errors import EngineError
from penstock.kernels.triton import disk_cache

@triton.jit
def _copy(x, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.load(x + lane))

how, folder, hashed = sys.argv[1], Path(sys.argv[2]), []
plain = disk_cache._hash_triton
disk_cache._hash_triton = lambda: (hashed.append(1), plain())[1]
binaries = disk_cache.install()
if how == "into":
    binaries.into = folder
else:
    binaries.open(folder, sealed=True)
source = ASTSource(_copy, {"x": "*bf16", "out": "*bf16", "BLOCK": "constexpr"}, {"BLOCK": 512}, {})
said = ""
try:
    compiled = compile(source, target=GPUTarget("cuda", 90, 32))
except EngineError as error:
    said = str(error)
    binaries.close(folder)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32))
stub = build.compile_module_from_src("#include <Python.h>\\nstatic struct PyModuleDef d = {PyModuleDef_HEAD_INIT,"
    " \\"stub\\"}; PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&d); }", "stub").__file__
print(json.dumps([len(compiled.asm["cubin"]), stub, said, *binaries.counts(), len(hashed)]))
"""


def start(how: str, folder: Path, home: Path) -> list[object]:
    """[bytes of the kernel, the stub's file, what was refused, compiled, loaded, times that Triton
    was hashed]."""
    env = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(home), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    script = folder.parent / "start.py"  # Triton reads its kernels' source from a file
    script.write_text(START)
    done = subprocess.run(
        [sys.executable, script, how, folder], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.torch
def test_binaries_move_with_their_folder(tmp_path: Path) -> None:
    first, here, there = tmp_path / "first", tmp_path / "kernels", tmp_path / "moved"
    held, _, _, *counts = start("into", here, first)
    assert held and counts == [2, 0, 1], "a kernel and a stub, with no cache and no record"
    assert start("into", tmp_path / "again", first)[3:] == [
        0,
        1,
        0,
    ], "found in Triton's own cache, by its record"
    assert _files(tmp_path / "again") == _files(here), (
        "what is found goes into a build as what is compiled does"
    )
    here.rename(there)
    held_there, stub, said, *counts = start("sealed", there, tmp_path / "second")
    assert (held_there, said, counts) == (
        held,
        "",
        [0, 1, 0],
    ), "nothing is compiled, and Triton isn't hashed"
    assert Path(str(stub)).is_relative_to(there)
    next(there.glob("*/_copy.cubin")).unlink()
    _, _, said, *counts = start("sealed", there, tmp_path / "third")
    assert counts == [2, 0, 0], "what was refused is compiled once nothing is sealed"
    assert "the kernel _copy is not among the binaries of" in str(said) and "--retune" in str(said)


# Prints a kernel's hash. `seen`: a function that it calls, and that reads a constant of the file,
# was hashed before.
ORDER = """
import sys
import triton
import triton.language as tl
from penstock.kernels.triton import disk_cache
SIZE: tl.constexpr = tl.constexpr(512)

@triton.jit
def _called(x):
    return x * SIZE

@triton.jit
def _calls(x, out):
    tl.store(out, _called(tl.load(x)))

disk_cache.install()
if "seen" in sys.argv:
    _called.cache_key
print(_calls.cache_key)
"""


@pytest.mark.torch
def test_a_key_does_not_hang_on_which_kernel_came_first(tmp_path: Path) -> None:
    script = tmp_path / "order.py"
    script.write_text(ORDER)
    env = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    said = {
        subprocess.run(
            [sys.executable, script, *more], env=env, capture_output=True, text=True, check=True
        ).stdout
        for more in ([], ["seen"])
    }
    assert len(said) == 1 and len(said.pop().strip()) == 64


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_record_of_another_triton_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_cache = pytest.importorskip("penstock.kernels.triton.disk_cache")
    path = tmp_path / "record.json"
    for times in (False, True):
        path.write_text(json.dumps(disk_cache._record("a key", times=times)))
        assert (
            disk_cache._read(path, times=times) == "a key"
            and disk_cache._read(path, times=not times) is None
        )
        for broken in ({"triton": "3.5.9"}, {"key": 7}, {"files": {}}):
            path.write_text(json.dumps(disk_cache._record("a key", times=times) | broken))
            assert disk_cache._read(path, times=times) is None
    path.write_text("{")
    assert disk_cache._read(path, times=True) is None


def test_a_seal_holds_until_its_engine_is_closed(tmp_path: Path) -> None:
    binaries = Binaries()
    binaries.open(tmp_path / "kernels", sealed=True)
    with pytest.raises(
        EngineError, match=rf"the kernel _own is not .*penstock build --retune {tmp_path} on this"
    ):
        binaries.compiling("_own")
    binaries.close(tmp_path / "kernels")
    binaries.compiling("_own")
    assert binaries.counts() == (1, 0) and not binaries.folders


# Two threads that parse at once end in Python's own SystemError now and then.
THREADS = """
import time
from concurrent.futures import ThreadPoolExecutor
from penstock.kernels.triton import disk_cache

inside, beside = [], []

def parse(number):
    beside.append(len(inside))
    inside.append(number)
    time.sleep(0.005)
    inside.pop()

disk_cache._parse = parse
disk_cache.install()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(disk_cache.jit.JITCallable.parse, range(12)))
print(beside)
"""


def test_threads_parse_kernels_one_after_the_other() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == str([0] * 12).split()

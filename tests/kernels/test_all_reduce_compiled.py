"""Sums over ranks, compiled for a GPU that isn't here: they move 16 bytes at a time, and meet by a release and an
acquire that the whole machine sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with CUDA builds of PyTorch"),
]

COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from penstock.kernels.triton import all_reduce

told = []
for fn, kind, more in (
    (all_reduce._one_shot, "*bf16", {"GATHERS": False, "UNIT": 16}),
    (all_reduce._one_shot, "*i32", {"GATHERS": True, "UNIT": 1}),
    (all_reduce._two_shots, "*bf16", {"UNIT": 16}),
):
    consts = {"RANKS": 3, "WIDTH": 4, "BLOCK": 1024, "EARLY": 1} | more
    types = {"x": kind, "out": kind, "addresses": "*i64", "state": "*i64", "units": "i32", "room": "i32", "me": "i32"}
    names = fn.arg_names
    types = {name: "constexpr" if name in consts else types[name] for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(fn, types, {(names.index(name),): value for name, value in consts.items()}, aligned)
    text = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True}).asm["ptx"]
    counts = ("ld.global.cg.v4", "atom.global.sys.release", "atom.global.sys.acquire", "ld.volatile.global")
    told.append([text.count(word) for word in counts])
print(json.dumps(told))
"""


def test_they_compile_for_an_h200(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    ran = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    one, gathered, two = json.loads(ran.stdout)
    assert one == [3, 1, 1, 1] and two == [6, 2, 2, 2] and gathered[1:] == [1, 1, 1]

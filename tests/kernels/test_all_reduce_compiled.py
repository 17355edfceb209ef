"""Sums over ranks, compiled for a GPU that isn't here: they move 16 bytes at a time, read past the
caches that others don't write to, and wait for no fence."""

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
    pytest.mark.skipif(
        find_spec("triton") is None, reason="Triton comes with CUDA builds of PyTorch"
    ),
]

COMPILE = """
import json
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from penstock.kernels.triton import all_reduce_kernels

told = []
for fn, more in (
    (all_reduce_kernels.one_shot_kernel, {"UNIT": 16, "KIND": tl.bfloat16}),
    (all_reduce_kernels.two_shots_kernel, {"UNIT": 16, "KIND": tl.bfloat16}),
    (all_reduce_kernels.one_shot_kernel, {"UNIT": 1, "KIND": tl.float32}),
    (all_reduce_kernels.two_shots_kernel, {"UNIT": 1, "KIND": tl.float16}),
    (all_reduce_kernels.gather_kernel, {}),
):
    consts = {"RANKS": 3, "WIDTH": 4, "BLOCK": 512, "EARLY": 1} | more
    types = {"x": "*i32", "out": "*i32", "addresses": "*i64", "state": "*i64", "units": "i32", "count": "i32",
             "room": "i32", "me": "i32"}
    names = fn.arg_names
    types = {name: "constexpr" if name in consts else types[name] for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(fn, types, {(names.index(name),): value for name, value in consts.items()}, aligned)
    text = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True}).asm["ptx"]
    counts = ("ld.volatile.global.v4.b32", "ld.volatile.global", "st.global.v4.b32", ".sys")
    told.append([text.count(word) for word in counts])
print(json.dumps(told))
"""


def test_they_compile_for_an_h200(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    one, two, *others = json.loads(ran.stdout)
    assert (
        one == [12, 12, 6, 0]
        and two == [24, 24, 17, 0]
        and [fences for *_, fences in others] == [0, 0, 0]
    )

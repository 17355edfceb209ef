"""Products with weights in groups, compiled for GPUs that aren't here: what the interpreter lets
pass, types and the assembler, is looked at, and that two numbers are widened by an instruction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        find_spec("triton") is None, reason="Triton comes with CUDA builds of PyTorch"
    ),  # not loaded here
]

COMPILE = """
import json, sys
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from penstock.kernels.triton import linear_four, linear_fp4, linear_groups, stream_fp4, stream_groups

TENSORS = ("x", "weight", "scale", "zero", "bias", "out", "parts", "arrived")
UNLIKELY = ("M", "each", "first", "count")  # not multiples of 16

def built(fn, target, kind, x, **consts):
    names, types = fn.arg_names, dict.fromkeys(fn.arg_names, "i32")
    types |= dict.fromkeys(TENSORS, "*" + x) | {"weight": "*u8", "arrived": "*i32"}
    types |= dict.fromkeys(("scale", "zero", "parts", "by"), "*fp32")
    consts |= {"EARLY": int(target >= 90)} | ({"KIND": kind} if "KIND" in names else {})
    if fn is linear_four._linear_four:
        types |= dict.fromkeys(("x_scale", "out_scale"), "*fp32") | dict.fromkeys(("x_sums", "out_sums"), "*i32")
        types |= {"numbers": "*i64", "weight": "*i32", "scale": "*u8" if consts["FLOATS"] else "*" + x,
                  "out": "*i8" if consts["FIXED"] else "*" + x}
    if fn in (stream_fp4._stream_fp4, linear_fp4._widened_fp4):
        types["scale"] = "*i16"
    types = {name: "constexpr" if name in consts else types[name] for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name not in (*consts, *UNLIKELY)}
    source = ASTSource(fn, types, {(names.index(name),): value for name, value in consts.items()}, aligned)
    return compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": consts.pop("WARPS", 4)})

told = []
for target, kind, x, rows, zeros, gated in json.loads(sys.argv[1]):
    shape = {"GROUP": 128, "ZEROS": zeros, "BN": 64, "BK": 128}
    product = built(stream_groups._stream, target, kind, x, BM=rows, SPLIT=3, GATED=gated, EVEN_K=True,
                    HAS_BIAS=True, STAGES=3, AHEAD=2, LATE=True, **shape)
    built(linear_groups._widened, target, kind, x, **shape)
    for fixed, floats in ((False, False), (True, False), (False, True), (True, True)) if kind == 4 else ():
        lone = built(linear_four._linear_four, target, kind, x, K=1280, R=32, C=32, TURN=16 if floats else 128,
                     FLOATS=floats, WIDE=tl.bfloat16 if x == "bf16" else tl.float16, GATED=gated, FIXED=fixed,
                     HAS_BIAS=not gated, UNROLL=2)
        assert lone.asm["ptx"].count("dp4a.u32.s32") >= 8
    if kind == 4:
        floats = built(stream_fp4._stream_fp4, target, kind, x, BM=rows, BN=64, BK=64, TURN=64, SPLIT=3, GATED=gated,
                       EVEN_K=True, HAS_BIAS=True, STAGES=3, LATE=True)
        assert floats.asm["ptx"].count("fma.rn." + ("f16x2" if x == "fp16" else "bf16x2")) >= 16
        built(linear_fp4._widened_fp4, target, kind, x, BN=32, BK=128, TURN=64)
    text = product.asm["ptx"]
    told.append([text.count("fma.rn." + ("f16x2" if x == "fp16" else "bf16x2")), text.count("cvt.rn.f32.s32")])
print(json.dumps(told))
"""
# compute capability, bits (1: float8), dtype, rows, zeros, gated
CASES = [
    (90, 4, "bf16", 8, False, True),
    (90, 8, "fp16", 64, True, False),
    (80, 4, "fp16", 16, True, False),
]


def test_kernels_compile_for_other_gpus(tmp_path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(CASES)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    for packed, single in json.loads(ran.stdout):
        assert packed >= 16 and single == 0

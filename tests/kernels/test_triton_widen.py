"""The assembler that widens weights, every byte that there is, by a reading of its few instructions in numpy."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)

from penstock.kernels.int_matrix import pack_four
from penstock.kernels.triton import widen

pytestmark = pytest.mark.torch

BYTES = torch.arange(256, dtype=torch.uint8)


def halves(words: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int16).copy()).view(dtype)


def run(program: str, inputs: list[np.ndarray], outputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Runs it on words [n] -> the pairs in its outputs, [n, 2 * outputs]."""
    held = {f"${outputs + i}": words for i, words in enumerate(inputs)}

    def of(name: str) -> np.ndarray:
        return held[name] if name in held else np.full(len(inputs[0]), int(name, 0), np.uint32)

    for line in re.findall(r"^\s*([a-z0-9.]+ .*);", program, re.M):
        op, _, rest = line.partition(" ")
        to, *names = (name.strip() for name in rest.split(","))
        if op == ".reg":
            continue
        a, *more = (of(name) for name in names)
        kind = op.split(".")[0]
        if kind == "mov":
            held[to] = a
        elif kind == "shr":
            held[to] = a >> more[0]
        elif kind in ("and", "xor"):
            held[to] = a & more[0] if kind == "and" else a ^ more[0]
        elif kind == "lop3":
            assert names[3] == "0xEA"
            held[to] = a & more[0] | more[1]
        elif kind == "prmt":
            octets = np.stack([a, more[0]], 1).copy().view(np.uint8)
            picks = [int(names[2], 0) >> 4 * i & 7 for i in range(4)]
            held[to] = octets[:, picks].copy().view(np.uint32)[:, 0]
        else:
            assert kind == "fma"
            x, y, z = (halves(v, dtype).double() for v in (a, *more))
            held[to] = (x * y + z).to(dtype).view(torch.int16).numpy().view(np.uint32)
    found = [halves(held[f"${i}"], dtype).view(-1, 2) for i in range(outputs)]
    return torch.cat(found, 1).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zero", [0, 8, 16])
def test_four_bits(dtype, zero):
    program = widen._FOUR_BF16 if dtype == torch.bfloat16 else widen._FOUR_F16
    numbers = torch.randint(0, 16, (1, 4096), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = widen.in_halves(pack_four(numbers), 4).numpy().view(np.uint32)[0]
    magic = 128.0 if dtype == torch.bfloat16 else 1024.0
    less = torch.full((2 * len(words),), -magic - zero, dtype=dtype).view(torch.int16).numpy().view(np.uint32)
    found = run(program.value, [words, *[less] * 4], 4, dtype)
    assert torch.equal(found.flatten(), numbers[0].double() - zero)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("float8", [False, True])
def test_eight_bits(dtype, float8):
    programs = {
        (torch.bfloat16, False): widen._EIGHT_BF16, (torch.bfloat16, True): widen._FLOAT8_BF16,
        (torch.float16, False): widen._EIGHT_F16, (torch.float16, True): widen._FLOAT8_F16,
    }  # fmt: skip
    found = run(programs[dtype, float8].value, [BYTES.numpy().view(np.uint32)], 2, dtype).flatten()
    right = BYTES.view(torch.float8_e4m3fn if float8 else torch.int8).double()
    sound = ~right.isnan()
    assert torch.equal(found[sound], right[sound])

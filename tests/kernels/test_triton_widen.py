"""The assembler that widens weights, every byte that there is, by a reading of its few instructions
in numpy."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)

from penstock.kernels.fp4_matrix import E2M1
from penstock.kernels.int_matrix import pack_four
from penstock.kernels.triton.linear import linear_four, widen

pytestmark = pytest.mark.torch

BYTES = torch.arange(256, dtype=torch.uint8)


def halves(words: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int16).copy()).view(dtype)


def run(program: str, inputs: list[np.ndarray], outputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Runs it on words [n] -> the pairs in its outputs, [n, 2 * outputs]."""
    found = [
        halves(words, dtype).view(-1, 2) for words in run_words(program, inputs, outputs, dtype)
    ]
    return torch.cat(found, 1).double()


def looked_up(a: np.ndarray, b: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """prmt: a byte of b and a for each four bits; behind a set upper one its sign."""
    octets = np.stack([a, b], 1).copy().view(np.uint8)
    picks = selectors[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
    found = np.take_along_axis(octets, (picks & 7).astype(np.int64), 1)
    found = np.where(picks & 8, np.where(found & 128, 255, 0), found).astype(np.uint8)
    return found.view(np.uint32)[:, 0]


def run_words(
    program: str, inputs: list[np.ndarray], outputs: int, dtype: torch.dtype
) -> list[np.ndarray]:
    """Runs it on words [n] -> its outputs, [n] each."""
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
        elif kind == "shl":
            held[to] = a << more[0]
        elif kind == "or":
            held[to] = a | more[0]
        elif kind in ("and", "xor"):
            held[to] = a & more[0] if kind == "and" else a ^ more[0]
        elif kind == "lop3":
            assert names[3] == "0xEA"
            held[to] = a & more[0] | more[1]
        elif kind == "prmt":
            held[to] = looked_up(a, *more)
        else:
            assert kind == "fma"
            x, y, z = (halves(v, dtype).double() for v in (a, *more))
            held[to] = (x * y + z).to(dtype).view(torch.int16).numpy().view(np.uint32)
    return [held[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zero", [0, 8, 16])
def test_four_bits(dtype, zero):
    program = widen._FOUR_BF16 if dtype == torch.bfloat16 else widen._FOUR_F16
    numbers = torch.randint(
        0, 16, (1, 4096), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    words = widen.in_halves(pack_four(numbers), 4).numpy().view(np.uint32)[0]
    magic = 128.0 if dtype == torch.bfloat16 else 1024.0
    less = (
        torch.full((2 * len(words),), -magic - zero, dtype=dtype)
        .view(torch.int16)
        .numpy()
        .view(np.uint32)
    )
    found = run(program.value, [words, *[less] * 4], 4, dtype)
    assert torch.equal(found.flatten(), numbers[0].double() - zero)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("float8", [False, True])
def test_eight_bits(dtype, float8):
    programs = {
        (torch.bfloat16, False): widen._EIGHT_BF16,
        (torch.bfloat16, True): widen._FLOAT8_BF16,
        (torch.float16, False): widen._EIGHT_F16,
        (torch.float16, True): widen._FLOAT8_F16,
    }
    found = run(programs[dtype, float8].value, [BYTES.numpy().view(np.uint32)], 2, dtype).flatten()
    right = BYTES.view(torch.float8_e4m3fn if float8 else torch.int8).double()
    sound = ~right.isnan()
    assert torch.equal(found[sound], right[sound])


SIGNED = torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low, high", [(30 << 3 | 7, 13 << 3), (6 << 3, 29 << 3 | 5)])
def test_floats_of_four_bits(dtype, low, high):
    """Numbers in both halves of every byte, each half by a scale of its own."""

    def factor(octet):
        bits = (octet << 4 | 0x7000) if dtype == torch.bfloat16 else octet << 7
        return np.full(64, bits << 16 | bits, np.uint32), (1 + (octet & 7) / 8) * 2.0 ** (
            (octet >> 3) - 29
        )

    (low_by, low_worth), (high_by, high_worth) = factor(low), factor(high)
    program = widen._FP4_BF16 if dtype == torch.bfloat16 else widen._FP4_F16
    words = BYTES.numpy().view(np.uint32)
    found = run(program.value, [words, low_by, low_by, high_by, high_by], 4, dtype)
    assert torch.equal(found[:, :4].flatten(), SIGNED[BYTES.int() & 15] * low_worth)
    assert torch.equal(found[:, 4:].flatten(), SIGNED[BYTES.int() >> 4] * high_worth)


def test_floats_of_four_bits_as_whole_numbers():
    words, first = BYTES.numpy().view(np.uint32), []
    for register in ("$0", "$1"):
        told = re.search(rf"add.u32 \{register}, t, (0x[0-9A-F]+);", linear_four._FIRST.value)
        first.append(np.full(64, int(told[1], 16), np.uint32))
    low, high = run_words(linear_four._TWICE.value, [words, *first], 2, torch.bfloat16)
    for got, shift in ((low, 0), (high, 4)):
        right = linear_four.ABOVE.value + 2 * SIGNED[BYTES.int() >> shift & 15]
        assert got.view(np.uint8).tolist() == right.tolist()

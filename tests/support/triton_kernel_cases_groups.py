"""What the Triton column's products in groups are held to, on any device: against fp64 of what the numbers are worth.
Import the kernels' environment first; functions assert.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton_kernel_cases import check_one_row_gate, drawn

from penstock.kernels.int_matrix import pack_four
from penstock.kernels.triton import linear_groups, stream_groups
from penstock.kernels.triton.stream_groups import GroupMatrix, Pieces

FLOAT8 = 1  # bits of what is neither four nor eight


def matrix_of(
    device: str, dtype: torch.dtype, bits: int, n: int, k: int, group: int | None = None, zeros: bool = False
) -> tuple[GroupMatrix, Tensor]:
    """A prepared matrix with every number that there is, groups of different scales, and what it is worth in fp64."""
    rng = torch.Generator().manual_seed(n + k + bits)
    group = 128 if bits == FLOAT8 else group or k
    groups = -(-k // group)
    largest = 448 if bits == FLOAT8 else 2**bits
    scale = ((torch.rand(n, groups, generator=rng) + 0.05) * k**-0.5 / largest).to(dtype)
    scale[0] *= 100
    if bits == FLOAT8:
        scale = scale.float()
        octets = torch.randint(0, 256, (n, k), generator=rng, dtype=torch.int16).to(torch.uint8)
        octets[octets & 0x7F == 0x7F] = 0  # no NaN
        numbers = octets.view(torch.float8_e4m3fn)
        worth = numbers.double() * scale.double().repeat_interleave(group, 1)[:, :k]
        return linear_groups.prepare_linear_fp8_groups(numbers.to(device), scale.to(device), dtype), worth
    middle = 2 ** (bits - 1)
    unsigned = torch.randint(0, 2**bits, (n, k), generator=rng, dtype=torch.int16)
    zero = torch.full((n, groups), middle)
    if zeros:
        zero = torch.randint(0, 2**bits + 1, (n, groups), generator=rng)
    worth = (unsigned - zero.repeat_interleave(group, 1)).double() * scale.double().repeat_interleave(group, 1)
    packed = pack_four(unsigned.to(torch.uint8)) if bits == 4 else (unsigned - 128).to(torch.int8)
    kept = (zero - (128 if bits == 8 else 0)).to(dtype).to(device) if zeros else None
    return linear_groups.prepare_linear_int(packed.to(device), scale.to(device), kept, dtype), worth


def check_products(
    device: str, dtype: torch.dtype, rows: int, bits: int, n: int, k: int, group: int | None, zeros: bool,
    cut: Pieces | None = None,
) -> None:  # fmt: skip
    """The product of so many rows against fp64, with and without a bias; of a cut, the same bits each time."""
    matrix, worth = matrix_of(device, dtype, bits, n, k, group, zeros)
    wide = drawn(rows, k + 8, seed=1, dtype=dtype)
    x, bias = wide[:, :k], drawn(n, seed=2, dtype=dtype)
    x[0] *= 30
    there = wide.to(device)[:, :k]
    size = x.double().abs() @ worth.abs().T  # of the sums before anything cancels
    rounded = cut is None and rows > linear_groups.MOST_STREAMED  # the weight, on its way to the library
    kept = torch.finfo(dtype).eps if rounded else 2.0**-18
    for more in (None, bias):
        wanted = x.double() @ worth.T + (0 if more is None else more.double())
        given = None if more is None else more.to(device)
        if cut is None:
            got = linear_groups.linear_int(there, matrix, given)
        else:
            got = stream_groups.streamed_groups(there, matrix, given, cut)
            assert torch.equal(got, stream_groups.streamed_groups(there, matrix, given, cut))
        bound = wanted.abs() * 2 * torch.finfo(dtype).eps + size * kept + 1e-6
        assert got.dtype == dtype and ((got.double().cpu() - wanted).abs() <= bound).all()


def check_many_rows(
    device: str, dtype: torch.dtype, rows: int, bits: int, n: int, k: int, group: int | None, zeros: bool
) -> None:
    """What is widened for the library's product is right to the dtype's rounding, also some outputs at a time."""
    matrix, worth = matrix_of(device, dtype, bits, n, k, group, zeros)
    for first, count in ((0, n), (n // 3, n - n // 2)):
        got = linear_groups.widened(matrix, first, count).double().cpu()
        right = worth[first : first + count]
        assert ((got - right).abs() <= right.abs() * torch.finfo(dtype).eps + 2.0**-24).all()  # float16's least
    x, bias = drawn(rows, k, seed=1, dtype=dtype), drawn(n, seed=2, dtype=dtype)
    size = x.double().abs() @ worth.abs().T
    for more in (None, bias):
        wanted = x.double() @ worth.T + (0 if more is None else more.double())
        got = linear_groups.by_library(x.to(device), matrix, None if more is None else more.to(device))
        bound = wanted.abs() * 2 * torch.finfo(dtype).eps + size * torch.finfo(dtype).eps
        assert got.dtype == dtype and ((got.double().cpu() - wanted).abs() <= bound + 1e-6).all()


def check_one_row(
    device: str, dtype: torch.dtype, bits: int, d: int, inner: int, zeros: bool
) -> None:  # fmt: skip
    """The fused gate of a layer's one row, on weights of four bits, eight, or float8 in blocks."""

    def matrix(device: str, dtype: torch.dtype, n: int, k: int) -> tuple[GroupMatrix, Tensor]:
        prepared, worth = matrix_of(device, dtype, bits, n, k, 64 if k % 64 == 0 else 32, zeros)
        return prepared, worth.to(device)

    check_one_row_gate(device, dtype, d, inner, matrix)

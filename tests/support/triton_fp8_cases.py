"""What the Triton column's float8 kernels are held to, on any device: rows in eight bits against plain torch, products
against fp64 of the very numbers that they are given. Import the kernels' environment first; functions assert.
"""

from __future__ import annotations

import torch
from kernels_naive import assert_close
from torch import Tensor
from triton_kernel_cases import drawn

from penstock.kernels.fp8_rows import Fp8Rows
from penstock.kernels.reference import activation as plain_activation
from penstock.kernels.reference import fp8 as plain_fp8
from penstock.kernels.reference import norm as plain_norm
from penstock.kernels.triton import activation, fp8, linear_fp8, norm
from penstock.quant.fp8 import to_fp8


def check_rows(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    """Norms, gates and what attention leaves, in eight bits; a row of zeros and one of large numbers among them."""
    x, residual, weight = (
        drawn(*s, seed=i, by=2.0, dtype=dtype) for i, s in enumerate([(rows, width)] * 2 + [(width,)])
    )
    x[-1], residual[-1] = 0.0, 0.0
    x[0] *= 1e4
    wide = drawn(rows, width + 24, seed=5, dtype=dtype).to(device)[:, :width]  # rows that lie apart
    gate_up = drawn(rows, 2 * width, seed=6, by=4.0, dtype=dtype)
    here = [t.clone().to(device) for t in (x, residual, weight, gate_up)]
    same_rows(fp8.quantize_rows(here[0]), plain_fp8.quantize_rows(x))
    same_rows(fp8.quantize_rows(wide), plain_fp8.quantize_rows(wide.cpu()))
    same_rows(norm.rms_norm(here[0], here[2], 1e-5, True), plain_norm.rms_norm(x, weight, 1e-5, True))
    got, total = norm.add_rms_norm(here[0], here[1], here[2], 1e-5, True)
    wanted, sum_of = plain_norm.add_rms_norm(x, residual, weight, 1e-5, True)
    assert torch.equal(total.cpu(), sum_of)
    same_rows(got, wanted)
    same_rows(activation.silu_mul(here[3], True), plain_activation.silu_mul(gate_up.clone(), True))
    same_rows(activation.gelu_mul(here[3], True), plain_activation.gelu_mul(gate_up.clone(), True))


def same_rows(got: object, wanted: object) -> None:
    """The same scales but for rounding, and numbers at most a step of e4m3 apart, few of them at all."""
    assert isinstance(got, Fp8Rows) and isinstance(wanted, Fp8Rows)
    torch.testing.assert_close(got.scale.cpu(), wanted.scale, rtol=2.0**-7, atol=0)
    a, b = got.numbers.cpu().float() * got.scale.cpu(), wanted.numbers.float() * wanted.scale
    off = (a - b).abs()
    assert (off <= b.abs() * 2.0**-3 + wanted.scale * 2.0**-8).all()
    assert float((off > b.abs() * 2.0**-6).float().mean()) < 0.1


def matrix_of(device: str, dtype: torch.dtype, n: int, k: int) -> tuple[linear_fp8.Fp8Matrix, Tensor]:
    """A prepared matrix, a row of it all zeros and one of large numbers, and what it is worth [n, k] in fp64."""
    weight = drawn(n, k, seed=3, by=k**-0.5)
    weight[0] *= 300.0
    weight[-1] = 0.0
    numbers, scale = to_fp8(weight)
    prepared = linear_fp8.prepare_linear_fp8(numbers.to(device), scale[:, 0].to(device), dtype)
    return prepared, numbers.double() * scale.double()


def check_products(device: str, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    """Every form for this number of rows against fp64: wide rows, rows in eight bits; with and without a bias."""
    matrix, worth = matrix_of(device, dtype, n, k)
    x, bias = drawn(rows, k, seed=1, dtype=dtype), drawn(n, seed=2, dtype=dtype)
    eight = plain_fp8.quantize_rows(x)
    there = Fp8Rows(eight.numbers.to(device), eight.scale.to(device))
    rounded = (eight.numbers.double() * eight.scale.double()) @ worth.T
    exact = x.double() @ worth.T if rows <= 16 else rounded
    for more in (None, bias):
        plus = 0 if more is None else more.double()
        behind = None if more is None else more.to(device)
        assert_products(linear_fp8.linear_fp8(there, matrix, behind), rounded + plus, dtype)
        wide = linear_fp8.linear_fp8(x.to(device), matrix, behind)
        assert_products(wide, exact + plus, dtype)


def assert_products(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within the rounding of the answer and of 14 bits that a float8 product keeps of a sum (Hopper's tensor cores)."""
    most = wanted.abs().amax(0, keepdim=True)
    bound = wanted.abs() * torch.finfo(dtype).eps + most * (2.0**-11 if got.is_cuda else 2.0**-20) + 1e-6
    assert got.dtype == dtype and ((got.double().cpu() - wanted).abs() <= bound).all()


def check_same_bits(device: str, dtype: torch.dtype, n: int, k: int) -> None:
    """A row's product doesn't move with the rows beside it, nor from one call to the next, where K is split too."""
    matrix, _ = matrix_of(device, dtype, n, k)
    x = plain_fp8.quantize_rows(drawn(40, k, dtype=dtype))
    x = Fp8Rows(x.numbers.to(device), x.scale.to(device))
    cut = linear_fp8.Tiles(64, 64, 64, 3, 3, 4)
    sums = torch.empty(3 * 64 * 64 * -(-n // 64), dtype=torch.float32, device=device)
    matrix = linear_fp8.Fp8Matrix(matrix.streamed, dtype, False, sums, matrix.arrived)
    first = linear_fp8.streamed_fp8(x, matrix, tiles=cut)
    for _ in range(3):
        assert torch.equal(linear_fp8.streamed_fp8(x, matrix, tiles=cut), first)
    some = Fp8Rows(x.numbers[7:20].contiguous(), x.scale[7:20].contiguous())
    assert_close(linear_fp8.streamed_fp8(some, matrix, tiles=cut).cpu(), first[7:20].cpu().double())

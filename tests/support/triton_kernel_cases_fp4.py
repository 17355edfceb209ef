"""What the Triton column's products with four-bit floats are held to, on any device: against fp64
of what the numbers are worth. Import the kernels' environment first; functions assert.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton_kernel_cases import check_one_row_gate, drawn
from triton_kernel_cases_groups import assert_same_row

from penstock.kernels.fixed_row import FixedRow, to_fixed
from penstock.kernels.fp4_groups import MX_GROUP, NV_GROUP
from penstock.kernels.fp4_matrix import E2M1
from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.int_matrix import pack_four
from penstock.kernels.triton.linear import fp8, linear_four, linear_fp4, stream_fp4
from penstock.kernels.triton.linear.stream_fp4 import Fp4Weight, Slices

SIGNED = torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.float64)


def stored(
    n: int, k: int, kind: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Numbers, scales, whole and worth in fp64 of a matrix with every number and, where it is large
    enough, every scale that there is: of NVFP4 subnormal ones, 0 and negative ones too; of MXFP4
    such as a row apart by 2 ** 12."""
    rng = torch.Generator().manual_seed(n + k + seed)
    numbers = torch.randint(0, 16, (n, k), generator=rng).to(torch.uint8)
    if kind == "mxfp4":
        scale = torch.randint(103, 116, (n, k // MX_GROUP), generator=rng).to(torch.uint8)
        scale[0] += 12  # answers stay within float16
        each, whole = torch.exp2(scale.double() - 127), None
    else:
        octets = torch.randint(0, 127, (n, k // NV_GROUP), generator=rng).to(torch.uint8)
        octets[1:3, 0] = torch.tensor([0, 0x80 | 0x45])
        scale = octets.view(E4M3)
        whole = (torch.rand(n, generator=rng).double() + 0.1) * k**-0.5 * 1e-2
        whole[0] *= 300
        each = scale.double() * whole[:, None]
    worth = (SIGNED[numbers.int()].unflatten(1, (each.shape[1], -1)) * each[..., None]).flatten(1)
    return pack_four(numbers), scale, whole, worth


def matrix_of(
    device: str, dtype: torch.dtype, n: int, k: int, kind: str, seed: int = 0
) -> tuple[Fp4Weight, Tensor]:
    """A prepared matrix, and what it is worth in fp64."""
    numbers, scale, whole, worth = stored(n, k, kind, seed)
    there = None if whole is None else whole.to(device)
    return linear_fp4.prepare_linear_fp4(numbers.to(device), scale.to(device), there, dtype), worth


def check_products(
    device: str, dtype: torch.dtype, rows: int, n: int, k: int, kind: str, cut: Slices | None = None
) -> None:
    """The product of so many rows, with and without a bias; of a cut, the same bits each time."""
    matrix, worth = matrix_of(device, dtype, n, k, kind)
    apart = drawn(rows, k + 8, seed=1, dtype=dtype)
    x, bias = apart[:, :k], drawn(n, seed=2, dtype=dtype)
    x[0] *= 30
    there = apart.to(device)[:, :k]
    fixed = cut is None and matrix.form(rows) == "fixed"
    given_rows = fp8.quantize_rows(there, "fixed") if fixed else there
    size = x.double().abs() @ worth.abs().T  # of the sums before anything cancels
    # the weight, on its way to the library
    rounded = cut is None and rows > linear_fp4.MOST_STREAMED
    kept = torch.finfo(dtype).eps if rounded else 2.0 ** (-15 if fixed else -18)
    least = (
        x.double().abs().sum(1, keepdim=True) * 2.0**-25 if rounded else 0.0
    )  # what float16's weights are short of
    for more in (None, bias):
        wanted = x.double() @ worth.T + (0 if more is None else more.double())
        given = None if more is None else more.to(device)
        if cut is None:
            got = linear_fp4.linear_fp4(given_rows, matrix, given)
        else:
            got = stream_fp4.streamed_fp4(there, matrix, given, cut)
            assert torch.equal(got, stream_fp4.streamed_fp4(there, matrix, given, cut))
        bound = wanted.abs() * 2 * torch.finfo(dtype).eps + size * kept + least + 1e-6
        assert got.dtype == dtype and ((got.double().cpu() - wanted).abs() <= bound).all()
    assert not matrix.arrived.any()


def check_many_rows(device: str, dtype: torch.dtype, rows: int, n: int, k: int, kind: str) -> None:
    """What is widened for the library's product is right to the dtype's rounding, also some outputs
    at a time."""
    matrix, worth = matrix_of(device, dtype, n, k, kind)
    for first, count in ((0, n), (n // 3, n - n // 2)):
        got = linear_fp4.widened_fp4(matrix, first, count).double().cpu()
        right = worth[first : first + count]
        # float16's least
        assert ((got - right).abs() <= right.abs() * torch.finfo(dtype).eps + 2.0**-24).all()
    x = drawn(rows, k, seed=1, dtype=dtype)
    got = linear_fp4.linear_fp4(x.to(device), matrix, streamed_rows=1)
    wanted, size = x.double() @ worth.T, x.double().abs() @ worth.abs().T
    assert (
        (got.double().cpu() - wanted).abs()
        <= (wanted.abs() * 2 + size) * torch.finfo(dtype).eps + 1e-6
    ).all()


def check_lone(device: str, dtype: torch.dtype, n: int, k: int, kind: str) -> None:
    """What isn't finite in a row stays so; a gated product leaves in fixed point what it leaves
    wide."""
    matrix, _ = matrix_of(device, dtype, 2 * n, k, kind)
    assert matrix.form(1) == "fixed" and matrix.form(2) == "wide"
    x = drawn(1, k, seed=1, dtype=dtype)
    row = fp8.quantize_rows(x.to(device), "fixed")
    plain = linear_four.lone_product(row, matrix, gated=True)
    fixed = linear_four.lone_product(row, matrix, gated=True, form="fixed")
    assert isinstance(plain, Tensor) and isinstance(fixed, FixedRow)
    assert_same_row(fixed, to_fixed(plain.cpu()))
    x[0, 9] = float("nan")
    assert (
        not linear_fp4.linear_fp4(fp8.quantize_rows(x.to(device), "fixed"), matrix).isfinite().any()
    )


def check_gate(device: str, dtype: torch.dtype, d: int, inner: int, kind: str) -> None:
    """The fused norm and gate of a layer's one row."""

    def matrix(device: str, dtype: torch.dtype, n: int, k: int) -> tuple[Fp4Weight, Tensor]:
        prepared, worth = matrix_of(device, dtype, n, k, kind)
        return prepared, worth.to(device)

    # float32 is longer than a row in fixed point
    check_one_row_gate(device, dtype, d, inner, matrix, 40.0 if dtype == torch.float32 else 1.0)

"""What the Triton column's products in groups are held to, on any device: against fp64 of what the
numbers are worth. Import the kernels' environment first; functions assert.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from triton_kernel_cases import check_one_row_gate, drawn

from penstock.kernels.fixed_row import FixedRow, to_fixed, worth_of
from penstock.kernels.fp8_rows import Form, Rows, wide
from penstock.kernels.int_matrix import pack_four
from penstock.kernels.triton.elementwise import activation, norm
from penstock.kernels.triton.linear import fp8, linear_four, linear_groups, stream_groups
from penstock.kernels.triton.linear.stream_groups import GroupMatrix, Pieces

FLOAT8 = 1  # bits of what is neither four nor eight


def matrix_of(
    device: str,
    dtype: torch.dtype,
    bits: int,
    n: int,
    k: int,
    group: int | None = None,
    zeros: bool = False,
) -> tuple[GroupMatrix, Tensor]:
    """A prepared matrix with every number that there is, groups of different scales, and what it is
    worth in fp64."""
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
        return linear_groups.prepare_linear_fp8_groups(
            numbers.to(device), scale.to(device), dtype
        ), worth
    middle = 2 ** (bits - 1)
    unsigned = torch.randint(0, 2**bits, (n, k), generator=rng, dtype=torch.int16)
    zero = torch.full((n, groups), middle)
    if zeros:
        zero = torch.randint(0, 2**bits + 1, (n, groups), generator=rng)
    worth = (
        unsigned - zero.repeat_interleave(group, 1)
    ).double() * scale.double().repeat_interleave(group, 1)
    packed = pack_four(unsigned.to(torch.uint8)) if bits == 4 else (unsigned - 128).to(torch.int8)
    kept = (zero - (128 if bits == 8 else 0)).to(dtype).to(device) if zeros else None
    return linear_groups.prepare_linear_int(packed.to(device), scale.to(device), kept, dtype), worth


def check_products(
    device: str,
    dtype: torch.dtype,
    rows: int,
    bits: int,
    n: int,
    k: int,
    group: int | None,
    zeros: bool,
    cut: Pieces | None = None,
) -> None:
    """The product of so many rows against fp64, with and without a bias; of a cut, the same bits
    each time."""
    matrix, worth = matrix_of(device, dtype, bits, n, k, group, zeros)
    apart = drawn(rows, k + 8, seed=1, dtype=dtype)
    x, bias = apart[:, :k], drawn(n, seed=2, dtype=dtype)
    x[0] *= 30
    there, fixed = apart.to(device)[:, :k], cut is None and matrix.form(rows) == "fixed"
    given_rows = fp8.quantize_rows(there, "fixed") if fixed else there
    size = x.double().abs() @ worth.abs().T  # of the sums before anything cancels
    # the weight, on its way to the library
    rounded = cut is None and rows > linear_groups.MOST_STREAMED
    kept = torch.finfo(dtype).eps if rounded else 2.0 ** (-15 if fixed else -18)
    for more in (None, bias):
        wanted = x.double() @ worth.T + (0 if more is None else more.double())
        given = None if more is None else more.to(device)
        if cut is None:
            got = linear_groups.linear_int(given_rows, matrix, given)
        else:
            got = stream_groups.streamed_groups(there, matrix, given, cut)
            assert torch.equal(got, stream_groups.streamed_groups(there, matrix, given, cut))
        bound = wanted.abs() * 2 * torch.finfo(dtype).eps + size * kept + 1e-6
        assert got.dtype == dtype and ((got.double().cpu() - wanted).abs() <= bound).all()


def check_many_rows(
    device: str,
    dtype: torch.dtype,
    rows: int,
    bits: int,
    n: int,
    k: int,
    group: int | None,
    zeros: bool,
) -> None:
    """What is widened for the library's product is right to the dtype's rounding, also some outputs
    at a time."""
    matrix, worth = matrix_of(device, dtype, bits, n, k, group, zeros)
    for first, count in ((0, n), (n // 3, n - n // 2)):
        got = linear_groups.widened(matrix, first, count).double().cpu()
        right = worth[first : first + count]
        # float16's least
        assert ((got - right).abs() <= right.abs() * torch.finfo(dtype).eps + 2.0**-24).all()
    x, bias = drawn(rows, k, seed=1, dtype=dtype), drawn(n, seed=2, dtype=dtype)
    size = x.double().abs() @ worth.abs().T
    for more in (None, bias):
        wanted = x.double() @ worth.T + (0 if more is None else more.double())
        given = None if more is None else more.to(device)
        got = linear_groups.by_library(
            x.to(device), (n, k), partial(linear_groups.widened, matrix), given
        )
        bound = wanted.abs() * 2 * torch.finfo(dtype).eps + size * torch.finfo(dtype).eps
        assert got.dtype == dtype and ((got.double().cpu() - wanted).abs() <= bound + 1e-6).all()


def check_one_row(
    device: str, dtype: torch.dtype, bits: int, d: int, inner: int, zeros: bool
) -> None:
    """The fused gate of a layer's one row, on weights of four bits, eight, or float8 in blocks."""

    def matrix(device: str, dtype: torch.dtype, n: int, k: int) -> tuple[GroupMatrix, Tensor]:
        prepared, worth = matrix_of(device, dtype, bits, n, k, 64 if k % 64 == 0 else 32, zeros)
        return prepared, worth.to(device)

    check_one_row_gate(device, dtype, d, inner, matrix)


def assert_same_row(got: FixedRow, wanted: FixedRow) -> None:
    assert torch.equal(got.numbers.cpu(), wanted.numbers) and torch.equal(
        got.sums.cpu(), wanted.sums
    )
    assert torch.equal(got.scale.cpu(), wanted.scale)


def check_fixed_row(device: str, dtype: torch.dtype, k: int) -> None:
    """A row in fixed point as a kernel writes it: the reference's bits, and as near to the row as
    it must be."""
    x = drawn(1, k, seed=1, dtype=dtype)
    x[0, 5] *= 200
    x[0, 16:32] = 0
    x[0, 32:48] *= 2.0**-12
    made = to_fixed(x)
    assert_same_row(fp8.quantize_rows(x.to(device), "fixed"), made)
    off = (worth_of(made) - x.double()).abs().view(-1, 16)
    most = x.double().abs().view(-1, 16).amax(1, keepdim=True)
    assert (off <= most * 2.0**-15).all()
    near = x.double().abs().view(-1, 16) >= most * 2.0**-6
    assert dtype != torch.bfloat16 or (off[near] == 0).all()
    check_writers(device, dtype, k)
    for odd in (float("nan"), float("inf"), -float("inf")):
        x[0, 7] = odd
        assert torch.isinf(fp8.quantize_rows(x.to(device), "fixed").scale[0]).item()


def check_writers(device: str, dtype: torch.dtype, k: int) -> None:
    """What norms and gates write so is worth what they write wide, to the dtype's rounding and this
    form's."""
    x, weight, both = (
        drawn(*s, seed=2, by=2.0, dtype=dtype).to(device) for s in ((1, k), (k,), (1, 2 * k))
    )

    def added(form: Form) -> Rows:
        return norm.add_rms_norm(x, x.clone(), weight, 1e-5, form)[0]

    for write in (
        added,
        lambda form: norm.rms_norm(x, weight, 1e-5, form),
        lambda form: activation.silu_mul(both, form),
        lambda form: activation.gelu_mul(both, form),
    ):
        got, plain = write("fixed"), wide(write("wide")).double().cpu()
        assert isinstance(got, FixedRow)
        most = plain.abs().view(-1, 16).amax(1).repeat_interleave(16)
        worth = worth_of(FixedRow(got.numbers.cpu(), got.scale.cpu(), got.sums.cpu()))
        assert (
            (worth - plain).abs() <= plain.abs() * torch.finfo(dtype).eps + most * 2.0**-15
        ).all()


def check_lone_products(device: str, dtype: torch.dtype, n: int, k: int, group: int) -> None:
    """The product of a row in fixed point against fp64, with a bias and without; what isn't finite
    stays so."""
    matrix, worth = matrix_of(device, dtype, 4, n, k, group)
    assert matrix.form(1) == "fixed" and matrix.form(2) == "wide"
    x, bias = drawn(1, k, seed=1, dtype=dtype), drawn(n, seed=2, dtype=dtype)
    x[0, 5] *= 100
    row = fp8.quantize_rows(x.to(device), "fixed")
    size = x.double().abs() @ worth.abs().T
    for more in (None, bias):
        wanted = x.double() @ worth.T + (0 if more is None else more.double())
        got = linear_groups.linear_int(row, matrix, None if more is None else more.to(device))
        bound = wanted.abs() * 2 * torch.finfo(dtype).eps + size * 2.0**-15 + 1e-6
        assert got.dtype == dtype and ((got.double().cpu() - wanted).abs() <= bound).all()
    x[0, 9] = float("nan")
    assert (
        not linear_groups.linear_int(fp8.quantize_rows(x.to(device), "fixed"), matrix)
        .isfinite()
        .any()
    )


def check_lone_gate(device: str, dtype: torch.dtype, inner: int, k: int, group: int) -> None:
    """Gate and up of such a row, written in fixed point for the next: the same as what is written
    wide."""
    matrix, _ = matrix_of(device, dtype, 4, 2 * inner, k, group)
    row = fp8.quantize_rows(drawn(1, k, seed=1, dtype=dtype).to(device), "fixed")
    plain = linear_four.lone_product(row, matrix, gated=True)
    fixed = linear_four.lone_product(row, matrix, gated=True, form="fixed")
    assert isinstance(plain, Tensor) and isinstance(fixed, FixedRow)
    assert_same_row(fixed, to_fixed(plain.cpu()))

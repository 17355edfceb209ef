"""The float8 kernels compiled: sizes of models and awkward ones, every number of rows at which the
form changes."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [(1, 64), (17, 2048), (300, 4096), (33, 14336), (5, 100), (700, 896)], ids=str
)
@pytest.mark.parametrize("form", ["eight", "pair"])
def test_rows_in_eight_bits(dtype, size, form):
    from triton_kernel_cases_fp8 import check_rows

    check_rows("cuda", dtype, *size, form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 33, 64, 128, 129, 256, 257, 600])
@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 14336), (16640, 512), (896, 4864), (70, 100)], ids=str
)
def test_products(dtype, rows, shape):
    from triton_kernel_cases_fp8 import check_products

    check_products("cuda", dtype, rows, *shape)


@pytest.mark.parametrize("size", [(4096, 14336), (896, 4864), (100, 70)], ids=str)
def test_one_row(size):
    from triton_kernel_cases_fp8 import check_one_row

    check_one_row("cuda", torch.bfloat16, *size)


def test_the_same_bits_however_k_is_split():
    from triton_kernel_cases_fp8 import check_same_bits

    check_same_bits("cuda", torch.bfloat16, 700, 4096)


def test_the_library_takes_many_rows_where_it_can():
    from triton_kernel_cases_fp8 import matrix_of

    assert matrix_of("cuda", torch.bfloat16, 96, 64)[0].by_library
    assert not matrix_of("cuda", torch.bfloat16, 70, 100)[0].by_library

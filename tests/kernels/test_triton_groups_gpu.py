"""Products with weights in groups, compiled: sizes of models and awkward ones, every layout, every
way that a number of rows takes."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

DTYPES = [torch.bfloat16, torch.float16]
# bits (1: float8), outputs, inputs, group (None: the row), zeros
CASES = [
    (4, 6144, 4096, 128, False),
    (4, 4096, 14336, 128, True),
    (4, 896, 4864, 64, False),
    (4, 72, 864, 32, True),
    (4, 900, 4096, 32, True),
    (4, 100, 896, None, False),
    (4, 70, 480, 160, True),
    (8, 4096, 4096, None, False),
    (8, 896, 4864, 64, True),
    (8, 70, 100, None, True),
    (8, 300, 512, 32, False),
    (1, 4096, 4096, 128, False),
    (1, 896, 4864, 128, False),
    (1, 70, 300, 128, False),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 300])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(dtype, rows, case):
    from triton_kernel_cases_groups import check_products

    check_products("cuda", dtype, rows, *case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_rows(dtype, case):
    from triton_kernel_cases_groups import check_many_rows

    check_many_rows("cuda", dtype, 130, *case)


@pytest.mark.parametrize("bits", [4, 8, 1])
@pytest.mark.parametrize("rows, warps", [(8, 2), (16, 4), (32, 4), (64, 4)])
def test_the_same_bits_however_k_is_split(bits, rows, warps):
    from triton_kernel_cases_groups import Pieces, check_products

    check_products(
        "cuda", torch.bfloat16, rows, bits, 700, 4096, 128, False, Pieces(rows, 64, 5, 4, warps)
    )


@pytest.mark.parametrize("bits", [4, 8, 1])
def test_a_row_does_not_move_with_those_that_share_its_tile(bits):
    from triton_kernel_cases_groups import drawn, linear_groups, matrix_of

    matrix, _ = matrix_of("cuda", torch.bfloat16, bits, 900, 4096, 128)
    x = drawn(16, 4096, dtype=torch.bfloat16).cuda()
    for first, end in ((0, 2), (3, 8), (0, 8)) if bits == 4 else ((0, 1), (3, 8), (0, 8)):
        alone = linear_groups.linear_int(x[first:end], matrix)
        assert torch.equal(alone, linear_groups.linear_int(x[:8], matrix)[first:end])
    assert torch.equal(
        linear_groups.linear_int(x[2:12], matrix), linear_groups.linear_int(x, matrix)[2:12]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits, zeros", [(4, False), (4, True), (8, False), (1, False)])
@pytest.mark.parametrize("d", [4096, 896])
def test_one_row(dtype, bits, zeros, d):
    from triton_kernel_cases_groups import check_one_row

    check_one_row("cuda", dtype, bits, d, 1408, zeros)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [64, 1104, 4096, 14336])
def test_a_row_in_fixed_point(dtype, k):
    from triton_kernel_cases_groups import check_fixed_row

    check_fixed_row("cuda", dtype, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "n, k, group",
    [(6144, 4096, 128), (4096, 14336, 128), (900, 4864, 64), (33, 896, 32), (100, 1280, 128)],
)
def test_lone_products(dtype, n, k, group):
    from triton_kernel_cases_groups import check_lone_products

    check_lone_products("cuda", dtype, n, k, group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner, k, group", [(14336, 4096, 128), (4864, 896, 64), (48, 256, 32)])
def test_lone_gate(dtype, inner, k, group):
    from triton_kernel_cases_groups import check_lone_gate

    check_lone_gate("cuda", dtype, inner, k, group)

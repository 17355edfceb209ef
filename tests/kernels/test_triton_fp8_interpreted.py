"""The float8 kernels in Triton's interpreter, in float32, in small cases;
the GPU tests sweep them."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
import triton_kernel_cases_fp8 as cases

pytestmark = pytest.mark.torch

CPU, F32 = "cpu", torch.float32


def test_rows_in_eight_bits():
    for rows, width, form in ((1, 7, "eight"), (3, 64, "pair"), (5, 100, "eight")):
        cases.check_rows(CPU, F32, rows, width, form)


@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("shape", [(40, 64), (70, 100)], ids=str)
def test_products(rows, shape):
    cases.check_products(CPU, F32, rows, *shape)


def test_no_rows():
    matrix, _ = cases.matrix_of(CPU, F32, 40, 64)
    none = cases.fp8.quantize_rows(torch.empty(0, 64))
    assert none.numbers.shape == (0, 64) and none.scale.shape == (0, 1)
    assert cases.linear_fp8.linear_fp8(none, matrix).shape == (0, 40)


def test_one_row():
    cases.check_one_row(CPU, F32, 48, 24)


def test_the_same_bits_however_k_is_split():
    cases.check_same_bits(CPU, F32, 70, 400)
